"""
Title: Imbalanced classification: credit card fraud detection
"""
import csv
import numpy as np
import keras

keras.utils.set_random_seed(17)

# Get the real data from Kaggle; here we write a small look-alike first
fname = "creditcard.csv"
with open(fname, "w") as f:
    f.write(",".join(['"Time"'] + [f'"V{i}"' for i in range(1, 9)] + ['"Amount"', '"Class"']) + "\n")
    for i in range(500):
        cls = int(np.random.rand() < 0.08)
        v = np.random.randn(8) + cls * 1.2
        f.write(",".join([str(i)] + [f"{a:.4f}" for a in v] + [f"{abs(np.random.randn()) * 50:.2f}", f'"{cls}"']) + "\n")

all_features = []
all_targets = []
with open(fname) as f:
    for i, line in enumerate(f):
        if i == 0:
            print("HEADER:", line.strip())
            continue  # Skip header
        fields = line.strip().split(",")
        all_features.append([float(v.replace('"', "")) for v in fields[:-1]])
        all_targets.append([int(fields[-1].replace('"', ""))])

features = np.array(all_features, dtype="float32")
targets = np.array(all_targets, dtype="uint8")
print("features.shape:", features.shape)
print("targets.shape:", targets.shape)

num_val_samples = int(len(features) * 0.2)
train_features, train_targets = features[:-num_val_samples], targets[:-num_val_samples]
val_features, val_targets = features[-num_val_samples:], targets[-num_val_samples:]

counts = np.bincount(train_targets[:, 0])
print("Number of positive samples in training data: {} ({:.2f}% of total)".format(
    counts[1], 100 * float(counts[1]) / len(train_targets)))
weight_for_0 = 1.0 / counts[0]
weight_for_1 = 1.0 / counts[1]

mean = np.mean(train_features, axis=0)
train_features -= mean
val_features -= mean
std = np.std(train_features, axis=0)
train_features /= std
val_features /= std

model = keras.Sequential([
    keras.Input(shape=train_features.shape[1:]),
    keras.layers.Dense(32, activation="relu"),
    keras.layers.Dense(32, activation="relu"),
    keras.layers.Dense(1, activation="sigmoid"),
])
metrics = [keras.metrics.FalseNegatives(name="fn"), keras.metrics.FalsePositives(name="fp"),
           keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall")]
model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="binary_crossentropy", metrics=metrics)
callbacks = [keras.callbacks.ModelCheckpoint("fraud_model_at_epoch_{epoch}.keras")]
class_weight = {0: weight_for_0, 1: weight_for_1}
model.fit(train_features, train_targets, batch_size=64, epochs=3, verbose=2, callbacks=callbacks,
          validation_data=(val_features, val_targets), class_weight=class_weight)
print(model.evaluate(val_features, val_targets, verbose=0, return_dict=True))
