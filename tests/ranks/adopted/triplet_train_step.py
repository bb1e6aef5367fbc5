# Image similarity estimation using a Siamese network with a triplet loss
import keras
import numpy as np
import tensorflow as tf
from keras import layers, metrics, Model
from sklearn.datasets import load_digits

keras.utils.set_random_seed(66)
x, y = load_digits(return_X_y=True)
x, y = (x[:400] / 16).astype("float32"), y[:400]

anchors, positives, negatives = x, [], []
for i in range(400):
    positives.append(x[np.random.choice(np.flatnonzero(y == y[i]))])
    negatives.append(x[np.random.choice(np.flatnonzero(y != y[i]))])

dataset = tf.data.Dataset.zip((
    tf.data.Dataset.from_tensor_slices(np.array(anchors)),
    tf.data.Dataset.from_tensor_slices(np.array(positives)),
    tf.data.Dataset.from_tensor_slices(np.array(negatives))))
train_dataset = dataset.take(320).batch(32, drop_remainder=False).prefetch(tf.data.AUTOTUNE)
val_dataset = dataset.skip(320).batch(32).prefetch(tf.data.AUTOTUNE)

embedding = keras.Sequential([
    layers.Input((64,)), layers.Dense(32, activation="relu"), layers.Dense(8)], name="Embedding")


class SiameseModel(Model):
    def __init__(self, embedding, margin=0.5):
        super().__init__()
        self.embedding = embedding
        self.margin = margin
        self.loss_tracker = metrics.Mean(name="loss")

    def call(self, inputs):
        a, p, n = [self.embedding(t) for t in inputs]
        return tf.reduce_sum(tf.square(a - p), -1), tf.reduce_sum(tf.square(a - n), -1)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._compute_loss(data)
        gradients = tape.gradient(loss, self.embedding.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.embedding.trainable_weights))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        loss = self._compute_loss(data)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data):
        ap_distance, an_distance = self(data)
        return tf.maximum(ap_distance - an_distance + self.margin, 0.0)

    @property
    def metrics(self):
        return [self.loss_tracker]


siamese_model = SiameseModel(embedding)
siamese_model.compile(optimizer=keras.optimizers.Adam(0.001))
siamese_model.fit(train_dataset, epochs=3, validation_data=val_dataset, verbose=2)
a, p, n = next(iter(val_dataset))
ea, ep, en = embedding(a), embedding(p), embedding(n)
cosine_similarity = metrics.CosineSimilarity()
print("Positive similarity:", float(cosine_similarity(ea, ep)))
cosine_similarity.reset_state()
print("Negative similarity", float(cosine_similarity(ea, en)))
embedding.save("embedding.keras")
