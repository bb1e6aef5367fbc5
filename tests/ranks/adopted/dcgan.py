"""DCGAN with a custom train_step, on 8x8 digits."""
import keras
import tensorflow as tf
from keras import layers, ops
import numpy as np
from sklearn.datasets import load_digits
import os
os.makedirs("generated", exist_ok=True)
images = load_digits().images[:512, ..., None].astype("float32") / 16.0
dataset = tf.data.Dataset.from_tensor_slices(images).shuffle(1024).batch(64)

discriminator = keras.Sequential([
    keras.Input(shape=(8, 8, 1)),
    layers.Conv2D(16, 3, strides=2, padding="same"),
    layers.LeakyReLU(negative_slope=0.2),
    layers.Flatten(), layers.Dropout(0.2),
    layers.Dense(1, activation="sigmoid"),
], name="discriminator")

latent_dim = 16
generator = keras.Sequential([
    keras.Input(shape=(latent_dim,)), layers.Dense(4 * 4 * 8), layers.Reshape((4, 4, 8)),
    layers.Conv2DTranspose(16, 4, strides=2, padding="same"),
    layers.LeakyReLU(negative_slope=0.2),
    layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
], name="generator")

class GAN(keras.Model):
    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator, self.generator, self.latent_dim = discriminator, generator, latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric, self.g_loss_metric = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real_images):
        batch_size = ops.shape(real_images)[0]
        noise = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
        combined = ops.concatenate([self.generator(noise), real_images], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))
        noise = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((batch_size, 1)), self.discriminator(self.generator(noise)))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}

class GANMonitor(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        out = self.model.generator(np.random.normal(size=(3, latent_dim))) * 255
        for i in range(3):
            keras.utils.array_to_img(out[i].numpy()).save("generated/generated_img_%03d_%d.png" % (epoch, i))

gan = GAN(discriminator, generator, latent_dim)
gan.compile(keras.optimizers.Adam(1e-4), keras.optimizers.Adam(1e-4), keras.losses.BinaryCrossentropy())
gan.fit(dataset, epochs=2, callbacks=[GANMonitor()])
