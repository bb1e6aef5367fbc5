"""Text classification from raw files (à la aclImdb)."""
import os
import re
import shutil
import string
import numpy as np
import tensorflow as tf
import keras
from keras import layers

keras.utils.set_random_seed(1337)

if os.path.isdir("aclImdb"):
    shutil.rmtree("aclImdb")
good = "great superb lovely moving wonderful brilliant".split()
bad = "awful boring terrible dull worst mess".split()
filler = "the movie was a bit and plot actor scene it<br /> with story".split()
r = np.random.RandomState(3)
for split, n in (("train", 80), ("test", 30)):
    for label, words in (("pos", good), ("neg", bad)):
        os.makedirs(f"aclImdb/{split}/{label}")
        for i in range(n):
            text = list(r.choice(filler, 12)) + list(r.choice(words, 3))
            r.shuffle(text)
            with open(f"aclImdb/{split}/{label}/{i}_x.txt", "w") as f:
                f.write(" ".join(text) + ".")

batch_size = 32
raw_train_ds = keras.utils.text_dataset_from_directory(
    "aclImdb/train", batch_size=batch_size, validation_split=0.2, subset="training", seed=1337)
raw_val_ds = keras.utils.text_dataset_from_directory(
    "aclImdb/train", batch_size=batch_size, validation_split=0.2, subset="validation", seed=1337)
raw_test_ds = keras.utils.text_dataset_from_directory("aclImdb/test", batch_size=batch_size)

for text_batch, label_batch in raw_train_ds.take(1):
    for i in range(2):
        print(text_batch.numpy()[i], label_batch.numpy()[i])


def custom_standardization(input_data):
    lowercase = tf.strings.lower(input_data)
    stripped_html = tf.strings.regex_replace(lowercase, "<br />", " ")
    return tf.strings.regex_replace(stripped_html, f"[{re.escape(string.punctuation)}]", "")


vectorize_layer = layers.TextVectorization(
    standardize=custom_standardization, max_tokens=200, output_mode="int", output_sequence_length=20)
vectorize_layer.adapt(raw_train_ds.map(lambda x, y: x))

train_ds = raw_train_ds.map(lambda x, y: (vectorize_layer(x), y)).cache().prefetch(buffer_size=10)
val_ds = raw_val_ds.map(lambda x, y: (vectorize_layer(x), y)).cache().prefetch(buffer_size=10)
test_ds = raw_test_ds.map(lambda x, y: (vectorize_layer(x), y)).cache().prefetch(buffer_size=10)

inputs = keras.Input(shape=(None,), dtype="int64")
x = layers.Embedding(200, 16)(inputs)
x = layers.Conv1D(16, 5, padding="valid", activation="relu", strides=3)(x)
x = layers.GlobalMaxPooling1D()(x)
predictions = layers.Dense(1, activation="sigmoid", name="predictions")(x)
model = keras.Model(inputs, predictions)
model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
model.fit(train_ds, validation_data=val_ds, epochs=3)
print(model.evaluate(test_ds))
