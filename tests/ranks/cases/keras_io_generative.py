"""Generative models: variational autoencoder, GAN, WGAN-GP, diffusion. Their noise is part of the data."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops
from keras_io_kit import EXAMPLES, Example, Kit, classes, images, rng, vectors

LATENT = 3


def dense(*widths: int, inputs: int, last: str | None = None) -> keras.Model:
    hidden = [layers.Dense(width, activation="tanh") for width in widths[:-1]]
    return keras.Sequential(
        [layers.Input((inputs,)), *hidden, layers.Dense(widths[-1], activation=last)]
    )


class VAE(keras.Model):
    """It has no `call`: only its train_step says what it computes."""

    def __init__(self) -> None:
        super().__init__()
        image = layers.Input((8, 8, 1))
        z = layers.Flatten()(layers.Conv2D(3, 3, 2, activation="relu", padding="same")(image))
        self.encoder = keras.Model(image, [layers.Dense(LATENT)(z), layers.Dense(LATENT)(z)])
        self.decoder = keras.Sequential(
            [
                layers.Input((LATENT,)),
                layers.Dense(64, activation="sigmoid"),
                layers.Reshape((8, 8, 1)),
            ]
        )
        self.total = keras.metrics.Mean(name="loss")
        self.divergence = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.total, self.divergence]

    def train_step(self, data: Any) -> dict[str, Any]:
        image, noise = data["image"], data["noise"]
        with tf.GradientTape() as tape:
            mean, log_variance = self.encoder(image)
            restored = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
            apart = keras.losses.binary_crossentropy(image, restored)
            apart = ops.mean(ops.sum(apart, axis=(1, 2)))
            kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            kl = ops.mean(ops.sum(kl, axis=1))
            loss = apart + kl
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(loss)
        self.divergence.update_state(kl)
        return {"loss": self.total.result(), "kl_loss": self.divergence.result()}


def vae(kit: Kit) -> keras.Model:
    model = VAE()
    model.compile(optimizer=kit.optimizer(keras.optimizers.SGD(0.01)))
    return model


class GAN(keras.Model):
    """A compile of its own, with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = dense(6, 1, inputs=5)
        self.generator = dense(6, 5, inputs=LATENT)

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss, self.g_loss]

    def train_step(self, data: Any) -> dict[str, Any]:
        real, noise = data["real"], data["noise"]
        size = tf.shape(real)[0]
        both = tf.concat([self.generator(noise), real], axis=0)
        labels = tf.concat([tf.ones((size, 1)), tf.zeros((size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        variables = self.discriminator.trainable_weights
        gradients = tape.gradient(d_loss, variables)
        self.d_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros((size, 1)), self.discriminator(self.generator(noise)))
        variables = self.generator.trainable_weights
        gradients = tape.gradient(g_loss, variables)
        self.g_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def gan(kit: Kit) -> keras.Model:
    model = GAN()
    model.compile(
        d_optimizer=kit.optimizer(keras.optimizers.SGD(0.1)),
        g_optimizer=kit.optimizer(keras.optimizers.SGD(0.05, momentum=0.5)),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


class WGANGP(keras.Model):
    """The critic takes two steps for one of the generator, and pays for steep gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = dense(6, 1, inputs=5)
        self.generator = dense(6, 5, inputs=LATENT)

    def compile(self, d_optimizer: Any, g_optimizer: Any, d_loss_fn: Any, g_loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_loss_fn, self.g_loss_fn = d_loss_fn, g_loss_fn

    def penalty(self, real: Any, fake: Any, mix: Any) -> Any:
        between = real + mix * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            found = self.critic(between, training=True)
        slopes = tape.gradient(found, between)
        return tf.reduce_mean((tf.sqrt(tf.reduce_sum(tf.square(slopes), axis=1)) - 1.0) ** 2)

    def train_step(self, data: Any) -> dict[str, Any]:
        real, mix = data["real"], data["mix"]
        for noise in (data["noise"], data["more noise"]):
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                found = self.critic(fake, training=True), self.critic(real, training=True)
                d_loss = self.d_loss_fn(*found) + 10.0 * self.penalty(real, fake, mix)
            gradients = tape.gradient(d_loss, self.critic.trainable_variables)
            pairs = zip(gradients, self.critic.trainable_variables, strict=True)
            self.d_optimizer.apply_gradients(pairs)
        with tf.GradientTape() as tape:
            g_loss = self.g_loss_fn(self.critic(self.generator(noise, training=True)))
        gradients = tape.gradient(g_loss, self.generator.trainable_variables)
        pairs = zip(gradients, self.generator.trainable_variables, strict=True)
        self.g_optimizer.apply_gradients(pairs)
        return {"d_loss": d_loss, "g_loss": g_loss}


def wgan_gp(kit: Kit) -> keras.Model:
    model = WGANGP()
    model.compile(
        d_optimizer=kit.optimizer(keras.optimizers.SGD(0.01)),
        g_optimizer=kit.optimizer(keras.optimizers.SGD(0.01)),
        d_loss_fn=lambda fake, real: tf.reduce_mean(fake) - tf.reduce_mean(real),
        g_loss_fn=lambda fake: -tf.reduce_mean(fake),
    )
    return model


class Diffusion(keras.Model):
    """A network that finds noise, and its moving average, which is updated after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.average = self.small_network(), self.small_network()
        self.average.set_weights(self.network.get_weights())
        self.noise_loss = keras.metrics.Mean(name="n_loss")

    def small_network(self) -> keras.Model:
        image, rate = layers.Input((8, 8, 1)), layers.Input((1, 1, 1))
        z = layers.Concatenate()([image, layers.UpSampling2D(8)(rate)])
        z = layers.Conv2D(4, 3, padding="same", activation="swish")(z)
        return keras.Model([image, rate], layers.Conv2D(1, 3, padding="same")(z))

    @property
    def metrics(self) -> list[Any]:
        return [self.noise_loss]

    def train_step(self, data: Any) -> dict[str, Any]:
        image, noise, time = data["image"], data["noise"], data["time"]
        noisy = ops.cos(time) * image + ops.sin(time) * noise
        with tf.GradientTape() as tape:
            predicted = self.network([noisy, ops.sin(time) ** 2], training=True)
            loss = self.compute_loss(y=noise, y_pred=predicted)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.noise_loss.update_state(loss, sample_weight=tf.shape(image)[0])
        for mine, its in zip(self.network.weights, self.average.weights, strict=True):
            its.assign(0.9 * its + 0.1 * mine)
        return {"n_loss": self.noise_loss.result()}


def diffusion(kit: Kit) -> keras.Model:
    model = Diffusion()
    model.compile(kit.optimizer(keras.optimizers.SGD(0.1)), loss=keras.losses.MeanAbsoluteError())
    return model


NOISE = {"noise": vectors(25, LATENT), "more noise": vectors(26, LATENT)}
REAL = vectors(27, 5)
MODELS = [
    Example(
        "variational autoencoder",
        vae,
        {
            "image": rng(21).uniform(0, 1, (EXAMPLES, 8, 8, 1)).astype("float32"),
            "noise": vectors(22, LATENT),
        },
    ),
    Example("gan", gan, {"real": REAL, "noise": NOISE["noise"]}),
    Example(
        "wgan-gp",
        wgan_gp,
        {"real": REAL, "mix": rng(28).uniform(size=(EXAMPLES, 1)).astype("float32"), **NOISE},
    ),
    Example(
        "diffusion",
        diffusion,
        {
            "image": images(29),
            "noise": images(30),
            "time": classes(31, 10, 1, 1, 1).astype("float32") / 10,
        },
    ),
]
