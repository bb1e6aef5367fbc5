"""Vision: classification, attention over patches, segmentation, restoration, and reading text by CTC."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops
from keras_io_kit import EXAMPLES, Example, Kit, classes, images, rng

CLASSES = 4
LETTERS = 5


def convnet(kit: Kit) -> keras.Model:
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(4, 3, padding="same", use_bias=False),
            kit.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.SeparableConv2D(6, 3),
            kit.BatchNormalization(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    optimizer = kit.optimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class PatchEncoder(layers.Layer):
    """Cuts an image into patches, and adds to each what stands for its place."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.size = size
        self.projection = layers.Dense(width)
        self.position = layers.Embedding((8 // size) ** 2, width)

    def call(self, image: Any) -> Any:
        patches = ops.image.extract_patches(image, self.size)
        patches = ops.reshape(patches, (-1, patches.shape[1] * patches.shape[2], patches.shape[3]))
        places = ops.expand_dims(ops.arange(patches.shape[1]), 0)
        return self.projection(patches) + self.position(places)


def vision_transformer(kit: Kit) -> keras.Model:
    image = layers.Input((8, 8, 1))
    z = PatchEncoder(4, 8)(image)
    attended = layers.LayerNormalization(epsilon=1e-6)(z)
    z = layers.Add()([z, layers.MultiHeadAttention(2, 4)(attended, attended)])
    hidden = layers.Dense(16, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(z))
    z = layers.Add()([z, layers.Dense(8)(hidden)])
    model = keras.Model(image, layers.Dense(CLASSES)(layers.Flatten()(z)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kit.optimizer(keras.optimizers.SGD(0.05)), loss, metrics=["accuracy"])
    return model


def unet(kit: Kit) -> keras.Model:
    """A class for each pixel."""
    image = layers.Input((8, 8, 1))
    down = layers.Activation("relu")(
        kit.BatchNormalization()(layers.Conv2D(4, 3, 2, "same")(image))
    )
    deep = layers.Conv2D(8, 3, 2, "same", activation="relu")(down)
    up = layers.Conv2DTranspose(4, 3, 2, "same", activation="relu")(deep)
    up = layers.Conv2DTranspose(4, 3, 2, "same")(layers.Concatenate()([up, down]))
    model = keras.Model(image, layers.Conv2D(3, 1, activation="softmax")(up))
    model.compile(
        kit.optimizer(keras.optimizers.SGD(0.1)),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def denoising_autoencoder(kit: Kit) -> keras.Model:
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu", padding="same"),
            layers.MaxPooling2D(2, padding="same"),
            layers.Conv2DTranspose(4, 3, 2, "same", activation="relu"),
            layers.Conv2D(1, 3, activation="sigmoid", padding="same"),
        ]
    )
    model.compile(kit.optimizer(keras.optimizers.Adagrad(0.05)), "binary_crossentropy")
    return model


class CTCLayer(layers.Layer):
    """An endpoint: it adds the loss, from labels that are an input of the model."""

    def call(self, labels: Any, predictions: Any) -> Any:
        lengths = [
            ops.full(ops.shape(one)[:1], one.shape[1], "int32") for one in (labels, predictions)
        ]
        self.add_loss(ops.mean(ops.ctc_loss(labels, predictions, *lengths, mask_index=LETTERS)))
        return predictions


def captcha(kit: Kit) -> keras.Model:
    image = layers.Input((8, 8, 1), name="image")
    labels = layers.Input((2,), dtype="int32", name="label")
    z = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    z = layers.Dense(6, activation="relu")(layers.Reshape((8, 32))(z))
    z = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(z)
    z = CTCLayer()(labels, layers.Dense(LETTERS + 1)(z))
    model = keras.Model({"image": image, "label": labels}, z)
    model.compile(kit.optimizer(keras.optimizers.SGD(0.01)))
    return model


NOISY = rng(7).uniform(0, 1, (EXAMPLES, 8, 8, 1)).astype("float32")
MODELS = [
    Example("convnet", convnet, images(1), classes(1, CLASSES)),
    Example("vision transformer", vision_transformer, images(2), classes(2, CLASSES)),
    Example("u-net", unet, images(3), classes(3, 3, 8, 8)),
    Example("denoising autoencoder", denoising_autoencoder, NOISY, (NOISY > 0.5).astype("float32")),
    Example("captcha by ctc", captcha, {"image": images(5), "label": classes(5, LETTERS, 2)}),
]
