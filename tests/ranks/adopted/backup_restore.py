import keras
import numpy as np


class InterruptingCallback(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise RuntimeError("Interrupting!")


keras.utils.set_random_seed(0)
x = np.random.random((96, 20)).astype("float32")
y = (x.sum(axis=1, keepdims=True) > 10).astype("float32")


def build():
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(10, activation="relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    return model


callback = keras.callbacks.BackupAndRestore(backup_dir="backup")
model = build()
try:
    model.fit(x, y, epochs=3, batch_size=24, callbacks=[callback, InterruptingCallback()], verbose=0)
except RuntimeError as e:
    print("training was interrupted:", e)

# training resumes at epoch 3 (index 2)
model = build()
history = model.fit(x, y, epochs=3, batch_size=24, callbacks=[callback], verbose=2)
# Only 1 more epoch is run, since first training got interrupted at epoch 2
print("epochs run after the restart:", len(history.history["loss"]))
print("loss:", history.history["loss"])
print("final mse:", model.evaluate(x, y, verbose=0))
