# A tour of keras callbacks
import os
import shutil
import datetime
import tensorflow as tf
from tensorflow import keras
from sklearn.datasets import load_digits

keras.utils.set_random_seed(3)

OUT = 'output'
if os.path.exists(OUT):
    shutil.rmtree(OUT)
os.makedirs(os.path.join(OUT, 'ckpt'))
os.makedirs(os.path.join(OUT, 'logs'))

x, y = load_digits(return_X_y=True)
x = x / 16.0
x_train, y_train = x[:400], y[:400]
x_val, y_val = x[400:550], y[400:550]

model = keras.models.Sequential([
    keras.layers.Input(shape=(64,)),
    keras.layers.Dense(32, activation='relu'),
    keras.layers.Dense(10, activation='softmax'),
])
model.compile(optimizer=keras.optimizers.Adam(0.005), loss='sparse_categorical_crossentropy', metrics=['accuracy'])

log_dir = os.path.join(OUT, 'logs', datetime.datetime.now().strftime('%Y%m%d-%H%M%S'))
callbacks = [
    keras.callbacks.ModelCheckpoint(os.path.join(OUT, 'ckpt', 'best.keras'), monitor='val_accuracy',
                                    mode='max', save_best_only=True, verbose=1),
    keras.callbacks.ModelCheckpoint(os.path.join(OUT, 'ckpt', 'ep{epoch:02d}-{val_loss:.2f}.weights.h5'),
                                    save_weights_only=True),
    keras.callbacks.CSVLogger(os.path.join(OUT, 'train_log.csv'), append=False),
    keras.callbacks.TensorBoard(log_dir=log_dir, histogram_freq=1),
    keras.callbacks.EarlyStopping(monitor='val_loss', patience=2, restore_best_weights=True),
    keras.callbacks.ReduceLROnPlateau(monitor='val_loss', factor=0.2, patience=1),
    keras.callbacks.TerminateOnNaN(),
]
model.fit(x_train, y_train, batch_size=32, epochs=3, validation_data=(x_val, y_val), callbacks=callbacks, verbose=2)

print(open(os.path.join(OUT, 'train_log.csv')).read())
print(sorted(os.listdir(os.path.join(OUT, 'ckpt'))))
best = keras.models.load_model(os.path.join(OUT, 'ckpt', 'best.keras'))
print('best model on validation:', best.evaluate(x_val, y_val, verbose=0))
