# Basic regression: Predict fuel efficiency
import numpy as np
import pandas as pd
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers
np.set_printoptions(precision=3, suppress=True)
print(tf.__version__)

np.random.seed(1)
N = 300
raw_dataset = pd.DataFrame({
    'Cylinders': np.random.choice([4, 6, 8], N),
    'Horsepower': np.random.normal(104, 30, N).round(),
    'Weight': np.random.normal(2970, 500, N).round(),
    'Origin': np.random.choice([1, 2, 3], N)})
raw_dataset['MPG'] = 50 - 0.1 * raw_dataset.Horsepower - 0.005 * raw_dataset.Weight + np.random.randn(N)
raw_dataset.loc[::50, 'Horsepower'] = np.nan

dataset = raw_dataset.copy()
print(dataset.isna().sum())
dataset = dataset.dropna()
dataset['Origin'] = dataset['Origin'].map({1: 'USA', 2: 'Europe', 3: 'Japan'})
dataset = pd.get_dummies(dataset, columns=['Origin'], prefix='', prefix_sep='')
dataset = dataset.astype('float32')

train_dataset = dataset.sample(frac=0.8, random_state=0)
test_dataset = dataset.drop(train_dataset.index)
train_features = train_dataset.copy()
test_features = test_dataset.copy()
train_labels = train_features.pop('MPG')
test_labels = test_features.pop('MPG')

test_results = {}

horsepower = np.array(train_features['Horsepower'])
horsepower_normalizer = layers.Normalization(input_shape=[1,], axis=None)
horsepower_normalizer.adapt(horsepower)
horsepower_model = tf.keras.Sequential([horsepower_normalizer, layers.Dense(units=1)])
horsepower_model.compile(optimizer=tf.keras.optimizers.Adam(learning_rate=0.1), loss='mean_absolute_error')
history = horsepower_model.fit(train_features['Horsepower'], train_labels, epochs=2, verbose=0, validation_split=0.2)
hist = pd.DataFrame(history.history)
hist['epoch'] = history.epoch
print(hist.tail())
test_results['horsepower_model'] = horsepower_model.evaluate(test_features['Horsepower'], test_labels, verbose=0)

normalizer = tf.keras.layers.Normalization(axis=-1)
normalizer.adapt(np.array(train_features))

def build_and_compile_model(norm):
  model = keras.Sequential([norm, layers.Dense(16, activation='relu'), layers.Dense(16, activation='relu'), layers.Dense(1)])
  model.compile(loss='mean_absolute_error', optimizer=tf.keras.optimizers.Adam(0.01))
  return model

dnn_model = build_and_compile_model(normalizer)
history = dnn_model.fit(train_features, train_labels, validation_split=0.2, verbose=0, epochs=3)
test_results['dnn_model'] = dnn_model.evaluate(test_features, test_labels, verbose=0)
dnn_model.save('dnn_model.keras')

reloaded = tf.keras.models.load_model('dnn_model.keras')
test_results['reloaded'] = reloaded.evaluate(test_features, test_labels, verbose=0)
print(pd.DataFrame(test_results, index=['Mean absolute error [MPG]']).T)
