"""Train a small network on a table of 1,048,576 rows and 10 columns, held in memory as NumPy arrays.

    python scripts/train_tabular.py                     one worker
    hvdtrain run -np 2 scripts/train_tabular.py         two workers
    horovodrun -np 2 python scripts/train_tabular.py    the same with Horovod's own launcher

The labels follow a rule. 5 epochs reach a validation accuracy of 0.974 with any number of workers. Two workers on two
CPU cores take 0.5 to 0.9 s per epoch, and 12 s in all, start-up included.
"""

import argparse

import keras
import numpy as np
from keras import layers

import hvdtrain


def make_table(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return x of shape (rows, 10), and y of shape (rows, 1): 1 where a linear term plus two products is positive."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 10), dtype=np.float32)
    score = x @ np.linspace(-1, 1, 10, dtype=np.float32) + x[:, 0] * x[:, 1] + x[:, 2] * x[:, 3]
    return x, (score > 0).astype("float32")[:, np.newaxis]


def build_model() -> keras.Model:
    return keras.Sequential(
        [layers.Input((10,)), layers.Dense(64, activation="relu"), layers.Dense(1)]
    )


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rows", type=int, default=1_048_576, help="examples to make [1048576]")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data [5]")
    parser.add_argument(
        "--batch-size", type=int, default=4096, help="examples per step, over all workers [4096]"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and shuffles [0]")
    options = parser.parse_args()

    rank = hvdtrain.init(options.seed)
    x, y = make_table(options.rows, options.seed)
    trainer = hvdtrain.Trainer(
        build_model,
        optimizer=keras.optimizers.SGD(0.2),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)],
        global_batch_size=options.batch_size,
        seed=options.seed,
    )
    history = trainer.fit(x, y, validation_split=0.125, epochs=options.epochs).history
    if rank.is_first:
        print(f"validation loss {history['val_loss'][-1]:.4f}")
        print(f"validation accuracy {history['val_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
