# Deep Learning with Python, chapter 4: predicting prices, a regression example (K-fold)
import numpy as np
from tensorflow import keras
from tensorflow.keras import layers
from sklearn.datasets import load_diabetes

keras.utils.set_random_seed(4)
data, targets = load_diabetes(return_X_y=True)
train_data, train_targets = data[:360].copy(), targets[:360] / 100.
test_data, test_targets = data[360:].copy(), targets[360:] / 100.

mean = train_data.mean(axis=0)
train_data -= mean
std = train_data.std(axis=0)
train_data /= std
test_data -= mean
test_data /= std


def build_model():
    model = keras.Sequential([
        layers.Dense(16, activation="relu"),
        layers.Dense(16, activation="relu"),
        layers.Dense(1)
    ])
    model.compile(optimizer="rmsprop", loss="mse", metrics=["mae"])
    return model


k = 3
num_val_samples = len(train_data) // k
num_epochs = 2
all_mae_histories = []
for i in range(k):
    print(f"Processing fold #{i}")
    val_data = train_data[i * num_val_samples: (i + 1) * num_val_samples]
    val_targets = train_targets[i * num_val_samples: (i + 1) * num_val_samples]
    partial_train_data = np.concatenate(
        [train_data[:i * num_val_samples], train_data[(i + 1) * num_val_samples:]], axis=0)
    partial_train_targets = np.concatenate(
        [train_targets[:i * num_val_samples], train_targets[(i + 1) * num_val_samples:]], axis=0)
    model = build_model()
    history = model.fit(partial_train_data, partial_train_targets,
                        validation_data=(val_data, val_targets),
                        epochs=num_epochs, batch_size=16, verbose=0)
    all_mae_histories.append(history.history["val_mae"])

average_mae_history = [np.mean([x[i] for x in all_mae_histories]) for i in range(num_epochs)]
print(average_mae_history)

model = build_model()
model.fit(train_data, train_targets, epochs=2, batch_size=16, verbose=0)
test_mse_score, test_mae_score = model.evaluate(test_data, test_targets)
print(test_mae_score)
predictions = model.predict(test_data)
print(predictions[0])
