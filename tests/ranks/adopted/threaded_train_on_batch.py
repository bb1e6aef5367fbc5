# background thread prepares the batches, main thread calls train_on_batch
import queue
import threading
import time
import numpy as np
import tensorflow as tf
from tensorflow.keras import layers, models, optimizers
from sklearn.datasets import load_digits

tf.keras.utils.set_random_seed(19)

images, labels = load_digits(return_X_y=True)
images = images[:600].reshape(-1, 8, 8, 1) / 16.0
labels = labels[:600]
x_train, y_train = images[:512], labels[:512]
x_test, y_test = images[512:], labels[512:]

BATCH_SIZE = 64
EPOCHS = 3
STOP = object()


def producer(q, seed):
    rng = np.random.RandomState(seed)
    for epoch in range(EPOCHS):
        order = rng.permutation(len(x_train))
        for i in range(0, len(order), BATCH_SIZE):
            sel = order[i:i + BATCH_SIZE]
            q.put((epoch, x_train[sel], y_train[sel]))
    q.put(STOP)


model = models.Sequential()
model.add(layers.Input(shape=(8, 8, 1)))
model.add(layers.Conv2D(8, (3, 3), activation='relu'))
model.add(layers.MaxPooling2D((2, 2)))
model.add(layers.Flatten())
model.add(layers.Dense(10, activation='softmax'))
model.compile(optimizer=optimizers.Adam(5e-3), loss='sparse_categorical_crossentropy', metrics=['accuracy'])

q = queue.Queue(maxsize=4)
worker = threading.Thread(target=producer, args=(q, 19), daemon=True)
worker.start()

start = time.time()
last_epoch = 0
while True:
    item = q.get()
    if item is STOP:
        break
    epoch, xb, yb = item
    if epoch != last_epoch:
        print('Epoch %d done: loss=%.4f acc=%.4f' % (last_epoch, loss, acc))
        model.reset_metrics()
        last_epoch = epoch
    loss, acc = model.train_on_batch(xb, yb)
worker.join()
print('Epoch %d done: loss=%.4f acc=%.4f' % (last_epoch, loss, acc))
print('time: %.1fs' % (time.time() - start))

n, correct = 0, 0
for i in range(0, len(x_test), 32):
    p = model.predict_on_batch(x_test[i:i + 32])
    correct += (p.argmax(-1) == y_test[i:i + 32]).sum()
    n += len(p)
print('Test accuracy: %d/%d' % (correct, n))
model.save_weights('digits.weights.h5')
