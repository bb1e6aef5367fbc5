import os, csv, math
import numpy as np
import tensorflow.keras as keras
from tensorflow.keras.callbacks import Callback, LearningRateScheduler
import tensorflow.keras.backend as K
from sklearn.datasets import load_iris
from sklearn.utils import shuffle

keras.utils.set_random_seed(14)
EPOCHS = 3


def step_decay(epoch, lr):
    initial_lrate, drop, epochs_drop = 0.1, 0.5, 1.0
    return initial_lrate * math.pow(drop, math.floor((1 + epoch) / epochs_drop))


class LossHistory(Callback):
    """keeps every batch loss, dumps a csv and the weights after each epoch"""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        os.makedirs(folder, exist_ok=True)

    def on_train_begin(self, logs={}):
        self.losses = []
        self.rows = []

    def on_batch_end(self, batch, logs={}):
        self.losses.append(logs.get('loss'))

    def on_epoch_end(self, epoch, logs={}):
        lr = float(self.model.optimizer.learning_rate)
        self.rows.append([epoch, lr, logs['loss'], logs['val_loss']])
        with open(os.path.join(self.folder, 'log.csv'), 'w', newline='') as f:
            w = csv.writer(f)
            w.writerow(['epoch', 'lr', 'loss', 'val_loss'])
            w.writerows(self.rows)
        np.save(os.path.join(self.folder, 'kernel_%d.npy' % epoch), self.model.layers[0].get_weights()[0])

    def on_train_end(self, logs={}):
        print('number of batches seen:', len(self.losses))


X, Y = load_iris(return_X_y=True)
X, Y = shuffle(X, keras.utils.to_categorical(Y), random_state=0)

model = keras.models.Sequential()
model.add(keras.layers.Dense(12, input_dim=4, activation='relu'))
model.add(keras.layers.Dense(3, activation='softmax'))
sgd = keras.optimizers.SGD(learning_rate=0.0, momentum=0.9, clipnorm=1.0)
model.compile(loss='categorical_crossentropy', optimizer=sgd, metrics=['accuracy'])

hist = LossHistory('history')
lrate = LearningRateScheduler(step_decay, verbose=1)
model.fit(X, Y, validation_split=0.33, epochs=EPOCHS, batch_size=10, callbacks=[lrate, hist], verbose=2)
print('Log:', open('history/log.csv').read().split())
print('first and last batch loss', hist.losses[0], hist.losses[-1])
