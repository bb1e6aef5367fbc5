import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

SEED = 1337
BATCH = 32
keras.utils.set_random_seed(SEED)


def residual_block(x, filters, stride=1):
    shortcut = x
    y = layers.Conv2D(filters, 3, strides=stride, padding="same", use_bias=False,
                      kernel_regularizer=keras.regularizers.l2(1e-4))(x)
    y = layers.BatchNormalization()(y)
    y = layers.ReLU()(y)
    y = layers.Conv2D(filters, 3, padding="same", use_bias=False,
                      kernel_regularizer=keras.regularizers.l2(1e-4))(y)
    y = layers.BatchNormalization()(y)
    if stride != 1 or shortcut.shape[-1] != filters:
        shortcut = layers.Conv2D(filters, 1, strides=stride, use_bias=False)(shortcut)
        shortcut = layers.BatchNormalization()(shortcut)
    return layers.ReLU()(layers.Add()([shortcut, y]))


def build_resnet(input_shape=(8, 8, 1), num_classes=10):
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.ReLU()(x)
    x = residual_block(x, 8)
    x = residual_block(x, 16, stride=2)
    x = layers.GlobalAveragePooling2D()(x)
    outputs = layers.Dense(num_classes)(x)
    return keras.Model(inputs, outputs, name="resnet8")


def main():
    images, labels = load_digits().images[..., None] / 16.0, load_digits().target
    images = images.astype(np.float32)
    mean = images[:512].mean()
    images -= mean

    model = build_resnet()
    lr = keras.optimizers.schedules.PiecewiseConstantDecay([24, 40], [0.1, 0.01, 0.001])
    model.compile(
        optimizer=keras.optimizers.SGD(lr, momentum=0.9, nesterov=True),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(images[:512], labels[:512], batch_size=BATCH, epochs=3,
              validation_data=(images[512:700], labels[512:700]), verbose=2)
    model.save("resnet8_digits.keras")
    print("test:", model.evaluate(images[700:900], labels[700:900], verbose=0))


if __name__ == "__main__":
    main()
