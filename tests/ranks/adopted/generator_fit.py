# fit() with a python generator  -- driving-simulator "behavioral cloning" homework
import math
import numpy as np
import sklearn.utils
from sklearn.model_selection import train_test_split
from keras.models import Sequential
from keras.layers import Flatten, Dense, Conv2D, Cropping2D, Lambda, Input
import keras

keras.utils.set_random_seed(44)


def fake_frame(angle):
    img = np.random.randint(0, 60, (16, 32, 3)).astype(np.float32)
    col = int(16 + angle * 12)
    img[4:, max(col - 2, 0):col + 2] = 255
    return img


samples = [(i, np.random.uniform(-1, 1)) for i in range(256)]
frames = np.array([fake_frame(a) for _, a in samples])
train_samples, validation_samples = train_test_split(samples, test_size=0.25, random_state=1)


def generator(samples, batch_size=32):
    num_samples = len(samples)
    while 1:  # Loop forever so the generator never terminates
        samples = sklearn.utils.shuffle(samples, random_state=0)
        for offset in range(0, num_samples, batch_size):
            batch_samples = samples[offset:offset + batch_size]
            images, angles = [], []
            for i, angle in batch_samples:
                images.append(frames[i])
                angles.append(angle)
            X_train = np.array(images)
            y_train = np.array(angles)
            yield X_train, y_train


batch_size = 32
train_generator = generator(train_samples, batch_size=batch_size)
validation_generator = generator(validation_samples, batch_size=batch_size)

model = Sequential()
model.add(Input(shape=(16, 32, 3)))
model.add(Lambda(lambda x: (x / 255.0) - 0.5))
model.add(Cropping2D(cropping=((4, 0), (0, 0))))
model.add(Conv2D(8, (3, 3), strides=(2, 2), activation="relu"))
model.add(Flatten())
model.add(Dense(16))
model.add(Dense(1))
model.compile(loss='mse', optimizer='adam')

history_object = model.fit(train_generator,
                           steps_per_epoch=math.ceil(len(train_samples) / batch_size),
                           validation_data=validation_generator,
                           validation_steps=math.ceil(len(validation_samples) / batch_size),
                           epochs=3, verbose=1)
model.save('model.h5')
print(history_object.history['loss'])
print(history_object.history['val_loss'])
