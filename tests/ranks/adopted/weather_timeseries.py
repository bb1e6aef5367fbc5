"""
Title: Timeseries forecasting for weather prediction
"""
import csv
import numpy as np
import keras
import matplotlib.pyplot as plt

plt.switch_backend("agg")
keras.utils.set_random_seed(10)

# "jena climate" lookalike
with open("jena_climate.csv", "w", newline="") as fp:
    w = csv.writer(fp)
    w.writerow(["step", "p", "T", "rh"])
    for i in range(520):
        w.writerow([i, round(990 + 5 * np.sin(i / 50) + np.random.randn(), 2),
                    round(10 + 8 * np.sin(i / 24 * 6.28) + np.random.randn(), 2), round(60 + 10 * np.random.rand(), 2)])

with open("jena_climate.csv") as fp:
    lines = fp.read().split("\n")
header, lines = lines[0].split(","), [l for l in lines[1:] if l]
raw_data = np.array([[float(v) for v in l.split(",")[1:]] for l in lines])
temperature = raw_data[:, 1].copy()

split_fraction = 0.7
train_split = int(split_fraction * len(raw_data))
past, future, batch_size, epochs = 24, 6, 32, 3

mean, std = raw_data[:train_split].mean(axis=0), raw_data[:train_split].std(axis=0)
data = (raw_data - mean) / std

start = past + future
x_train, y_train = data[:train_split], data[start:start + train_split, 1]
dataset_train = keras.utils.timeseries_dataset_from_array(
    x_train, y_train, sequence_length=past, sampling_rate=1, batch_size=batch_size)
x_end = len(data) - past - future
dataset_val = keras.utils.timeseries_dataset_from_array(
    data[train_split:x_end], data[train_split + start:][:x_end - train_split, 1], sequence_length=past, batch_size=batch_size)

for batch in dataset_train.take(1):
    inputs, targets = batch
print("Input shape:", inputs.numpy().shape)
print("Target shape:", targets.numpy().shape)

inputs = keras.layers.Input(shape=(inputs.shape[1], inputs.shape[2]))
lstm_out = keras.layers.LSTM(16)(inputs)
outputs = keras.layers.Dense(1)(lstm_out)
model = keras.Model(inputs=inputs, outputs=outputs)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.005), loss="mse")

path_checkpoint = "model_checkpoint.weights.h5"
es_callback = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=0, patience=5)
modelckpt_callback = keras.callbacks.ModelCheckpoint(
    monitor="val_loss", filepath=path_checkpoint, verbose=1, save_weights_only=True, save_best_only=True)
history = model.fit(dataset_train, epochs=epochs, validation_data=dataset_val,
                    callbacks=[es_callback, modelckpt_callback])
model.load_weights(path_checkpoint)

plt.plot(history.history["loss"], "b", label="Training loss")
plt.plot(history.history["val_loss"], "r", label="Validation loss")
plt.legend()
plt.savefig("loss.png")
for x, y in dataset_val.take(1):
    print("prediction %.3f, true %.3f" % (model.predict(x, verbose=0)[0, 0], y[0]))
