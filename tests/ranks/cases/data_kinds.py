"""Data of every kind on ranks, against plain Keras with the same batches in one process."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import scipy.sparse
import tensorflow as tf
from small import RANK, SIZE, difference, layers, optimizers, weights

import hvdtrain

BATCH = 4
EPOCHS = 2
RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 9, 17)
TOKENS = [RNG.integers(1, 9, n).astype("int32") for n in LENGTHS]
X, Y = RNG.normal(size=(37, 3)).astype("float32"), RNG.normal(size=(37, 1)).astype("float32")
PARTS = [slice(0, 14), slice(14, 37)]
"""What each of two ranks has where the user divides the data: the first ends two steps earlier."""


def sentence_model() -> keras.Model:
    inputs = layers.Input((None,), dtype="int32")
    words = layers.Embedding(9, 4)(inputs)
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(words)))


def vector_model() -> keras.Model:
    return keras.Sequential(
        [layers.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]
    )


class Pairs(keras.Model):
    """A siamese network that takes apart what its train_step is given: two inputs and no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = vector_model()

    def call(self, pair: Any) -> Any:
        a, b = pair
        return self.encoder(a) - self.encoder(b)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any) -> Any:
        return tf.reduce_mean(tf.square(y_pred - 1.0))


def sentences() -> tf.data.Dataset:
    signature = tf.TensorSpec((None,), tf.int32), tf.TensorSpec((1,), tf.float32)
    return tf.data.Dataset.from_generator(
        lambda: ((words, [words.mean()]) for words in TOKENS), output_signature=signature
    )


def apart(
    make: Callable[[], keras.Model], given: Any, batches: Any, **fit: Any
) -> dict[str, float]:
    """How far the Trainer on `given` is from plain Keras on `batches`, in weights, loss, evaluation and prediction."""
    loss = "mse" if make is not Pairs else None
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
    # Of data of unknown length Keras counts one step too many in `iterations` at the end of an epoch.
    count = tf.data.experimental.assert_cardinality(sum(1 for _ in batches))
    batches = batches.apply(count)
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(optimizers.Adam(0.01), loss, jit_compile=False)
    wanted = model.fit(batches, **options).history["loss"]
    trainer = hvdtrain.Trainer(
        make, optimizers.Adam(0.01), loss, global_batch_size=BATCH * SIZE, seed=1
    )
    found = trainer.fit(given, **options | fit).history["loss"]
    sharded = {"sharded": True} if "sharded" in fit else {}
    return {
        "weights": difference(weights(trainer.model), weights(model)),
        "loss": difference(found, wanted),
        "evaluate": abs(
            trainer.evaluate(given, verbose=0, **sharded) - model.evaluate(batches, verbose=0)
        ),
    }


def case_kinds() -> dict[str, Any]:
    slices = tf.data.Dataset.from_tensor_slices
    whole = slices((X, Y)).batch(BATCH * SIZE)
    small = sentences().padded_batch(3)
    buckets = sentences().bucket_by_sequence_length(lambda x, _: tf.shape(x)[0], [4, 7], [8, 5, 3])
    pairs = slices(((X, X[::-1]),)).batch(BATCH * SIZE)
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder, "numbers.tfrecord")
        with tf.io.TFRecordWriter(str(records)) as writer:
            for row in np.concatenate([X, Y], axis=1):
                writer.write(row.tobytes())
        files = hvdtrain.data.from_files(records, parse)
        return {
            "smaller padded": apart(sentence_model, small, small),
            "buckets": apart(sentence_model, buckets, buckets),
            "pairs": apart(Pairs, pairs, pairs),
            "sparse": apart(vector_model, (scipy.sparse.csr_matrix(X), Y), whole),
            "files": apart(vector_model, files, whole),
            "shard": apart(
                vector_model, slices((X, Y)).apply(hvdtrain.data.shard).map(same), whole
            ),
            "own parts": apart(
                vector_model,
                (X[PARTS[RANK]], Y[PARTS[RANK]]),
                tf.data.Dataset.from_generator(
                    own_batches,
                    output_signature=(tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1))),
                ),
                sharded=True,
            ),
        }


def case_predictions() -> dict[str, Any]:
    """Outputs as long as the batch's longest sentence, against Keras's."""
    keras.utils.set_random_seed(1)
    inputs = layers.Input((None,), dtype="int32")
    model = keras.Model(inputs, layers.Embedding(9, 2)(inputs))
    data = sentences().map(lambda x, _: x).padded_batch(5)
    wanted = model.predict(data, verbose=0)
    trainer = hvdtrain.Trainer(model, "sgd", "mse", global_batch_size=5)
    found = trainer.predict(data, verbose=0)
    return {"same": found.to_list() == wanted.to_list(), "shape": found.shape.as_list()}


class Centred(keras.Sequential):
    def predict_step(self, data: Any) -> Any:
        outputs = super().predict_step(data)
        return outputs - tf.reduce_mean(outputs, axis=0)


def case_predictions_that_depend_on_the_batch() -> dict[str, list[str]]:
    """Of a step and of a layer, on one example for each rank; and of a model that treats each by itself."""
    told = {}
    for name, kind, more in (
        ("step", Centred, []),
        ("layer", keras.Sequential, [layers.Lambda(lambda x: x / tf.reduce_sum(x, axis=0))]),
        ("none", keras.Sequential, [layers.BatchNormalization(), layers.Dropout(0.5)]),
    ):
        model = kind([layers.Input((3,)), layers.Dense(2), *more])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = hvdtrain.Trainer(model, "sgd", "mse", global_batch_size=2)
            for _ in range(2):
                trainer.predict(X, verbose=0)
        told[name] = [str(one.message) for one in caught if one.category is UserWarning]
    return told


def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    row = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [4])
    return row[:3], row[3:]


def same(*example: Any) -> Any:
    return example


def own_batches() -> Any:
    """The global batches that two ranks with PARTS train: BATCH of each while it lasts."""
    for begin in range(0, 23, BATCH):
        rows = np.concatenate([np.arange(37)[part][begin : begin + BATCH] for part in PARTS])
        yield X[rows], Y[rows]
