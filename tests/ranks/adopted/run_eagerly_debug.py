"""Debugging tips: run_eagerly=True and printing inside of train_step / call."""
import tensorflow as tf
import keras
from keras import layers
import numpy as np

keras.utils.set_random_seed(30)


class MyAntirectifier(layers.Layer):
    def build(self, input_shape):
        output_dim = input_shape[-1]
        self.kernel = self.add_weight(shape=(output_dim * 2, output_dim), initializer="he_normal", name="kernel")

    def call(self, inputs):
        pos = tf.nn.relu(inputs)
        neg = tf.nn.relu(-inputs)
        concatenated = tf.concat([pos, neg], axis=-1)
        mixed = tf.matmul(concatenated, self.kernel)
        if not hasattr(self, "printed") and not isinstance(mixed, keras.KerasTensor):
            print("pos.shape:", pos.shape, "mixed.shape:", mixed.shape)
            self.printed = True
        return mixed


class MyModel(keras.Model):
    def train_step(self, data):
        inputs, targets = data
        trainable_vars = self.trainable_variables
        with tf.GradientTape() as tape2:
            with tf.GradientTape() as tape1:
                y_pred = self(inputs, training=True)
                loss = self.compute_loss(y=targets, y_pred=y_pred)
            dl_dw = tape1.gradient(loss, trainable_vars)
            # gradient penalty
            penalty = tf.add_n([tf.reduce_sum(tf.square(g)) for g in dl_dw])
            total = loss + 0.01 * penalty
        d2l_dw2 = tape2.gradient(total, trainable_vars)
        self.optimizer.apply_gradients(zip(d2l_dw2, trainable_vars))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(targets, y_pred)
        return {m.name: m.result() for m in self.metrics}


x = np.random.normal(size=(128, 8)).astype("float32")
y = (np.abs(x).sum(axis=1) > 6.4).astype("int32")

inputs = keras.Input(shape=(8,))
h = MyAntirectifier()(inputs)
h = MyAntirectifier()(h)
outputs = layers.Dense(2)(h)
model = MyModel(inputs, outputs)
model.compile(optimizer=keras.optimizers.Adam(0.01), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
              metrics=["accuracy"], run_eagerly=True)
hist = model.fit(x, y, batch_size=16, epochs=2, verbose=2)
for name, vals in hist.history.items():
    print(name, ["%.4f" % v for v in vals])
