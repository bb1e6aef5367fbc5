import csv, os, random
import numpy as np
import tensorflow as tf
from tensorflow.keras import layers, models, utils

utils.set_random_seed(5)

# write a small SMSSpamCollection-like file
ham = ["see you at lunch", "ok call me later", "where are you now", "i am at home", "happy birthday dear"]
spam = ["win a free prize now", "claim your cash reward", "urgent call to claim prize", "free entry text win"]
with open("sms.tsv", "w", newline="") as fh:
    w = csv.writer(fh, delimiter="\t")
    for i in range(300):
        is_spam = random.random() < 0.4
        msg = random.choice(spam if is_spam else ham) + " " + random.choice(ham + spam)
        w.writerow(["spam" if is_spam else "ham", msg])

texts, labels = [], []
with open("sms.tsv") as fh:
    for lab, msg in csv.reader(fh, delimiter="\t"):
        texts.append(msg)
        labels.append(int(lab == "spam"))
texts = np.array(texts, dtype=object)
labels = np.array(labels, "float32")

tv = layers.TextVectorization(max_tokens=60, output_mode="tf_idf", ngrams=2)
with tf.device("CPU"):
    tv.adapt(tf.constant(list(texts[:240])))
X = tv(tf.constant(list(texts))).numpy()

clf = models.Sequential([
    layers.Input(shape=(X.shape[1],)),
    layers.Dense(12, activation="tanh"),
    layers.Dense(1, activation="sigmoid"),
])
clf.compile("adamax", "binary_crossentropy",
            metrics=["accuracy", tf.keras.metrics.Precision(name="prec"), tf.keras.metrics.Recall(name="rec")])
clf.fit(X[:240], labels[:240], epochs=3, batch_size=20, verbose=2)
res = clf.evaluate(X[240:], labels[240:], verbose=0, return_dict=True)
for k in sorted(res):
    print(f"{k:10s} {res[k]:.4f}")

for t in ["free prize call now", "see you at home"]:
    p = clf.predict(tv(tf.constant([t])), verbose=0)[0, 0]
    print(f"{t!r}: {p:.3f}")
