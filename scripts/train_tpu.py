"""Train a residual network on handwritten digits, on all cores of a TPU.

    python scripts/train_tpu.py                              the TPU of this machine, or the one that TPU_NAME names
    python scripts/train_tpu.py --tpu grpc://10.0.0.2:8470   another one

What differs from training on GPUs: the model comes as a function, so that its variables are made on the TPU; it
computes in bfloat16; and 20 steps run without a return to Python, for a TPU's steps are short. Batches have one
size: what the last one of an epoch lacks is filled up and does not count.

Without a TPU it says so and ends. Take strategy="horovod" (or leave it out) to train the same on CPUs or GPUs.
"""

import argparse

import keras
import numpy as np
from keras import layers

import hvdtrain
from hvdtrain.strategies.tpu import TPU


def load_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """scikit-learn's digits: images (n, 8, 8, 1) in [0, 1] and labels, to train on and held out."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
    x, xv, y, yv = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    return x, y, xv, yv


def residual(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    # Statistics over the whole batch, for a core's rows alone are few; and soon forgotten, for epochs are short.
    y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    y = layers.BatchNormalization(momentum=0.8, synchronized=True)(y)
    y = layers.Activation("relu")(y)
    y = layers.Conv2D(filters, 3, padding="same")(y)
    return layers.Activation("relu")(layers.Add()([layers.Conv2D(filters, 1)(x), y]))


def build_model() -> keras.Model:
    inputs = layers.Input((8, 8, 1))
    x = residual(residual(inputs, 16), 32)
    # The outputs in float32: bfloat16 has too few digits for a loss.
    outputs = layers.Dense(10, dtype="float32")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tpu", metavar="NAME", help="its name or grpc://host:port [TPU_NAME]")
    parser.add_argument("--epochs", type=int, default=40, help="[40]")
    parser.add_argument("--batch-size", type=int, default=64, help="of all cores together [64]")
    parser.add_argument("--run-dir", help="keep metrics and the model here [nowhere]")
    parser.add_argument("--seed", type=int, default=0, help="[0]")
    options = parser.parse_args()

    x, y, xv, yv = load_digits()
    trainer = hvdtrain.Trainer(
        build_model,
        strategy=TPU(options.tpu),
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        global_batch_size=options.batch_size,
        precision="mixed_bfloat16",
        steps_per_execution=20,
        run_dir=options.run_dir,
        seed=options.seed,
    )
    history = trainer.fit(x, y, validation_data=(xv, yv), epochs=options.epochs)
    print(f"validation accuracy {history.history['val_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
