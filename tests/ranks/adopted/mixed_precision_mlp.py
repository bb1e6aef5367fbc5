import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers, mixed_precision
import numpy as np

mixed_precision.set_global_policy('mixed_float16')
policy = mixed_precision.global_policy()
print('Compute dtype: %s' % policy.compute_dtype)
print('Variable dtype: %s' % policy.variable_dtype)

keras.utils.set_random_seed(6)
centers = np.random.normal(size=(4, 12)) * 2
labels = np.random.randint(0, 4, size=480)
points = (centers[labels] + np.random.normal(size=(480, 12))).astype('float32')
x_train, y_train, x_test, y_test = points[:400], labels[:400], points[400:], labels[400:]

inputs = keras.Input(shape=(12,), name='digits')
x = layers.Dense(32, activation='relu', name='dense_1')(inputs)
x = layers.Dense(32, activation='relu', name='dense_2')(x)
print('x.dtype:', x.dtype)
x = layers.Dense(4, name='dense_logits')(x)
# softmax must be float32
outputs = layers.Activation('softmax', dtype='float32', name='predictions')(x)
print('Outputs dtype: %s' % outputs.dtype)

model = keras.Model(inputs=inputs, outputs=outputs)
model.compile(loss='sparse_categorical_crossentropy',
              optimizer=keras.optimizers.RMSprop(),
              metrics=['accuracy'])
print(type(model.optimizer).__name__)

history = model.fit(x_train, y_train, batch_size=40, epochs=3, validation_split=0.2, verbose=2)
test_scores = model.evaluate(x_test, y_test, verbose=2)
print('Test loss:', test_scores[0])
print('Test accuracy:', test_scores[1])

mixed_precision.set_global_policy('float32')
