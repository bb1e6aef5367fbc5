"""What the cases share: small data, a small model, and how far two lists of weights are apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
from references import Reference, reference

layers, optimizers = keras.layers, keras.optimizers
SIZE, RANK = hvd.size(), hvd.rank()
CLASSES = 5
LOCAL_BATCH = 4
STEPS = 6
BATCH = LOCAL_BATCH * SIZE

_rng = np.random.default_rng(0)
IMAGES = _rng.normal(size=(BATCH * STEPS, 8, 8, 1)).astype("float32")
LABELS = _rng.integers(0, CLASSES, BATCH * STEPS)


def own_part(array: np.ndarray) -> np.ndarray:
    """This rank's examples: its share of each global batch, in order."""
    batches = array.reshape(-1, SIZE, LOCAL_BATCH, *array.shape[1:])
    return batches[:, RANK].reshape(-1, *array.shape[1:])


def small_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(3, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(7, activation="tanh"),
            layers.Dense(CLASSES),
        ]
    )


def crossentropy(**kwargs: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def weights(model: keras.Model) -> list[np.ndarray]:
    return [v.numpy() for v in model.trainable_variables]


def difference(a: Sequence[Any], b: Sequence[Any]) -> float:
    """The largest absolute difference; nan if one is nan."""
    assert len(a) == len(b), (len(a), len(b))
    return float(
        np.max([np.abs(np.asarray(x) - np.asarray(y)).max() for x, y in zip(a, b, strict=True)])
    )


def one_process(make_optimizer: Callable[[], Any]) -> Reference:
    """The weights after plain Keras has trained on whole global batches."""

    def compute() -> dict[str, Any]:
        model = small_model()
        model.compile(make_optimizer(), crossentropy(), jit_compile=False)
        model.fit(IMAGES, LABELS, batch_size=BATCH, shuffle=False, verbose=0)
        return {"weights": weights(model)}

    # Cases have those optimizers in common that have a name.
    name = make_optimizer.__qualname__
    return reference(compute, name="" if "<" in name else f"small.{name}")
