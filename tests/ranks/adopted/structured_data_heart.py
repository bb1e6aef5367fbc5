"""Structured data classification: heart disease like CSV with keras preprocessing layers."""
import numpy as np
import pandas as pd
import tensorflow as tf
import keras
from keras import layers

keras.utils.set_random_seed(1337)
rng = np.random.default_rng(1337)
n = 300
df = pd.DataFrame({
    "age": rng.integers(29, 77, n),
    "chol": rng.normal(245, 50, n).round(),
    "sex": rng.integers(0, 2, n),
    "thal": rng.choice(["fixed", "normal", "reversible"], n),
})
df["target"] = ((df.age > 55).astype(int) + (df.thal == "reversible") + (df.chol > 260) >= 2).astype(int)
df.to_csv("heart.csv", index=False)

dataframe = pd.read_csv("heart.csv")
print(dataframe.shape)
print(dataframe.head())

val_dataframe = dataframe.sample(frac=0.2, random_state=1337)
train_dataframe = dataframe.drop(val_dataframe.index)
print(f"Using {len(train_dataframe)} samples for training and {len(val_dataframe)} for validation")


def dataframe_to_dataset(dataframe):
    dataframe = dataframe.copy()
    labels = dataframe.pop("target")
    ds = tf.data.Dataset.from_tensor_slices(
        ({k: np.array(v.tolist()) for k, v in dataframe.items()}, labels.values))
    return ds.shuffle(buffer_size=len(dataframe), seed=1)


train_ds = dataframe_to_dataset(train_dataframe).batch(32)
val_ds = dataframe_to_dataset(val_dataframe).batch(32)

inputs = {
    "age": keras.Input(shape=(1,), name="age"),
    "chol": keras.Input(shape=(1,), name="chol"),
    "sex": keras.Input(shape=(1,), name="sex", dtype="int64"),
    "thal": keras.Input(shape=(1,), name="thal", dtype="string"),
}
encoded = []
for name in ("age", "chol"):
    norm = layers.Normalization()
    norm.adapt(train_ds.map(lambda x, y: tf.expand_dims(x[name], -1)))
    encoded.append(norm(inputs[name]))
lookup = layers.StringLookup(output_mode="int", num_oov_indices=1)
lookup.adapt(train_ds.map(lambda x, y: tf.expand_dims(x["thal"], -1)))
encoded.append(layers.CategoryEncoding(num_tokens=lookup.vocabulary_size(), output_mode="one_hot")(lookup(inputs["thal"])))
encoded.append(layers.CategoryEncoding(num_tokens=2, output_mode="one_hot")(inputs["sex"]))

expand = lambda x, y: ({k: tf.expand_dims(v, -1) for k, v in x.items()}, y)
train_ds, val_ds = train_ds.map(expand), val_ds.map(expand)
x = layers.concatenate(encoded)
x = layers.Dense(16, activation="relu")(x)
output = layers.Dense(1, activation="sigmoid")(x)
model = keras.Model(inputs, output)
model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
model.fit(train_ds, epochs=3, validation_data=val_ds, verbose=2)

sample = {"age": 60, "chol": 290, "sex": 1, "thal": "reversible"}
predictions = model.predict({name: tf.convert_to_tensor([[value]]) for name, value in sample.items()})
print(f"This particular patient had a {100 * predictions[0][0]:.1f} percent probability of having a heart disease.")
