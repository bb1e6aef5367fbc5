import numpy as np
import keras
from keras import layers

keras.utils.set_random_seed(2)

NUMERIC = ["area", "slope", "elevation"]
CATEGORICAL = {"soil": 6, "wilderness": 4}
HIDDEN_UNITS = [16, 8]

# ---- data
n = 400
data = {name: np.random.normal(size=(n, 1)).astype("float32") for name in NUMERIC}
for name, vocab in CATEGORICAL.items():
    data[name] = np.random.randint(0, vocab, size=(n, 1))
score = data["area"][:, 0] + 0.5 * data["soil"][:, 0] - data["wilderness"][:, 0]
labels = np.digitize(score, np.quantile(score, [1 / 3, 2 / 3]))

cut = 320
train = {k: v[:cut] for k, v in data.items()}
test = {k: v[cut:] for k, v in data.items()}


def create_model_inputs():
    inputs = {}
    for f in NUMERIC:
        inputs[f] = layers.Input(name=f, shape=(1,), dtype="float32")
    for f in CATEGORICAL:
        inputs[f] = layers.Input(name=f, shape=(1,), dtype="int32")
    return inputs


def create_wide_and_deep_model():
    inputs = create_model_inputs()
    numeric = layers.concatenate([inputs[f] for f in NUMERIC])

    onehots = [layers.CategoryEncoding(num_tokens=v, output_mode="one_hot")(inputs[f]) for f, v in CATEGORICAL.items()]
    wide = layers.concatenate([numeric] + onehots)
    wide = layers.BatchNormalization()(wide)

    embs = [layers.Flatten()(layers.Embedding(v, 4)(inputs[f])) for f, v in CATEGORICAL.items()]
    deep = layers.concatenate([numeric] + embs)
    for units in HIDDEN_UNITS:
        deep = layers.Dense(units)(deep)
        deep = layers.BatchNormalization()(deep)
        deep = layers.ReLU()(deep)

    merged = layers.concatenate([wide, deep])
    outputs = layers.Dense(units=3, activation="softmax")(merged)
    return keras.Model(inputs=inputs, outputs=outputs)


model = create_wide_and_deep_model()
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=0.01),
    loss=keras.losses.SparseCategoricalCrossentropy(),
    metrics=[keras.metrics.SparseCategoricalAccuracy()],
)
print("Start training the model...")
history = model.fit(train, labels[:cut], epochs=3, batch_size=40, verbose=2)
print("Model training finished")
_, accuracy = model.evaluate(test, labels[cut:], verbose=0)
print(f"Test accuracy: {round(accuracy * 100, 2)}%")
