import argparse
import numpy as np
import tensorflow as tf
from tensorflow import keras
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale

parser = argparse.ArgumentParser()
parser.add_argument('--micro-batch', type=int, default=16)
parser.add_argument('--accum-steps', type=int, default=4)
parser.add_argument('--epochs', type=int, default=2)
parser.add_argument('--lr', type=float, default=0.05)
parser.add_argument('--seed', type=int, default=123)
args = parser.parse_args()

keras.utils.set_random_seed(args.seed)
X, y = load_breast_cancer(return_X_y=True)
X = scale(X).astype('float32')
y = y.astype('float32')[:, None]

ds = (tf.data.Dataset.from_tensor_slices((X[:448], y[:448]))
      .shuffle(448, seed=args.seed, reshuffle_each_iteration=True)
      .batch(args.micro_batch, drop_remainder=True))

model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(16, activation='relu'), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
bce = keras.losses.BinaryCrossentropy(from_logits=True)
accum = [tf.Variable(tf.zeros_like(v), trainable=False) for v in model.trainable_variables]


@tf.function
def forward_backward(xb, yb):
    with tf.GradientTape() as tape:
        loss = bce(yb, model(xb, training=True)) / args.accum_steps
    for a, g in zip(accum, tape.gradient(loss, model.trainable_variables)):
        a.assign_add(g)
    return loss * args.accum_steps


def apply_and_reset():
    optimizer.apply_gradients(zip([a.read_value() for a in accum], model.trainable_variables))
    for a in accum:
        a.assign(tf.zeros_like(a))


updates = 0
for epoch in range(args.epochs):
    losses = []
    for i, (xb, yb) in enumerate(ds):
        losses.append(float(forward_backward(xb, yb)))
        if (i + 1) % args.accum_steps == 0:
            apply_and_reset()
            updates += 1
    print('epoch %d  loss %.4f  (%d updates)' % (epoch + 1, np.mean(losses), updates))

p = tf.sigmoid(model(X[448:])).numpy() > 0.5
print('held-out accuracy: %.3f' % (p == y[448:]).mean())
model.save_weights('accum.weights.h5')
