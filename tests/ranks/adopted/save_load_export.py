import os
import pathlib
import tempfile
import numpy as np
import tensorflow as tf
import keras
from sklearn.datasets import load_digits

keras.utils.set_random_seed(27)
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
train_images, train_labels = x[:320], y[:320]
test_images, test_labels = x[320:520], y[320:520]


def create_model():
    model = keras.Sequential([
        keras.Input(shape=(64,)),
        keras.layers.Dense(24, activation="relu"),
        keras.layers.Dense(10),
    ])
    model.compile(optimizer=keras.optimizers.Adam(1e-2),
                  loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  metrics=[keras.metrics.SparseCategoricalAccuracy()])
    return model


outdir = pathlib.Path(tempfile.mkdtemp(prefix="keras_saving_"))
model = create_model()
model.fit(train_images, train_labels, epochs=1, batch_size=32, verbose=2)

# 1) weights only
model.save_weights(outdir / "my.weights.h5")
fresh = create_model()
print("untrained: {:5.2f}%".format(100 * fresh.evaluate(test_images, test_labels, verbose=0)[1]))
fresh.load_weights(outdir / "my.weights.h5")
print("restored:  {:5.2f}%".format(100 * fresh.evaluate(test_images, test_labels, verbose=0)[1]))

# 2) whole model, continue training with the optimizer state
model.save("my_model.keras")
new_model = keras.models.load_model("my_model.keras")
np.testing.assert_allclose(model.predict(test_images, verbose=0), new_model.predict(test_images, verbose=0), rtol=1e-5)
print("optimizer iterations after reload:", int(new_model.optimizer.iterations))
new_model.fit(train_images, train_labels, epochs=2, batch_size=32, verbose=2,
              validation_data=(test_images, test_labels))

# 3) SavedModel for serving
new_model.export("exported/1")
served = tf.saved_model.load("exported/1")
out = served.serve(test_images[:4])
print("served argmax:", np.argmax(out, axis=1), "true:", test_labels[:4])
print(sorted(os.listdir("exported/1")))
