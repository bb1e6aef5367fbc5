"""
Title: Simple MNIST convnet
Description: A simple convnet, adapted to the small 8x8 digits of scikit-learn.
"""

import numpy as np
import keras
from keras import layers
from sklearn.datasets import load_digits

"""
## Prepare the data
"""

num_classes = 10
input_shape = (8, 8, 1)

digits = load_digits()
x = digits.images.astype("float32") / 16.0
y = digits.target
x_train, y_train = x[:600], y[:600]
x_test, y_test = x[600:900], y[600:900]

# Make sure images have shape (8, 8, 1)
x_train = np.expand_dims(x_train, -1)
x_test = np.expand_dims(x_test, -1)
print("x_train shape:", x_train.shape)
print(x_train.shape[0], "train samples")
print(x_test.shape[0], "test samples")

# convert class vectors to binary class matrices
y_train = keras.utils.to_categorical(y_train, num_classes)
y_test = keras.utils.to_categorical(y_test, num_classes)

"""
## Build the model
"""

model = keras.Sequential(
    [
        keras.Input(shape=input_shape),
        layers.Conv2D(16, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(num_classes, activation="softmax"),
    ]
)

model.summary()

"""
## Train the model
"""

batch_size = 64
epochs = 3

model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
model.fit(x_train, y_train, batch_size=batch_size, epochs=epochs, validation_split=0.1)

"""
## Evaluate the trained model
"""

score = model.evaluate(x_test, y_test, verbose=0)
print("Test loss:", score[0])
print("Test accuracy:", score[1])
