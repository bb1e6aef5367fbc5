"""Text: classification, language models, translation; padding masked, tokens weighted."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from keras_io_kit import EXAMPLES, Example, Kit, classes, rng

TOKENS, LENGTH, WIDTH = 12, 6, 8


class TokenAndPosition(layers.Layer):
    def __init__(self, mask_zero: bool = False) -> None:
        super().__init__()
        self.tokens = layers.Embedding(TOKENS, WIDTH, mask_zero=mask_zero)
        self.places = layers.Embedding(LENGTH, WIDTH)

    def call(self, words: Any) -> Any:
        places = ops.broadcast_to(ops.arange(ops.shape(words)[1]), ops.shape(words))
        return self.tokens(words) + self.places(places)


class TransformerBlock(layers.Layer):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.attention = layers.MultiHeadAttention(2, 4)
        self.hidden, self.out = layers.Dense(12, activation="relu"), layers.Dense(WIDTH)
        self.first, self.second = layers.LayerNormalization(), layers.LayerNormalization()

    def call(self, z: Any) -> Any:
        z = self.first(z + self.attention(z, z, use_causal_mask=self.causal))
        return self.second(z + self.out(self.hidden(z)))


def bidirectional_lstm(kit: Kit) -> keras.Model:
    model = keras.Sequential(
        [
            layers.Input((LENGTH,), dtype="int32"),
            layers.Embedding(TOKENS, WIDTH, mask_zero=True),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
            layers.Bidirectional(layers.LSTM(3)),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        kit.optimizer(keras.optimizers.SGD(0.1)), "binary_crossentropy", metrics=["accuracy"]
    )
    return model


def transformer_classifier(kit: Kit) -> keras.Model:
    words = layers.Input((LENGTH,), dtype="int32")
    z = layers.GlobalAveragePooling1D()(TransformerBlock()(TokenAndPosition()(words)))
    model = keras.Model(words, layers.Dense(2, activation="softmax")(z))
    optimizer = kit.optimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def miniature_gpt(kit: Kit) -> keras.Model:
    """Two outputs, of which one has no loss."""
    words = layers.Input((LENGTH,), dtype="int32")
    z = TransformerBlock(causal=True)(TokenAndPosition()(words))
    model = keras.Model(words, [layers.Dense(TOKENS)(z), z])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kit.optimizer(keras.optimizers.SGD(0.1)), loss=[loss, None])
    return model


def translation(kit: Kit) -> keras.Model:
    """An encoder and a decoder; what is padding counts neither in the attention nor in the loss."""
    source = layers.Input((LENGTH,), dtype="int32", name="source")
    target = layers.Input((LENGTH,), dtype="int32", name="target")
    embed = layers.Embedding(TOKENS, WIDTH, mask_zero=True)
    encoded, state = layers.GRU(WIDTH, return_sequences=True, return_state=True)(embed(source))
    decoded = layers.GRU(WIDTH, return_sequences=True)(embed(target), initial_state=state)
    attended = layers.Attention()([decoded, encoded])
    outputs = layers.Dense(TOKENS)(layers.Concatenate()([decoded, attended]))
    model = keras.Model({"source": source, "target": target}, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile(kit.optimizer(keras.optimizers.SGD(0.1)), loss)
    return model


class MaskedLanguageModel(keras.Model):
    """Only the words that were hidden count: the labels of the others are -1, and weigh nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = TokenAndPosition(), TransformerBlock()
        self.head = layers.Dense(TOKENS, activation="softmax")
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, words: Any) -> Any:
        return self.head(self.block(self.embed(words)))

    def train_step(self, data: Any) -> dict[str, Any]:
        words, labels = data
        with tf.GradientTape() as tape:
            found = self(words, training=True)
            counts = tf.cast(labels >= 0, "float32")
            each = keras.losses.sparse_categorical_crossentropy(tf.maximum(labels, 0), found)
            loss = tf.reduce_mean(tf.reduce_sum(each * counts, 1) / tf.reduce_sum(counts, 1))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss, sample_weight=tf.shape(words)[0])
        return {"loss": self.tracker.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]


def masked_language_model(kit: Kit) -> keras.Model:
    model = MaskedLanguageModel()
    model.compile(kit.optimizer(keras.optimizers.SGD(0.1)))
    return model


WORDS = rng(11).integers(1, TOKENS, (EXAMPLES, LENGTH))
PADDED = np.where(np.arange(LENGTH) < rng(12).integers(2, LENGTH + 1, (EXAMPLES, 1)), WORDS, 0)
NEXT = np.roll(PADDED, -1, axis=1)
HIDDEN = np.where(rng(13).random((EXAMPLES, LENGTH)) < 0.3, WORDS, -1)
HIDDEN[:, 0] = WORDS[:, 0]
MODELS = [
    Example("bidirectional lstm", bidirectional_lstm, PADDED, classes(14, 2, 1)),
    Example("transformer classifier", transformer_classifier, WORDS, classes(15, 2)),
    Example("miniature gpt", miniature_gpt, WORDS, np.roll(WORDS, -1, axis=1)),
    Example("masked language model", masked_language_model, WORDS, HIDDEN),
    Example("translation", translation, {"source": PADDED, "target": PADDED}, NEXT),
]
