# my first gradient tape :)
import numpy as np
import tensorflow as tf
import keras

tf.random.set_seed(0)
np.random.seed(0)

TRUE_W = 3.0
TRUE_B = 2.0
x = np.linspace(-2, 2, 200).astype(np.float32)
y = x * TRUE_W + TRUE_B + np.random.normal(size=200).astype(np.float32) * 0.3


class MyModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.d = keras.layers.Dense(1)

    def call(self, x):
        return self.d(x)


model = MyModel()
opt = keras.optimizers.SGD(0.1)


def loss(target_y, predicted_y):
    return tf.reduce_mean(tf.square(target_y - predicted_y))


def train(model, x, y):
    with tf.GradientTape() as t:
        current_loss = loss(y, model(x))
    grads = t.gradient(current_loss, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return current_loss


batch = 20
ws, bs = [], []
for epoch in range(3):
    order = np.random.permutation(len(x))
    for k in range(0, len(x), batch):
        idx = order[k:k + batch]
        l = train(model, x[idx][:, None], y[idx][:, None])
    w, b = model.d.get_weights()
    ws.append(float(w[0, 0]))
    bs.append(float(b[0]))
    print("Epoch %2d: W=%1.2f b=%1.2f, loss=%2.5f" % (epoch, ws[-1], bs[-1], l))

print("true: W=%.2f b=%.2f" % (TRUE_W, TRUE_B))
np.savez("linreg.npz", w=ws, b=bs)
