# Stateful LSTM for a long sine wave, resetting states by hand after every epoch
# https://machinelearningmastery.com style
import numpy as np
from sklearn.preprocessing import MinMaxScaler
from sklearn.metrics import mean_squared_error
from math import sqrt
import tensorflow as tf
from tensorflow.keras.models import Sequential
from tensorflow.keras.layers import LSTM, Dense, Input

tf.keras.utils.set_random_seed(7)

# frame a sequence as a supervised learning problem
def timeseries_to_supervised(data, lag=1):
	X, y = [], []
	for i in range(len(data) - lag):
		X.append(data[i:i+lag])
		y.append(data[i+lag])
	return np.array(X), np.array(y)

series = np.sin(np.arange(400) * 0.2) + 0.1 * np.random.randn(400)
scaler = MinMaxScaler(feature_range=(-1, 1))
scaled = scaler.fit_transform(series.reshape(-1, 1)).ravel()
X, y = timeseries_to_supervised(scaled, 4)
X = X.reshape(X.shape[0], 4, 1)

# fit an LSTM network to training data
batch_size = 4
n_train = 240
n_test = 80
model = Sequential()
model.add(Input(batch_shape=(batch_size, 4, 1)))
model.add(LSTM(8, stateful=True))
model.add(Dense(1))
model.compile(loss='mean_squared_error', optimizer='adam')
nb_epoch = 3
for i in range(nb_epoch):
	model.fit(X[:n_train], y[:n_train], epochs=1, batch_size=batch_size, verbose=2, shuffle=False)
	for layer in model.layers:
		if hasattr(layer, 'reset_states'):
			layer.reset_states()

# forecast
model.predict(X[:n_train], batch_size=batch_size, verbose=0)   # build up state
pred = model.predict(X[n_train:n_train+n_test], batch_size=batch_size, verbose=0)
inverted = scaler.inverse_transform(pred)
expected = scaler.inverse_transform(y[n_train:n_train+n_test].reshape(-1, 1))
for i in range(5):
	print('Step=%d, Predicted=%f, Expected=%f' % (i+1, inverted[i, 0], expected[i, 0]))
rmse = sqrt(mean_squared_error(expected, inverted))
print('Test RMSE: %.3f' % rmse)
np.savez('forecast.npz', pred=inverted, expected=expected)
