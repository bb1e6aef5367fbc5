"""Train a residual network on handwritten digits, on all cores of a TPU.

    python scripts/train_tpu.py                              the TPU of this machine, or the one that TPU_NAME names
    python scripts/train_tpu.py --tpu grpc://10.0.0.2:8470   another TPU

Three things differ from training on GPUs: the model is passed as a function, so that its variables are created on the
TPU; it computes in bfloat16; and 20 steps, which are short on a TPU, run without returning to Python. All batches have
one size: the last one of an epoch is padded, and the padding has weight 0.

Without a TPU the script ends with an error. To train on CPUs or GPUs, leave out `strategy`.
"""

import argparse

import keras
import numpy as np
from keras import layers

import hvdtrain
from hvdtrain.strategies.tpu import TPU


def load_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return scikit-learn's digits: images (n, 8, 8, 1) in [0, 1] and labels, for training and for validation."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
    x, xv, y, yv = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    return x, y, xv, yv


def residual(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    # Statistics over the whole batch, as one core has few rows; and a low momentum, as epochs are short.
    y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    y = layers.BatchNormalization(momentum=0.8, synchronized=True)(y)
    y = layers.Activation("relu")(y)
    y = layers.Conv2D(filters, 3, padding="same")(y)
    return layers.Activation("relu")(layers.Add()([layers.Conv2D(filters, 1)(x), y]))


def build_model() -> keras.Model:
    inputs = layers.Input((8, 8, 1))
    x = residual(residual(inputs, 16), 32)
    # Outputs in float32: bfloat16 is too coarse for a loss.
    outputs = layers.Dense(10, dtype="float32")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--tpu", metavar="NAME", help="TPU, or grpc://host:port [TPU_NAME]")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the data [40]")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="examples per step, over all workers [64]"
    )
    parser.add_argument("--run-dir", help="folder for metrics and the model [none]")
    parser.add_argument("--seed", type=int, default=0, help="of weights and shuffles [0]")
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
