import numpy as np
import keras
from keras import layers
from sklearn.datasets import load_digits

keras.utils.set_random_seed(1)
X, y = load_digits(return_X_y=True)
X = X.reshape((-1, 8, 8, 1)) / 16.

# source task: digits 0-4, target task: 5-9
src = y < 5
Xs, ys = X[src][:400], y[src][:400]
Xt, yt = X[~src][:300], y[~src][:300] - 5

base_model = keras.Sequential([
    keras.Input((8, 8, 1)),
    layers.Conv2D(12, 3, activation="relu", name="conv1"),
    layers.BatchNormalization(name="bn1"),
    layers.Conv2D(16, 3, activation="relu", name="conv2"),
    layers.Flatten(),
], name="base")

pre = keras.Sequential([base_model, layers.Dense(5, activation="softmax")])
pre.compile("adam", "sparse_categorical_crossentropy", metrics=["acc"])
pre.fit(Xs, ys, epochs=2, batch_size=32, verbose=2)
base_model.save_weights("base.weights.h5")

# Freeze the base
base_model.trainable = False
inputs = keras.Input((8, 8, 1))
x = base_model(inputs, training=False)
outputs = layers.Dense(5, activation="softmax")(x)
model = keras.Model(inputs, outputs)
model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="sparse_categorical_crossentropy", metrics=["acc"])
print("trainable weights:", len(model.trainable_weights))
h1 = model.fit(Xt[:240], yt[:240], epochs=2, validation_data=(Xt[240:], yt[240:]), verbose=2)

# Unfreeze and fine tune with a very low learning rate
base_model.trainable = True
for layer in base_model.layers:
    if isinstance(layer, layers.BatchNormalization):
        layer.trainable = False
model.compile(optimizer=keras.optimizers.Adam(1e-5), loss="sparse_categorical_crossentropy", metrics=["acc"])
print("trainable weights:", len(model.trainable_weights))
h2 = model.fit(Xt[:240], yt[:240], epochs=1, validation_data=(Xt[240:], yt[240:]), verbose=2)

acc = h1.history["val_acc"] + h2.history["val_acc"]
print("val acc over both phases:", [round(a, 3) for a in acc])
model.save("finetuned.keras")
