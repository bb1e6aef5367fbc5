"""
Title: MixUp augmentation for image classification
"""
import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16.0
y = tf.one_hot(y, 10)
x_train, y_train = x[:512], y[:512]
x_test, y_test = x[512:640], y[512:640]

AUTO = tf.data.AUTOTUNE
BATCH_SIZE = 64
EPOCHS = 3

train_ds_one = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(BATCH_SIZE * 100).batch(BATCH_SIZE)
train_ds_two = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(BATCH_SIZE * 100).batch(BATCH_SIZE)
train_ds = tf.data.Dataset.zip((train_ds_one, train_ds_two))
test_ds = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(BATCH_SIZE)


def sample_beta_distribution(size, concentration_0=0.2, concentration_1=0.2):
    gamma_1_sample = tf.random.gamma(shape=[size], alpha=concentration_1)
    gamma_2_sample = tf.random.gamma(shape=[size], alpha=concentration_0)
    return gamma_1_sample / (gamma_1_sample + gamma_2_sample)


def mix_up(ds_one, ds_two, alpha=0.2):
    images_one, labels_one = ds_one
    images_two, labels_two = ds_two
    batch_size = tf.shape(images_one)[0]
    l = sample_beta_distribution(batch_size, alpha, alpha)
    x_l = tf.reshape(l, (batch_size, 1, 1, 1))
    y_l = tf.reshape(l, (batch_size, 1))
    images = images_one * x_l + images_two * (1 - x_l)
    labels = labels_one * y_l + labels_two * (1 - y_l)
    return (images, labels)


train_ds_mu = train_ds.map(lambda a, b: mix_up(a, b, alpha=0.2), num_parallel_calls=AUTO).prefetch(AUTO)


def get_training_model():
    return keras.Sequential([
        layers.Input(shape=(8, 8, 1)),
        layers.Conv2D(16, (3, 3), activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(32, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ])


initial_model = get_training_model()
initial_model.save_weights("initial_weights.weights.h5")

for name, ds in [("mixup", train_ds_mu), ("plain", train_ds_one)]:
    model = get_training_model()
    model.load_weights("initial_weights.weights.h5")
    model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    model.fit(ds, validation_data=test_ds, epochs=EPOCHS, verbose=0)
    _, test_acc = model.evaluate(test_ds, verbose=0)
    print("Test accuracy ({}): {:.2f}%".format(name, test_acc * 100))
