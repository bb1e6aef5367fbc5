# Homework 3 - neural network on the digits data
# CS 4780
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras.models import Sequential
from tensorflow.keras.layers import Dense, Input
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.metrics import classification_report, confusion_matrix

keras.utils.set_random_seed(42)

# load the data
X, y = load_digits(return_X_y=True)
X = X[:700]
y = y[:700]

X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, random_state=42)

scaler = StandardScaler()
X_train = scaler.fit_transform(X_train)
X_test = scaler.transform(X_test)

# part (a): build the network
model = Sequential()
model.add(Input(shape=(64,)))
model.add(Dense(32, activation='relu'))
model.add(Dense(16, activation='relu'))
model.add(Dense(10, activation='softmax'))

# part (b): train
model.compile(optimizer='sgd', loss='sparse_categorical_crossentropy', metrics=['accuracy'])
hist = model.fit(X_train, y_train, epochs=3, batch_size=16, verbose=2)

# part (c): report
y_pred = np.argmax(model.predict(X_test), axis=1)
print(confusion_matrix(y_test, y_pred))
print(classification_report(y_test, y_pred, zero_division=0))
loss, acc = model.evaluate(X_test, y_test)
print('loss = %.4f, acc = %.4f' % (loss, acc))
print('final training loss', hist.history['loss'][-1])
