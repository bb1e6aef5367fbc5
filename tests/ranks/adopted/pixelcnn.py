"""Autoregressive image model (PixelCNN) on binarised digits."""
import numpy as np
import keras
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

keras.utils.set_random_seed(77)
data = np.where(load_digits().images[:512] < 8, 0, 1).astype("float32")[..., None]
n_residual_blocks = 1


class PixelConvLayer(layers.Layer):
    def __init__(self, mask_type, **kwargs):
        super().__init__()
        self.mask_type = mask_type
        self.conv = layers.Conv2D(**kwargs)

    def build(self, input_shape):
        self.conv.build(input_shape)
        kernel_shape = ops.shape(self.conv.kernel)
        mask = np.zeros(shape=kernel_shape)
        mask[: kernel_shape[0] // 2, ...] = 1.0
        mask[kernel_shape[0] // 2, : kernel_shape[1] // 2, ...] = 1.0
        if self.mask_type == "B":
            mask[kernel_shape[0] // 2, kernel_shape[1] // 2, ...] = 1.0
        self.mask = tf.constant(mask, "float32")

    def call(self, inputs):
        self.conv.kernel.assign(self.conv.kernel * self.mask)
        return self.conv(inputs)


inputs = keras.Input(shape=(8, 8, 1), batch_size=None)
x = PixelConvLayer(mask_type="A", filters=16, kernel_size=5, activation="relu", padding="same")(inputs)
for _ in range(n_residual_blocks):
    y = layers.Conv2D(8, 1, activation="relu")(x)
    y = PixelConvLayer(mask_type="B", filters=16, kernel_size=3, activation="relu", padding="same")(y)
    x = layers.add([x, y])
out = layers.Conv2D(filters=1, kernel_size=1, strides=1, activation="sigmoid", padding="valid")(x)

pixel_cnn = keras.Model(inputs, out)
adam = keras.optimizers.Adam(learning_rate=0.003)
pixel_cnn.compile(optimizer=adam, loss="binary_crossentropy")
pixel_cnn.fit(x=data, y=data, batch_size=64, epochs=2, validation_split=0.1, verbose=2)

# Generate a few images, pixel by pixel
rs = np.random.RandomState(0)
pixels = np.zeros(shape=(2, 8, 8, 1), dtype="float32")
for row in range(8):
    for col in range(8):
        probs = pixel_cnn(pixels).numpy()[:, row, col, :]
        pixels[:, row, col, :] = np.ceil(probs - rs.uniform(size=probs.shape))

for i, pic in enumerate(pixels):
    keras.utils.save_img("generated_image_{}.png".format(i), np.repeat(pic * 255.0, 3, axis=-1))
    print("\n".join("".join("#" if p else "." for p in r) for r in pic[:, :, 0]))
