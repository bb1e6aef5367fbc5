# Image classification from a directory (TensorFlow tutorial style)
import os
import pathlib
import shutil
import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers
from tensorflow.keras.models import Sequential

tf.keras.utils.set_random_seed(123)

# --- create the "flower_photos" folder ---
data_dir = pathlib.Path("flower_photos")
if data_dir.exists():
    shutil.rmtree(data_dir)
rng = np.random.RandomState(0)
colors = {"daisy": (230, 230, 230), "roses": (200, 40, 60), "sunflowers": (220, 200, 30)}
for name, color in colors.items():
    os.makedirs(data_dir / name)
    for i in range(40):
        img = rng.randint(0, 80, (20, 20, 3))
        img[4:16, 4:16] = np.clip(np.array(color) + rng.randint(-40, 40, (12, 12, 3)), 0, 255)
        keras.utils.save_img(str(data_dir / name / f"{i:03d}.png"), img.astype("float32"), scale=False)

image_count = len(list(data_dir.glob("*/*.png")))
print(image_count)

batch_size = 16
img_height = 20
img_width = 20

train_ds = tf.keras.utils.image_dataset_from_directory(
    data_dir, validation_split=0.2, subset="training", seed=123,
    image_size=(img_height, img_width), batch_size=batch_size)
val_ds = tf.keras.utils.image_dataset_from_directory(
    data_dir, validation_split=0.2, subset="validation", seed=123,
    image_size=(img_height, img_width), batch_size=batch_size)

class_names = train_ds.class_names
print(class_names)

AUTOTUNE = tf.data.AUTOTUNE
train_ds = train_ds.cache().prefetch(buffer_size=AUTOTUNE)
val_ds = val_ds.cache().prefetch(buffer_size=AUTOTUNE)

model = Sequential([
    layers.Input((img_height, img_width, 3)),
    layers.Rescaling(1./255),
    layers.Conv2D(8, 3, padding='same', activation='relu'),
    layers.MaxPooling2D(),
    layers.Conv2D(8, 3, padding='same', activation='relu'),
    layers.MaxPooling2D(),
    layers.Flatten(),
    layers.Dense(16, activation='relu'),
    layers.Dense(len(class_names)),
])
model.compile(optimizer='adam',
              loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
              metrics=['accuracy'])
history = model.fit(train_ds, validation_data=val_ds, epochs=3)

img = tf.keras.utils.load_img(data_dir / "roses" / "005.png", target_size=(img_height, img_width))
img_array = tf.expand_dims(tf.keras.utils.img_to_array(img), 0)
score = tf.nn.softmax(model.predict(img_array)[0])
print("This image most likely belongs to {} with a {:.2f} percent confidence."
      .format(class_names[np.argmax(score)], 100 * np.max(score)))
