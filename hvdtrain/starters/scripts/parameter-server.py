"""Train a recommender with parameter servers. Its embedding tables are larger than the rest of the model.

    hvdtrain run --strategy parameter-server --workers 2 --ps 2 scripts/train_parameter_server.py
    python scripts/train_parameter_server.py                 the same in one process, without servers

The chief runs this script and hands out batches. Workers compute, each at its own speed, with the rows of the tables
that a batch needs; the servers hold the tables, each of them part of the rows. If a worker dies, another one computes
its batch, and it is started again.

The data is generated: which of 5,000 things 20,000 users like, by taste in 4 dimensions. After 3 epochs the model
predicts 94% of the held-out likes and dislikes. Cluster managers that set TF_CONFIG start this script in every
process; in a worker or server, creating the Trainer runs the server.
"""

import argparse

import keras
import numpy as np
from keras import layers

import hvdtrain


def make_ratings(
    count: int, users: int, things: int, seed: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return [user, thing], each of shape (count,), and 1 where the user likes the thing, else 0, shape (count, 1)."""
    rng = np.random.default_rng(seed)
    taste, kind = rng.normal(size=(users, 4)), rng.normal(size=(things, 4))
    user, thing = rng.integers(0, users, count), rng.integers(0, things, count)
    likes = (taste[user] * kind[thing]).sum(axis=1) > 0
    return [user.astype("int32"), thing.astype("int32")], likes.astype("float32")[:, np.newaxis]


def build_model(users: int, things: int, width: int) -> keras.Model:
    user, thing = layers.Input((), dtype="int32"), layers.Input((), dtype="int32")

    def table(rows: int) -> layers.Embedding:
        return layers.Embedding(rows, width, keras.initializers.RandomNormal(stddev=0.3))

    match = layers.Multiply()([table(users)(user), table(things)(thing)])
    return keras.Model([user, thing], layers.Dense(1)(match))


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--users", type=int, default=20_000, help="number of users [20000]")
    parser.add_argument("--things", type=int, default=5_000, help="number of things [5000]")
    parser.add_argument("--ratings", type=int, default=2_000_000, help="examples to make [2000000]")
    parser.add_argument("--width", type=int, default=16, help="numbers in a row of a table [16]")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data [3]")
    parser.add_argument(
        "--batch-size", type=int, default=8192, help="examples per step, over all workers [8192]"
    )
    parser.add_argument("--run-dir", help="folder for metrics and the model [none]")
    parser.add_argument("--seed", type=int, default=0, help="of weights and shuffles [0]")
    options = parser.parse_args()

    rank = hvdtrain.init(options.seed)
    x, y = make_ratings(options.ratings, options.users, options.things, options.seed)
    trainer = hvdtrain.Trainer(
        lambda: build_model(options.users, options.things, options.width),
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)],
        global_batch_size=options.batch_size,
        run_dir=options.run_dir,
        seed=options.seed,
    )
    history = trainer.fit(x, y, validation_split=0.1, epochs=options.epochs).history
    if rank.is_first:
        print(f"validation accuracy {history['val_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
