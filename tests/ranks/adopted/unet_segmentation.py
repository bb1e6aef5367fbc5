"""Image segmentation with a small U-Net (after the keras.io oxford pets example)."""
import os
import numpy as np
import keras
from keras import layers

keras.utils.set_random_seed(7)
input_dir, target_dir = "images/", "annotations/"
img_size, num_classes, batch_size = (16, 16), 2, 16

os.makedirs(input_dir, exist_ok=True)
os.makedirs(target_dir, exist_ok=True)
yy, xx = np.mgrid[:16, :16]
for i in range(96):
    cx, cy, r = np.random.randint(4, 12), np.random.randint(4, 12), np.random.randint(2, 5)
    mask = ((xx - cx) ** 2 + (yy - cy) ** 2 < r * r)
    img = np.random.randint(0, 100, (16, 16, 3)) + 120 * mask[..., None]
    keras.utils.save_img(f"{input_dir}{i:03d}.png", img.astype("float32"), scale=False)
    keras.utils.save_img(f"{target_dir}{i:03d}.png", mask[..., None].astype("float32"), scale=False)

input_img_paths = sorted([os.path.join(input_dir, f) for f in os.listdir(input_dir) if f.endswith(".png")])
target_img_paths = sorted([os.path.join(target_dir, f) for f in os.listdir(target_dir) if f.endswith(".png")])
print("Number of samples:", len(input_img_paths))


class Shapes(keras.utils.PyDataset):
    def __init__(self, inputs, targets, **kwargs):
        super().__init__(**kwargs)
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.inputs) // batch_size

    def __getitem__(self, idx):
        sl = slice(idx * batch_size, (idx + 1) * batch_size)
        x = np.stack([keras.utils.img_to_array(keras.utils.load_img(p)) / 255 for p in self.inputs[sl]])
        y = np.stack([keras.utils.img_to_array(keras.utils.load_img(p, color_mode="grayscale"))
                      for p in self.targets[sl]])
        return x, (y > 0).astype("uint8")


def get_model():
    inputs = keras.Input(shape=img_size + (3,))
    c1 = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    p1 = layers.MaxPooling2D()(c1)
    c2 = layers.Conv2D(16, 3, padding="same", activation="relu")(p1)
    p2 = layers.MaxPooling2D()(c2)
    b = layers.Conv2D(16, 3, padding="same", activation="relu")(p2)
    u2 = layers.Concatenate()([layers.Conv2DTranspose(16, 2, strides=2)(b), c2])
    u2 = layers.Conv2D(16, 3, padding="same", activation="relu")(u2)
    u1 = layers.Concatenate()([layers.UpSampling2D(2)(u2), c1])
    outputs = layers.Conv2D(num_classes, 3, activation="softmax", padding="same")(u1)
    return keras.Model(inputs, outputs)


model = get_model()
model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="sparse_categorical_crossentropy")
callbacks = [keras.callbacks.ModelCheckpoint("segmentation.keras", save_best_only=True)]
val_gen = Shapes(input_img_paths[80:], target_img_paths[80:])
model.fit(Shapes(input_img_paths[:80], target_img_paths[:80]), epochs=3, validation_data=val_gen,
          callbacks=callbacks, verbose=2)
val_preds = model.predict(val_gen)
mask = np.argmax(val_preds[0], axis=-1)[..., None]
keras.utils.save_img("pred_000.png", mask * 255.0, scale=False)
print("foreground fraction", mask.mean())
