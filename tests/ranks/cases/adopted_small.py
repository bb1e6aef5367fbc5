"""Small scripts, run on all ranks as `hvdtrain run --adopt` does, beside one plain process.

Each does one thing that few scripts do.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from adopt import run_beside
from results import far

from hvdtrain.adopt.__main__ import run_adopted
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.consistency import any_rank
from hvdtrain.worker.main_module import run_script

BEGIN = """
import datetime, keras, numpy as np, tempfile, tensorflow as tf
keras.utils.set_random_seed(3)
x = np.random.normal(size=(48, 4)).astype("float32")
y = x[:, :1] ** 2
found = {}
def built(*layers):
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model
"""

FILES = """
model = built()
model.save_weights("mine.weights.h5")
drawn, now = tempfile.mkdtemp(), datetime.datetime.now().strftime("%H%M%S%f")
names = ["mine.weights.h5", f"{drawn}/w.weights.h5", f"runs/{now}/w.weights.h5", f"at-{now}-{{epoch}}.weights.h5"]
writers = [keras.callbacks.ModelCheckpoint(name, save_weights_only=True) for name in names]
log = keras.callbacks.CSVLogger(f"{now}.csv")
for _ in range(2):
    model.fit(x, y, epochs=2, verbose=0, callbacks=[*writers, log])
    for name in names:
        other = built()
        other.load_weights(name.format(epoch=2))
        found.setdefault(name.replace(now, "").replace(drawn, ""), []).append(other.get_weights())
    found.setdefault("log", []).append(np.loadtxt(f"{now}.csv", delimiter=",", skiprows=1, usecols=(0, 1)))
"""

DRAWS = """
import random
class Noise(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(7)
    def call(self, x, training=None):
        return x if training else x + keras.random.normal(keras.ops.shape(x), seed=self.seed)
model = built(keras.layers.Dropout(1e-7), Noise())
seeds = [layer.seed_generator if hasattr(layer, "seed_generator") else layer.seed for layer in model.layers[:2]]
for _ in range(2):
    model.fit(x, y, batch_size=16, verbose=0)
    found.setdefault("seeds", []).append([seed.state.numpy() for seed in seeds])
    model.train_on_batch(x, y)
found["noisy predictions"] = model.predict(x, batch_size=8, verbose=0)
found["weights"] = model.get_weights()
other = built()
other.fit(x, y, verbose=0)
other.layers[0].bias.assign([random.SystemRandom().random()])  # Another one on each rank.
own = float(np.mean((other(x) - y) ** 2))
predicted = float(np.mean((other.predict(x, batch_size=8, verbose=0) - y) ** 2))
found["of other weights"] = [other.evaluate(x, y, batch_size=32, verbose=0) / own, predicted / own]
"""

ENDS = """
import sys
def batches(number):
    for n in range(number):
        yield x[:8] + n, y[:8]
for number, steps in ((5, 4), (3, 4), (3, None), (12, 4)):
    model = built()
    fit = model.fit(batches(number), epochs=3, steps_per_epoch=steps, verbose=0)
    found[f"{number} in {steps}"] = [*model.get_weights(), fit.history["loss"]]
"""

ERRORS = """
import sys
sys.stdin = open("/dev/null")
def raised(call, *kinds, **given):
    try:
        call(**given)
    except kinds as error:
        return [type(error) is kind for kind in kinds]
found["input"] = raised(input, EOFError)
found["no file"] = raised(keras.utils.get_file, Exception, ValueError, origin="file:///nowhere/x", cache_dir=".")
found["no address"] = raised(keras.utils.get_file, Exception, ValueError, fname="x", origin="", cache_dir=".")
"""

ROWS = """
layers = [keras.layers.Reshape((2, 2)), keras.layers.LSTM(3, stateful=True), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input(batch_shape=(8, 4)), *layers])
model.compile(keras.optimizers.SGD(0.05), "mse")
model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
found["predictions"] = [model.predict(x, batch_size=8, verbose=0) for _ in range(2)]
found["weights"] = model.get_weights()
"""

CALLED = """
calls, orders = [], []
def order(logs):
    orders.append([sorted(logs).index(name) for name in logs])
class Calls(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None): calls.append(batch)
    def on_train_batch_end(self, batch, logs=None): calls.append(-len(logs))
    def on_epoch_end(self, epoch, logs=None): order(logs)
    def on_test_end(self, logs=None): order(logs)
model = built()
model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae", "acc"], steps_per_execution=2)
fit = model.fit(x, y, batch_size=9, epochs=2, validation_data=(x, y), verbose=0, callbacks=[Calls()])
order(fit.history)
order(model.evaluate(x, y, batch_size=9, verbose=0, return_dict=True, callbacks=[Calls()]))
found["calls"], found["weights"], found["order of logs"] = calls, model.get_weights(), orders
"""

ITEMS = """
class Items(keras.utils.PyDataset):
    def __init__(self, ends, changes=False):
        super().__init__()
        self.ends, self.changes, self.epochs = ends, changes, 0
    def __len__(self):
        return len(self.ends) - 1
    def __getitem__(self, n):
        rows = slice(*self.ends[n : n + 2])
        return x[rows] + self.changes * self.epochs, y[rows]
    def on_epoch_end(self):
        self.epochs += 1
for name, ends in {"short": (0, 8, 16, 19, 27), "long": (0, 8, 16, 30, 38, 40), "last": (0, 16, 32, 37)}.items():
    for steps in (None, 2):
        model, told = built(), []
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda n, logs: told.append(note.params["steps"]))
        held = Items(ends)
        given = {"epochs": 3, "steps_per_epoch": steps, "callbacks": [note], "verbose": 0}
        fit = model.fit(Items(ends, not steps), validation_data=held, **given)
        found[f"{name}, {steps}"] = [*model.get_weights(), *fit.history["val_loss"], told]
        found[f"{name}, {steps}"] += [model.evaluate(Items(ends), verbose=0)]
"""

IMAGES = """
turned = tf.keras.preprocessing.image.ImageDataGenerator(rescale=0.5, horizontal_flip=True)
images = x.reshape(48, 2, 2, 1)
model = keras.Sequential([keras.Input((2, 2, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05), "mse")
held = tf.keras.preprocessing.image.ImageDataGenerator().flow(images, y, batch_size=8, shuffle=False)
flow = turned.flow(images, y, batch_size=8, shuffle=False, seed=1)
fit = model.fit(flow, epochs=2, validation_data=held, verbose=0)
found["steps"], found["predictions"] = int(model.optimizer.iterations), model.predict(held, verbose=0).shape
"""

WHOLE = """
import random
class Held(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.held = (tf.Variable(random.SystemRandom().random()),)  # Another one on each rank.
    def call(self, x):
        return x * self.held[0]
norm = keras.layers.Normalization()
norm.adapt(x + random.SystemRandom().random())
model = built(norm, Held())
model.compile("sgd", keras.losses.Dice())  # Of the whole batch.
model.fit(x, abs(y), batch_size=16, verbose=0)
own, shared = model(x).numpy(), model.predict(x, batch_size=16, verbose=0)
found["predictions"] = shared / own
model = built()
model.compile("sgd", "mse", steps_per_execution=4)
endless = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat()
model.fit(endless, steps_per_epoch=6, epochs=2, verbose=0)  # Keras makes 8 steps of them.
found["weights"] = model.get_weights()
"""

MIRRORED = """
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = built()
    optimizer, loss_of = keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError(reduction=None)
batch = 8 * strategy.num_replicas_in_sync
model.fit(x, y, batch_size=batch, verbose=0)
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.nn.compute_average_loss(loss_of(y, model(x)), global_batch_size=batch)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss
@tf.function
def on_replicas(batch):
    return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(batch))
found["losses"] = [on_replicas(batch) for batch in batches]
found["weights"] = model.get_weights()
"""

SCRIPTS = {
    "files of callbacks": FILES,
    "numbers that are drawn": DRAWS,
    "generators that end": ENDS,
    "errors of rank 0": ERRORS,
    "states of rows": ROWS,
    "calls of callbacks": CALLED,
    "items of several lengths": ITEMS,
    "iterators over images": IMAGES,
    "what every rank trains": WHOLE,
    "a strategy of one replica": MIRRORED,
}


def case_small() -> dict[str, float]:
    """Return how far the values of `found` in each script are from those of one process."""
    apart: dict[str, float] = {}
    for name, text in SCRIPTS.items():
        found, wanted = _found(name, text, adopted=True), _found(name, text, adopted=False)
        assert set(found) == set(wanted)
        apart |= {f"{name}: {key}": far(found[key], wanted[key], "relative") for key in wanted}
    return apart


def _found(name: str, text: str, adopted: bool) -> dict[str, Any]:
    """Run a script, in a folder of all ranks or as one process in this rank's."""
    where = "all" if adopted else f"rank {ALL_RANKS.rank()}"
    script = Path(os.environ["FOLDER"], where, name, "script.py")
    if ALL_RANKS.rank() == 0 or not adopted:
        script.parent.mkdir(parents=True)
        script.write_text(BEGIN + text)
    any_rank(False, "script_is_there")
    run = partial(run_adopted, str(script), []) if adopted else partial(run_script, str(script))
    run_beside(run, script.parent)
    found: dict[str, Any] = vars(sys.modules["__main__"])["found"]
    any_rank(False, "all_have_ended")
    return found


FORKED = """
import os
from hvdtrain.errors import UsageError
model = built()
model.fit(x, y, verbose=0)
def refused(call):
    child = os.fork()
    if child == 0:
        try:
            call(x)
        except UsageError as error:
            os._exit("get_context" in str(error))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
for call in (model.fit, model.evaluate, model.predict):
    found[call.__name__] = refused(call)
model.fit(x, y, verbose=0)
"""


def case_forked() -> dict[str, int]:
    """Return whether each call that would wait for ever is refused in a process that a script forks."""
    return _found("forked", FORKED, adopted=True)


CAUGHT = """
model = built()
try:
    model.fit(x, y[:5], verbose=0)
except ValueError as error:
    found["refused"] = "cardinality" in str(error)
model.fit(x, y, verbose=0)
found["is shared"] = vars(model)["_hvdtrain_adopted"].trainer is not None
"""


def case_caught() -> dict[str, bool]:
    """Return whether Keras's own error came, and whether the fit after it was shared."""
    return _found("caught", CAUGHT, adopted=True)
