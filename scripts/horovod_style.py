"""A Horovod script for Keras, without the Trainer: only one import differs from the original.

    python scripts/horovod_style.py                     one worker
    hvdtrain run -np 2 scripts/horovod_style.py         two workers
    horovodrun -np 2 python scripts/horovod_style.py    the same with Horovod's own launcher
    hvdtrain verify -np 2 scripts/horovod_style.py      compare two workers with one

The workers share batches of 32, so any number of them that divides 32 makes the same run. With --grow, each worker has
a batch of 32, and the learning rate grows with their number, as in Horovod's examples.

Data: the 1,797 handwritten digits of 8x8 pixels in scikit-learn; a fifth is held out. 40 epochs reach a validation
accuracy of 0.98, and take 15 to 20 s on two CPU cores, start-up included.
"""

import argparse
from pathlib import Path

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdtrain.keras as hvd  # was: import horovod.tensorflow.keras as hvd


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--epochs", type=int, default=40, help="passes over the data [40]")
    parser.add_argument("--checkpoint", type=Path, help="keep the newest model in this .keras file")
    parser.add_argument("--grow", action="store_true", help="a batch of 32 on each worker")
    options = parser.parse_args()

    # One GPU per process.
    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
        tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)

    batch, rate, warmup_epochs = max(1, 32 // hvd.size()), 1e-3, 0
    if options.grow:
        batch, rate, warmup_epochs = 32, 1e-3 * hvd.size(), 3

    # Each rank shuffles alike, and reads batches that no other rank reads.
    keras.utils.set_random_seed(0)
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
    x, xv, y, yv = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(len(x)).batch(batch)
    batches = batches.shard(hvd.size(), hvd.rank())

    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(rate)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=warmup_epochs),
    ]
    if options.checkpoint and hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(options.checkpoint))
    history = model.fit(
        batches,
        steps_per_epoch=len(x) // batch // hvd.size(),
        epochs=options.epochs,
        validation_data=(xv, yv),
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    if hvd.rank() == 0:
        print(f"validation accuracy {history.history['val_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
