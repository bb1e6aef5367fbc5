"""Siamese network with contrastive loss."""
import random
import numpy as np
import keras
from keras import ops
from sklearn.datasets import load_digits
import matplotlib.pyplot as plt

keras.utils.set_random_seed(21)
epochs, batch_size, margin = 3, 32, 1

d = load_digits()
x_train_val, y_train_val = d.images[:300].astype("float32") / 16, d.target[:300]
x_test, y_test = d.images[300:400].astype("float32") / 16, d.target[300:400]
x_train, x_val = x_train_val[:200], x_train_val[200:]
y_train, y_val = y_train_val[:200], y_train_val[200:]

def make_pairs(x, y):
    num_classes = max(y) + 1
    digit_indices = [np.where(y == i)[0] for i in range(num_classes)]
    pairs, labels = [], []
    for idx1 in range(len(x)):
        x1, label1 = x[idx1], y[idx1]
        pairs += [[x1, x[random.choice(digit_indices[label1])]]]
        labels += [0]
        label2 = random.randint(0, num_classes - 1)
        while label2 == label1:
            label2 = random.randint(0, num_classes - 1)
        pairs += [[x1, x[random.choice(digit_indices[label2])]]]
        labels += [1]
    return np.array(pairs), np.array(labels).astype("float32")

pairs_train, labels_train = make_pairs(x_train, y_train)
pairs_val, labels_val = make_pairs(x_val, y_val)
pairs_test, labels_test = make_pairs(x_test, y_test)

def euclidean_distance(vects):
    x, y = vects
    sum_square = ops.sum(ops.square(x - y), axis=1, keepdims=True)
    return ops.sqrt(ops.maximum(sum_square, keras.backend.epsilon()))

inp = keras.layers.Input((8, 8, 1))
x = keras.layers.BatchNormalization()(inp)
x = keras.layers.Conv2D(4, (3, 3), activation="tanh")(x)
x = keras.layers.AveragePooling2D(pool_size=(2, 2))(x)
x = keras.layers.Flatten()(x)
x = keras.layers.BatchNormalization()(x)
embedding_network = keras.Model(inp, keras.layers.Dense(10, activation="tanh")(x))

input_1, input_2 = keras.layers.Input((8, 8, 1)), keras.layers.Input((8, 8, 1))
merge_layer = keras.layers.Lambda(euclidean_distance, output_shape=(1,))(
    [embedding_network(input_1), embedding_network(input_2)])
output_layer = keras.layers.Dense(1, activation="sigmoid")(keras.layers.BatchNormalization()(merge_layer))
siamese = keras.Model(inputs=[input_1, input_2], outputs=output_layer)

def loss(margin=1):
    def contrastive_loss(y_true, y_pred):
        square_pred = ops.square(y_pred)
        margin_square = ops.square(ops.maximum(margin - (y_pred), 0))
        return ops.mean((1 - y_true) * square_pred + (y_true) * margin_square)
    return contrastive_loss

siamese.compile(loss=loss(margin=margin), optimizer="RMSprop", metrics=["accuracy"])
history = siamese.fit([pairs_train[:, 0], pairs_train[:, 1]], labels_train,
                      validation_data=([pairs_val[:, 0], pairs_val[:, 1]], labels_val),
                      batch_size=batch_size, epochs=epochs, verbose=2)
results = siamese.evaluate([pairs_test[:, 0], pairs_test[:, 1]], labels_test, verbose=0)
print("test loss, test acc:", results)
plt.plot(history.history["accuracy"])
plt.savefig("siamese_accuracy.png")
