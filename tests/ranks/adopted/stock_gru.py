# Stock price prediction with GRU  (Kaggle notebook export)
import numpy as np
import pandas as pd
import matplotlib
matplotlib.use('agg')
import matplotlib.pyplot as plt
import math, datetime, os
from sklearn.preprocessing import MinMaxScaler
from sklearn.metrics import mean_squared_error, mean_absolute_error
import tensorflow as tf
from tensorflow.keras.models import Sequential
from tensorflow.keras.layers import Dense, Dropout, GRU, LSTM
from tensorflow.keras.callbacks import ModelCheckpoint

# random walk instead of the AAPL csv
dates = pd.date_range('2020-01-01', periods=450, freq='D')
df = pd.DataFrame({'Date': dates, 'Close': 100 + np.cumsum(np.random.randn(450))})
df.to_csv('AAPL.csv', index=False)

df = pd.read_csv('AAPL.csv', parse_dates=['Date'])
print('Total number of days: ', df.shape[0])
closedf = df[['Date', 'Close']].copy()
del closedf['Date']
scaler = MinMaxScaler(feature_range=(0, 1))
closedf = scaler.fit_transform(np.array(closedf).reshape(-1, 1))

training_size = int(len(closedf) * 0.70)
train_data, test_data = closedf[0:training_size, :], closedf[training_size:, :1]

def create_dataset(dataset, time_step=1):
    dataX, dataY = [], []
    for i in range(len(dataset) - time_step - 1):
        a = dataset[i:(i + time_step), 0]
        dataX.append(a)
        dataY.append(dataset[i + time_step, 0])
    return np.array(dataX), np.array(dataY)

time_step = 15
X_train, y_train = create_dataset(train_data, time_step)
X_test, y_test = create_dataset(test_data, time_step)
X_train = X_train.reshape(X_train.shape[0], X_train.shape[1], 1)
X_test = X_test.reshape(X_test.shape[0], X_test.shape[1], 1)

tf.keras.backend.clear_session()
model = Sequential()
model.add(GRU(16, return_sequences=True, input_shape=(time_step, 1)))
model.add(GRU(16))
model.add(Dropout(0.20))
model.add(Dense(1))
model.compile(loss='mean_squared_error', optimizer='adam')
history = model.fit(X_train, y_train, validation_data=(X_test, y_test), epochs=2, batch_size=32, verbose=1)

train_predict = scaler.inverse_transform(model.predict(X_train))
test_predict = scaler.inverse_transform(model.predict(X_test))
original_ytest = scaler.inverse_transform(y_test.reshape(-1, 1))
print("Test data RMSE: ", math.sqrt(mean_squared_error(original_ytest, test_predict)))
print("Test data MAE: ", mean_absolute_error(original_ytest, test_predict))
plt.plot(original_ytest, label='original')
plt.plot(test_predict, label='predicted')
plt.legend()
plt.savefig('gru_%s.png' % datetime.datetime.now().strftime('%Y%m%d'))
plt.show()
