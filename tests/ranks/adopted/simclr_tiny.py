"""Self-supervised contrastive pretraining (SimCLR) followed by a linear probe."""
import keras
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

keras.utils.set_random_seed(0)
temperature = 0.1
X, Y = load_digits().images[..., None].astype("float32") / 16, load_digits().target
unlabeled, (xl, yl), (xt, yt) = X[:512], (X[512:640], Y[512:640]), (X[640:800], Y[640:800])


def get_augmenter():
    return keras.Sequential([
        layers.Input((8, 8, 1)), layers.RandomTranslation(0.15, 0.15, fill_mode="constant"),
        layers.RandomBrightness(0.2, value_range=(0, 1)),
    ])


def get_encoder():
    return keras.Sequential([
        layers.Input((8, 8, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(32, activation="relu"),
    ])


class ContrastiveModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.augmenter, self.encoder = get_augmenter(), get_encoder()
        self.projection_head = keras.Sequential([layers.Input((32,)), layers.Dense(16)])

    def compile(self, contrastive_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.c_loss = keras.metrics.Mean(name="c_loss")
        self.c_acc = keras.metrics.SparseCategoricalAccuracy(name="c_acc")

    @property
    def metrics(self):
        return [self.c_loss, self.c_acc]

    def train_step(self, images):
        v1, v2 = self.augmenter(images, training=True), self.augmenter(images, training=True)
        with tf.GradientTape() as tape:
            p1 = ops.normalize(self.projection_head(self.encoder(v1)), axis=1)
            p2 = ops.normalize(self.projection_head(self.encoder(v2)), axis=1)
            sim = ops.matmul(p1, ops.transpose(p2)) / temperature
            labels = ops.arange(ops.shape(sim)[0])
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(labels, sim, from_logits=True)
                            + keras.losses.sparse_categorical_crossentropy(labels, ops.transpose(sim), from_logits=True)) / 2
        ws = self.encoder.trainable_weights + self.projection_head.trainable_weights
        self.contrastive_optimizer.apply_gradients(zip(tape.gradient(loss, ws), ws))
        self.c_loss.update_state(loss)
        self.c_acc.update_state(labels, sim)
        return {m.name: m.result() for m in self.metrics}


pretraining_model = ContrastiveModel()
pretraining_model.compile(contrastive_optimizer=keras.optimizers.Adam(1e-2))
pretraining_model.fit(unlabeled, batch_size=64, epochs=3, verbose=2)

enc = pretraining_model.encoder
enc.trainable = False
probe = keras.Sequential([layers.Input((8, 8, 1)), enc, layers.Dense(10)])
probe.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["acc"])
probe.fit(xl, yl, epochs=3, validation_data=(xt, yt), verbose=2)
print("probe:", probe.evaluate(xt, yt, verbose=0))
