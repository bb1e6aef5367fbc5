"""A custom training loop, step by step, on any number of workers.

    python scripts/train_custom_loop.py                     one worker
    hvdtrain run -np 2 scripts/train_custom_loop.py         two workers
    horovodrun -np 2 python scripts/train_custom_loop.py    the same with Horovod's own launcher

Data: the 1,797 handwritten digits of 8x8 pixels in scikit-learn; a fifth is held out. 40 epochs reach a validation
accuracy of 0.98 with any number of workers, and take 15 s on two CPU cores, start-up included.
"""

import argparse

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.collectives.metrics import merge_state
from hvdtrain.data import Share, make_source


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--epochs", type=int, default=40, help="passes over the data [40]")
    parser.add_argument(
        "--batch-size", type=int, default=32, help="examples per step, over all workers [32]"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and shuffles [0]")
    options = parser.parse_args()

    # Prepare: make this process a rank of the job, with the same seed on all ranks.
    rank = hvdtrain.init(options.seed)
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
    x, xv, y, yv = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    model = build_model()
    optimizer = keras.optimizers.Adam(2e-3)
    optimizer.build(model.trainable_variables)
    losses_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    metrics = [keras.metrics.Mean("loss"), keras.metrics.SparseCategoricalAccuracy("accuracy")]

    # Split: all ranks draw the same global batches, and each takes its share of every batch.
    train = make_source(x, y, global_batch_size=options.batch_size, shuffle=True, seed=options.seed)
    held_out = make_source(xv, yv, global_batch_size=256, shuffle=False, seed=options.seed)

    # Replicate: all ranks start with the weights of rank 0.
    hvd.broadcast_variables([*model.variables, *optimizer.variables])

    @tf.function(reduce_retracing=True)
    def train_step(x: tf.Tensor, y: tf.Tensor, part: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            # Forward. The mean over the share is weighted by the share's fraction of the global batch, so that the
            # ranks' losses add up to the mean over the global batch, also if the last batch is divided unevenly.
            loss = tf.reduce_mean(losses_of(y, model(x, training=True))) * part
        # Backward and synchronise: the gradients are summed over the ranks.
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        gradients = tape.gradient(loss, model.trainable_variables)
        # Apply: with the same gradients on all ranks, their weights stay equal.
        optimizer.apply(gradients, model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def test_step(x: tf.Tensor, y: tf.Tensor) -> None:
        logits = model(x, training=False)
        metrics[0].update_state(losses_of(y, logits))
        metrics[1].update_state(y, logits)

    def part_of(share: Share) -> tf.Tensor:
        return tf.constant(share.examples / share.global_examples, tf.float32)

    for epoch in range(options.epochs):
        for share in train.epoch(epoch, rank.rank, rank.size):
            train_step(*map(tf.constant, share.data), part_of(share))
        # Evaluate: each rank evaluates its share; then the metrics are merged over the ranks.
        for metric in metrics:
            metric.reset_state()
        for share in held_out.epoch(0, rank.rank, rank.size):
            # A rank without examples gets one as filler, for steps with collectives.
            if share.examples:
                test_step(*map(tf.constant, share.data))
        merge_state(metrics)
        hvd.check_replicas(model, optimizer)  # Ends the job if the weights have drifted apart.
        loss, accuracy = (float(metric.result()) for metric in metrics)
        if rank.is_first:
            print(f"epoch {epoch + 1}: validation loss {loss:.4f}", flush=True)
    if rank.is_first:
        print(f"validation accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
