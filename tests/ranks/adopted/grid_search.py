import itertools
import json
import time
import keras
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

data = load_breast_cancer()
X_tr, X_te, y_tr, y_te = train_test_split(data.data, data.target, random_state=3, test_size=0.25)
sc = StandardScaler().fit(X_tr)
X_tr, X_te = sc.transform(X_tr), sc.transform(X_te)

GRID = {
    "units": [4, 16],
    "lr": [0.1, 0.001],
    "optimizer": ["sgd"],
}


def make(units, lr, optimizer):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    m = keras.Sequential([keras.Input((30,)), keras.layers.Dense(units, activation="relu"),
                          keras.layers.Dense(1, activation="sigmoid")])
    opt = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}[optimizer](learning_rate=lr)
    m.compile(optimizer=opt, loss="binary_crossentropy", metrics=["accuracy"])
    return m


results = []
best = (-1, None)
for values in itertools.product(*GRID.values()):
    params = dict(zip(GRID.keys(), values))
    t = time.time()
    m = make(**params)
    h = m.fit(X_tr, y_tr, epochs=2, batch_size=64, validation_split=0.2, verbose=0)
    acc = h.history["val_accuracy"][-1]
    results.append({**params, "val_accuracy": acc, "seconds": round(time.time() - t, 2)})
    print(results[-1])
    if acc > best[0]:
        best = (acc, params)
        m.save("best_model.keras")

with open("grid_results.json", "w") as f:
    json.dump(results, f, indent=2)

print("BEST:", best)
final = keras.models.load_model("best_model.keras")
print("test accuracy of best: %.3f" % final.evaluate(X_te, y_te, verbose=0)[1])
