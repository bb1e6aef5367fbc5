#!/usr/bin/env python
# coding: utf-8

# # Data augmentation with preprocessing layers
# In[1]:
import numpy as np
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

# In[2]:
# fake "cats" (bright circle) and "dogs" (bright bar)
rng = np.random.default_rng(0)
n, size = 240, 24
images = rng.normal(80, 25, (n, size, size, 3))
labels = rng.integers(0, 2, n)
yy, xx = np.mgrid[:size, :size]
for i in range(n):
    cx, cy = rng.integers(8, 16, 2)
    if labels[i] == 0:
        m = (xx - cx) ** 2 + (yy - cy) ** 2 < 30
    else:
        m = np.abs(xx - cx) < 3
    images[i][m] += 100
images = np.clip(images, 0, 255).astype("uint8")

# In[3]:
data_augmentation = keras.Sequential([
    layers.RandomFlip("horizontal"),
    layers.RandomRotation(0.1),
    layers.RandomZoom(0.2),
])

# In[4]:
plt.figure(figsize=(4, 4))
for i in range(9):
    aug = data_augmentation(images[:1].astype("float32"), training=True)
    ax = plt.subplot(3, 3, i + 1)
    plt.imshow(np.array(aug[0]).astype("uint8"))
    plt.axis("off")
plt.savefig("augmented.png")

# In[5]:
inputs = keras.Input(shape=(size, size, 3))
x = data_augmentation(inputs)
x = layers.Rescaling(1. / 255)(x)
x = layers.Conv2D(8, 3, strides=2, activation="relu")(x)
x = layers.Conv2D(16, 3, strides=2, activation="relu")(x)
x = layers.GlobalAveragePooling2D()(x)
x = layers.Dropout(0.25)(x)
outputs = layers.Dense(1, activation="sigmoid")(x)
model = keras.Model(inputs, outputs)
model.compile(loss="binary_crossentropy", optimizer="rmsprop", metrics=["accuracy"])

# In[6]:
history = model.fit(images[:200], labels[:200], epochs=2, batch_size=32,
                    validation_data=(images[200:], labels[200:]))

# In[7]:
plt.figure()
plt.plot(history.history["loss"], "bo", label="Training loss")
plt.plot(history.history["val_loss"], "b", label="Validation loss")
plt.legend()
plt.savefig("loss.png")
plt.show()
