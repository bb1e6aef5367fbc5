"""Train with a batch that is 15 times larger, without losing accuracy: a scaled rate with warm-up, LARS or LAMB.

    python scripts/train_large_batch.py --batch-size 32 --learning-rate 0.01 --warmup-epochs 0
    hvdtrain run -np 2 scripts/train_large_batch.py
    hvdtrain run -np 2 scripts/train_large_batch.py --optimizer lars

The first line is what the others are compared with: small batches, which keep few workers busy.

Data: the 1,797 digits of 8x8 pixels in scikit-learn, which need no download; a fifth is held out. A batch of 479 makes
three steps per epoch.
"""

import argparse

import keras
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdtrain
import hvdtrain.keras as hvd

OPTIMIZERS = {
    # Goyal et al. 2017 (arXiv:1706.02677): k times the batch, k times the rate, with a warm-up.
    "sgd": (lambda rate: keras.optimizers.SGD(rate, momentum=0.9), 0.01 * 479 / 32),
    # You et al. 2017 (arXiv:1708.03888). There are no normalization layers.
    "lars": (lambda rate: hvd.LARS(rate, weight_decay=1e-4, trust_coefficient=0.05), 0.3),
    # You et al. 2019 (arXiv:1904.00962), which is Keras's own.
    "lamb": (keras.optimizers.Lamb, 0.02),
}


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
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="sgd", help="sgd, lars or lamb [sgd]"
    )
    parser.add_argument(
        "--batch-size", type=int, default=479, help="examples per step, over all workers [479]"
    )
    parser.add_argument(
        "--learning-rate", type=float, help="of the optimizer [sgd 0.15, lars 0.3, lamb 0.02]"
    )
    parser.add_argument(
        "--warmup-epochs", type=float, default=2, help="epochs in which the rate rises [2]"
    )
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data [30]")
    parser.add_argument("--seed", type=int, default=0, help="of weights and shuffles [0]")
    options = parser.parse_args()

    rank = hvdtrain.init(options.seed)
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
    x, xv, y, yv = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    make, rate = OPTIMIZERS[options.optimizer]
    trainer = hvdtrain.Trainer(
        build_model,
        optimizer=make(rate if options.learning_rate is None else options.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        global_batch_size=options.batch_size,
        warmup_epochs=options.warmup_epochs,
        seed=options.seed,
    )
    history = trainer.fit(x, y, validation_data=(xv, yv), epochs=options.epochs)
    if rank.is_first:
        print(f"validation accuracy {history.history['val_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
