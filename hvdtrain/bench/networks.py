"""The networks used in measurements, their loss and their examples, for Keras or a similar library (tf-keras)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

TOKENS, VOCABULARY = 64, 256
"""Length of a sequence of `transformer`, and how many tokens there are."""


def mnist(library: Any = keras) -> keras.Model:
    """Return the convolutional network of the TensorFlow tutorials on 28x28 images: 347,146 parameters."""
    layers = library.layers
    return library.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def resnet20(library: Any = keras) -> keras.Model:
    """Return ResNet-20 for 32x32 images (He et al. 2015, arXiv:1512.03385, section 4.2)."""
    layers = library.layers

    def convolve(x: Any, filters: int, size: int, stride: int) -> Any:
        x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    image = layers.Input((32, 32, 3))
    x = layers.ReLU()(convolve(image, 16, 3, 1))
    for filters, strides in ((16, (1, 1, 1)), (32, (2, 1, 1)), (64, (2, 1, 1))):
        for stride in strides:
            y = layers.ReLU()(convolve(x, filters, 3, stride))
            y = convolve(y, filters, 3, 1)
            shortcut = x if stride == 1 else convolve(x, filters, 1, stride)
            x = layers.ReLU()(layers.Add()([shortcut, y]))
    return library.Model(image, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def mlp(library: Any = keras, depth: int = 6) -> keras.Model:
    """Return a network of `depth` dense layers of 2048; with six, 22,609,930 parameters.

    Its gradients take long to reduce, compared with the computation.
    """
    layers = library.layers
    hidden = [layers.Dense(2048, activation="relu") for _ in range(depth)]
    return library.Sequential([layers.Input((784,)), *hidden, layers.Dense(10)])


def large(library: Any = keras) -> keras.Model:
    """Return an `mlp` of thirteen layers: 51,984,394 parameters."""
    return mlp(library, 13)


def mlp100m(library: Any = keras) -> keras.Model:
    """Return an `mlp` of 25 layers: 102,340,618 parameters."""
    return mlp(library, 25)


def resnet50(library: Any = keras) -> keras.Model:
    """Return ResNet-50 for 224x224 images (He et al. 2015): 23,608,202 parameters."""
    return library.applications.ResNet50(weights=None, classes=10, classifier_activation=None)


def transformer(library: Any = keras) -> keras.Model:
    """Return a causal transformer of six layers of 384 (6 heads) over bytes: 11,286,400 parameters.

    A causal convolution of the embeddings takes the place of an embedding of positions.
    """
    layers = library.layers
    tokens = layers.Input((TOKENS,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 384)(tokens)
    x = layers.Conv1D(384, 3, padding="causal")(x)
    for _ in range(6):
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        x = layers.Add()([x, layers.MultiHeadAttention(6, 64)(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        y = layers.Dense(384)(layers.Dense(4 * 384, activation="gelu")(y))
        x = layers.Add()([x, y])
    return library.Model(tokens, layers.Dense(VOCABULARY)(x))


MODELS = {
    "large": large,
    "mlp": mlp,
    "mlp-100m": mlp100m,
    "mnist": mnist,
    "resnet20": resnet20,
    "resnet50": resnet50,
    "transformer": transformer,
}


def loss(library: Any = keras) -> keras.losses.Loss:
    """Return the cross-entropy of logits, for integer classes."""
    return library.losses.SparseCategoricalCrossentropy(from_logits=True)


def examples(model: keras.Model, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` random examples of one of MODELS.

    Returns:
        x in the model's input shape, and y int64: images or vectors, float32, with a class below 10 each; or sequences
        of tokens, int32, with the next token of each.
    """
    random = np.random.default_rng(seed)
    shape = (count, *model.input_shape[1:])
    if len(shape) == len(model.output_shape) - 1:
        x = random.integers(0, VOCABULARY, shape, "int32")
        return x, np.roll(x, -1, axis=1).astype("int64")
    return random.random(shape, "float32"), random.integers(0, 10, count)
