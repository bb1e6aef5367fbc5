"""Denoising diffusion (tiny) with EMA network, after the keras.io DDIM example."""
import math
import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits
batch_size, ema, num_epochs = 64, 0.99, 2
min_signal_rate, max_signal_rate = 0.02, 0.95

def get_network():
    noisy, nv = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
    x = layers.Concatenate()([noisy, layers.UpSampling2D(8)(nv)])
    x = layers.Conv2D(16, 3, padding="same", activation="swish")(x)
    x = layers.Conv2D(16, 3, padding="same", activation="swish")(x)
    x = layers.Conv2D(1, 1, kernel_initializer="zeros")(x)
    return keras.Model([noisy, nv], x)

class DiffusionModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = get_network()
        self.ema_network = keras.models.clone_model(self.network)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker]

    def diffusion_schedule(self, t):
        start, end = math.acos(max_signal_rate), math.acos(min_signal_rate)
        a = start + t * (end - start)
        return tf.sin(a), tf.cos(a)

    def train_step(self, images):
        images = self.normalizer(images, training=True)
        n = tf.shape(images)[0]
        noises = tf.random.normal(shape=tf.shape(images))
        noise_rates, signal_rates = self.diffusion_schedule(tf.random.uniform((n, 1, 1, 1)))
        noisy = signal_rates * images + noise_rates * noises
        with tf.GradientTape() as tape:
            pred = self.network([noisy, noise_rates**2], training=True)
            loss = self.loss(noises, pred)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights))
        self.noise_loss_tracker.update_state(loss)
        for w, ew in zip(self.network.weights, self.ema_network.weights):
            ew.assign(ema * ew + (1 - ema) * w)
        return {m.name: m.result() for m in self.metrics}

    def generate(self, n, steps):
        x = tf.random.normal((n, 8, 8, 1))
        for s in range(steps):
            t = tf.ones((n, 1, 1, 1)) - s / steps
            nr, sr = self.diffusion_schedule(t)
            eps = self.ema_network([x, nr**2], training=False)
            nr2, sr2 = self.diffusion_schedule(t - 1 / steps)
            x = sr2 * (x - nr * eps) / sr + nr2 * eps
        return x

data = load_digits().images[:512, ..., None].astype("float32") / 16
ds = tf.data.Dataset.from_tensor_slices(data).cache().shuffle(512).batch(batch_size, drop_remainder=True)
model = DiffusionModel()
model.normalizer.adapt(ds)
model.compile(optimizer=keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-4), loss=keras.losses.MeanAbsoluteError())
hist = model.fit(ds, epochs=num_epochs)
print("n_loss", hist.history["n_loss"], "sample std", float(tf.math.reduce_std(model.generate(4, 4))))
