'''Trains an LSTM model on a fake IMDB sentiment classification task.'''
from __future__ import print_function
import numpy as np
from tensorflow.keras.preprocessing import sequence
from tensorflow.keras.models import Sequential
from tensorflow.keras.layers import Dense, Embedding, LSTM
import tensorflow.keras as keras

keras.utils.set_random_seed(0)

max_features = 100
maxlen = 20  # cut texts after this number of words
batch_size = 32

def load_data(n):
    xs, ys = [], []
    for _ in range(n):
        label = np.random.randint(2)
        length = np.random.randint(8, 30)
        s = np.random.randint(10, max_features, size=length)
        s[np.random.rand(length) < 0.3] = 2 + label
        xs.append(s.tolist())
        ys.append(label)
    return xs, np.array(ys)

print('Loading data...')
x_train, y_train = load_data(320)
x_test, y_test = load_data(100)
print(len(x_train), 'train sequences')
print(len(x_test), 'test sequences')

print('Pad sequences (samples x time)')
x_train = sequence.pad_sequences(x_train, maxlen=maxlen)
x_test = sequence.pad_sequences(x_test, maxlen=maxlen)
print('x_train shape:', x_train.shape)

print('Build model...')
model = Sequential()
model.add(Embedding(max_features, 16, mask_zero=True))
model.add(LSTM(16))
model.add(Dense(1, activation='sigmoid'))

model.compile(loss='binary_crossentropy', optimizer='adam', metrics=['accuracy'])

print('Train...')
model.fit(x_train, y_train,
          batch_size=batch_size,
          epochs=3,
          validation_data=(x_test, y_test))
score, acc = model.evaluate(x_test, y_test, batch_size=batch_size)
print('Test score:', score)
print('Test accuracy:', acc)
