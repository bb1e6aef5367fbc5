import numpy as np
import tensorflow as tf
from tensorflow.keras.applications import MobileNet
from tensorflow.keras.applications.mobilenet import preprocess_input
from tensorflow.keras.layers import Dense, GlobalAveragePooling2D
from tensorflow.keras.models import Model
from tensorflow.keras.optimizers import Adam

tf.keras.utils.set_random_seed(2024)

IMG_SIZE = 32
NUM_CLASSES = 3
N = 64

# toy dataset: three textures
x = np.random.uniform(0, 255, size=(N, IMG_SIZE, IMG_SIZE, 3))
y = np.random.randint(0, NUM_CLASSES, N)
for i in range(N):
    if y[i] == 1:
        x[i, ::2] *= 0.2
    elif y[i] == 2:
        x[i, :, ::2] *= 0.2
x = preprocess_input(x.astype("float32"))
y = tf.keras.utils.to_categorical(y, NUM_CLASSES)

base = MobileNet(input_shape=(IMG_SIZE, IMG_SIZE, 3), alpha=0.25, include_top=False, weights=None)
# only train the last few layers, the rest stays as it is
for l in base.layers[:-12]:
    l.trainable = False

h = GlobalAveragePooling2D()(base.output)
h = Dense(16, activation='relu')(h)
preds = Dense(NUM_CLASSES, activation='softmax')(h)
model = Model(inputs=base.input, outputs=preds)
print("number of layers", len(model.layers))

model.compile(optimizer=Adam(learning_rate=0.001), loss='categorical_crossentropy', metrics=['accuracy'])
model.fit(x, y, batch_size=16, epochs=1, verbose=1)
model.save_weights('mobilenet_toy.weights.h5')
p = model.predict(x[:8], verbose=0)
print(p.argmax(axis=1))
