# Coursera style: "rock paper scissors" from a zip file
import os
import zipfile
import random
import numpy as np
import tensorflow as tf
from PIL import Image

random.seed(0)
np.random.seed(0)
tf.random.set_seed(0)

# make the zip file (normally we would wget it)
local_zip = './rps.zip'
if not os.path.exists(local_zip):
    with zipfile.ZipFile(local_zip, 'w') as z:
        for c, label in enumerate(['rock', 'paper', 'scissors']):
            for i in range(32):
                a = np.random.randint(0, 90, (18, 18, 3), dtype='uint8')
                if c == 0: a[5:13, 5:13] += 120
                if c == 1: a[:, 3:15] += 120
                if c == 2: a[np.arange(18), np.arange(18)] += 150
                Image.fromarray(a).save('tmp.png')
                z.write('tmp.png', f'rps/{label}/{label}{i:02d}.png')
        os.remove('tmp.png')

zip_ref = zipfile.ZipFile(local_zip, 'r')
zip_ref.extractall('./data/')
zip_ref.close()

rock_dir = os.path.join('./data/rps/rock')
print('total training rock images:', len(os.listdir(rock_dir)))
print(sorted(os.listdir(rock_dir))[:10])

train_ds = tf.keras.utils.image_dataset_from_directory(
    './data/rps', label_mode='categorical', image_size=(18, 18), batch_size=16,
    validation_split=0.25, subset='training', seed=1)
val_ds = tf.keras.utils.image_dataset_from_directory(
    './data/rps', label_mode='categorical', image_size=(18, 18), batch_size=16,
    validation_split=0.25, subset='validation', seed=1)

class myCallback(tf.keras.callbacks.Callback):
  def on_epoch_end(self, epoch, logs={}):
    if logs.get('accuracy') > 0.97:
      print("\nReached 97% accuracy so cancelling training!")
      self.model.stop_training = True

model = tf.keras.models.Sequential([
    tf.keras.layers.Input(shape=(18, 18, 3)),
    tf.keras.layers.Rescaling(1./255),
    tf.keras.layers.Conv2D(8, (3,3), activation='relu'),
    tf.keras.layers.MaxPooling2D(2, 2),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(3, activation='softmax')
])
model.compile(loss='categorical_crossentropy', optimizer=tf.keras.optimizers.RMSprop(learning_rate=0.005), metrics=['accuracy'])
history = model.fit(train_ds, epochs=3, validation_data=val_ds, callbacks=[myCallback()], verbose=1)
model.save("rps.h5")
print(history.history['val_accuracy'])
