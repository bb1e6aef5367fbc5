import numpy as np
import tensorflow as tf
import keras
from sklearn.datasets import load_digits

SEED = 808
tf.keras.utils.set_random_seed(SEED)
tf.config.experimental.enable_op_determinism()
print("GPUs:", tf.config.list_physical_devices("GPU"))

BATCH = 32
TRAIN, VALID = 512, 128
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1)


def preprocess(image, label):
    image = tf.cast(image, tf.float32) / 16.0
    return tf.image.resize(image, (10, 10)), tf.one_hot(label, 10)


def get_training_dataset():
    ds = tf.data.Dataset.from_tensor_slices((x[:TRAIN], y[:TRAIN]))
    ds = ds.map(preprocess, num_parallel_calls=tf.data.AUTOTUNE)
    ds = ds.cache()
    ds = ds.shuffle(TRAIN, seed=SEED)
    ds = ds.repeat()
    ds = ds.batch(BATCH, drop_remainder=True)
    return ds.prefetch(tf.data.AUTOTUNE)


def get_validation_dataset():
    ds = tf.data.Dataset.from_tensor_slices((x[TRAIN:TRAIN + VALID], y[TRAIN:TRAIN + VALID]))
    return ds.map(preprocess).batch(64).repeat()


model = keras.Sequential([
    keras.layers.Input((10, 10, 1)),
    keras.layers.SeparableConv2D(16, 3, activation="relu"),
    keras.layers.MaxPooling2D(),
    keras.layers.Flatten(),
    keras.layers.Dense(10, activation="softmax"),
])
opt = keras.optimizers.AdamW(
    learning_rate=keras.optimizers.schedules.CosineDecay(5e-3, decay_steps=3 * TRAIN // BATCH),
    weight_decay=1e-3, use_ema=True, ema_momentum=0.9, global_clipnorm=1.0)
model.compile(opt, loss=keras.losses.CategoricalCrossentropy(label_smoothing=0.1), metrics=["accuracy"])

history = model.fit(
    get_training_dataset(),
    epochs=3,
    steps_per_epoch=TRAIN // BATCH,
    validation_data=get_validation_dataset(),
    validation_steps=VALID // 64,
    verbose=2,
)
print("final val accuracy: {:.4f}".format(history.history["val_accuracy"][-1]))
model.save("digits_ema.keras")
