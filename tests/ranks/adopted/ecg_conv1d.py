"""Timeseries classification from scratch (FordA / ECG like signals)."""
import keras
import numpy as np
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

rng = np.random.default_rng(55)
keras.utils.set_random_seed(55)


def make(n, length=64):
    t = np.linspace(0, 1, length)
    y = rng.choice([-1, 1], size=n)
    freq = np.where(y == 1, 6.0, 9.0)[:, None]
    x = np.sin(2 * np.pi * freq * t + rng.uniform(0, 6, (n, 1))) + 0.3 * rng.normal(size=(n, length))
    return x, y


def readucr(filename):
    data = np.loadtxt(filename, delimiter="\t")
    return data[:, 1:], data[:, 0].astype(int)


for name, n in (("FordA_TRAIN.tsv", 320), ("FordA_TEST.tsv", 120)):
    x, y = make(n)
    np.savetxt(name, np.c_[y, x], delimiter="\t", fmt="%.5f")

x_train, y_train = readucr("FordA_TRAIN.tsv")
x_test, y_test = readucr("FordA_TEST.tsv")
x_train = x_train.reshape((x_train.shape[0], x_train.shape[1], 1))
x_test = x_test.reshape((x_test.shape[0], x_test.shape[1], 1))
num_classes = len(np.unique(y_train))

idx = np.random.permutation(len(x_train))
x_train = x_train[idx]
y_train = y_train[idx]
y_train[y_train == -1] = 0
y_test[y_test == -1] = 0


def make_model(input_shape):
    input_layer = keras.layers.Input(input_shape)
    h = input_layer
    for _ in range(2):
        h = keras.layers.Conv1D(filters=12, kernel_size=5, padding="same")(h)
        h = keras.layers.BatchNormalization()(h)
        h = keras.layers.ReLU()(h)
    gap = keras.layers.GlobalAveragePooling1D()(h)
    return keras.models.Model(input_layer, keras.layers.Dense(num_classes, activation="softmax")(gap))


model = make_model(x_train.shape[1:])
callbacks = [
    keras.callbacks.ModelCheckpoint("best_model.keras", save_best_only=True, monitor="val_loss"),
    keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_lr=0.0001),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, verbose=1),
]
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["sparse_categorical_accuracy"])
history = model.fit(x_train, y_train, batch_size=32, epochs=3, callbacks=callbacks, validation_split=0.2, verbose=1)
model = keras.models.load_model("best_model.keras")
test_loss, test_acc = model.evaluate(x_test, y_test)
print("Test accuracy", test_acc)
print("Test loss", test_loss)
metric = "sparse_categorical_accuracy"
plt.plot(history.history[metric])
plt.plot(history.history["val_" + metric])
plt.title("model " + metric)
plt.savefig("acc.png")
plt.close()
