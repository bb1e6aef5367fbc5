import numpy as np
import keras
from keras import layers
from matplotlib import pyplot as plt

keras.utils.set_random_seed(812)

# artificial daily signals
t = np.arange(600)
small_noise = 10 * np.sin(t / 12) + np.random.normal(0, 0.6, 600)
daily_jumpsup = small_noise.copy()
daily_jumpsup[400:420] += 30

training_mean = small_noise.mean()
training_std = small_noise.std()
training_value = ((small_noise - training_mean) / training_std)[:, None]
print("Number of training samples:", len(training_value))

TIME_STEPS = 32


def create_sequences(values, time_steps=TIME_STEPS):
    output = []
    for i in range(len(values) - time_steps + 1):
        output.append(values[i : (i + time_steps)])
    return np.stack(output)


x_train = create_sequences(training_value)
print("Training input shape: ", x_train.shape)

model = keras.Sequential([
    layers.Input(shape=(x_train.shape[1], x_train.shape[2])),
    layers.Conv1D(filters=16, kernel_size=7, padding="same", strides=2, activation="relu"),
    layers.Conv1D(filters=8, kernel_size=7, padding="same", strides=2, activation="relu"),
    layers.Conv1DTranspose(filters=8, kernel_size=7, padding="same", strides=2, activation="relu"),
    layers.Conv1DTranspose(filters=16, kernel_size=7, padding="same", strides=2, activation="relu"),
    layers.Conv1DTranspose(filters=1, kernel_size=7, padding="same"),
])
model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.001), loss="mse")
history = model.fit(
    x_train, x_train, epochs=3, batch_size=64, validation_split=0.1, verbose=2,
    callbacks=[keras.callbacks.EarlyStopping(monitor="val_loss", patience=5, mode="min")],
)

x_train_pred = model.predict(x_train, verbose=0)
train_mae_loss = np.mean(np.abs(x_train_pred - x_train), axis=1)
threshold = np.max(train_mae_loss)
print("Reconstruction error threshold: ", threshold)

x_test = create_sequences(((daily_jumpsup - training_mean) / training_std)[:, None])
x_test_pred = model.predict(x_test, verbose=0)
test_mae_loss = np.mean(np.abs(x_test_pred - x_test), axis=1).reshape((-1))
anomalies = test_mae_loss > threshold
print("Number of anomaly samples: ", np.sum(anomalies))
print("Indices of anomaly samples: ", np.where(anomalies)[0][:20])

plt.hist(test_mae_loss, bins=50)
plt.xlabel("test MAE loss")
plt.ylabel("No of samples")
plt.show()
