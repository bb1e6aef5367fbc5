"""Scripts of strangers, run on all ranks as `hvdtrain run --adopt` does, beside one plain process."""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.trainer import Trainer as BaseTrainer
from keras.src.utils import file_utils
from references import reference
from results import far

from hvdtrain.adopt import private_folder
from hvdtrain.adopt.__main__ import run_adopted
from hvdtrain.adopt.private_folder import mirror
from hvdtrain.adopt_options import AdoptOptions
from hvdtrain.collectives.communicator import ALL_RANKS
from hvdtrain.collectives.consistency import any_rank
from hvdtrain.messages import logger
from hvdtrain.starters.explicit_script import explicit
from hvdtrain.worker.main_module import run_script

SCRIPTS = Path(__file__).parents[1] / "adopted"


def case_scripts() -> dict[str, Any]:
    """Run each of SCRIPTS in a folder of its own; return its weights and files, and what it was told."""
    found = {}
    for name in os.environ["SCRIPTS"].split():
        script, folder = SCRIPTS / f"{name}.py", Path(os.environ["FOLDER"], name)
        folder.mkdir(exist_ok=True)
        any_rank(False, "folder_is_there")
        weights, told = run_beside(partial(run_adopted, str(script), []), folder)
        any_rank(False, "all_have_ended")
        one = reference(partial(_one_process, script), name=name, any_size=True)
        found[name] = {
            "weights": one.apart(weights, "weights", "relative"),
            "files": _files(folder),
            "told": told,
        }
    return found


ONCE = """
import keras
path = keras.utils.get_file("table.csv", origin="file://{folder}/source.csv", cache_dir="{folder}/cache")
line = open(path).read()
name = input("Name? ")
"""


def case_once() -> list[Any]:
    """Return the number of downloads of this rank, and what it has read from the file and from the keyboard."""
    rank, folder = ALL_RANKS.rank(), Path(os.environ["FOLDER"])
    script = folder / "once.py"
    if rank == 0:
        (folder / "source.csv").write_text("1,2")
        (
            folder / "cache"
        ).mkdir()  # Otherwise Keras keeps the file elsewhere, for later runs as well.
        script.write_text(ONCE.format(folder=folder))
    any_rank(False, "files_are_there")
    retrieve = file_utils.urlretrieve
    with (
        mock.patch.object(file_utils, "urlretrieve", side_effect=retrieve) as downloads,
        mock.patch.object(builtins, "input", lambda prompt: f"{prompt}{rank}"),
    ):
        run_beside(partial(run_adopted, str(script), []), folder)
    main = vars(sys.modules["__main__"])
    return [downloads.call_count, main["line"], main["name"]]


def case_explicit() -> list[Any]:
    """Return the weights of a script to which `hvdtrain new --from` was applied."""
    source = SCRIPTS / f"{os.environ['SCRIPTS']}.py"
    folder = Path(os.environ["FOLDER"], f"explicit on {ALL_RANKS.size()}")
    if ALL_RANKS.rank() == 0:
        folder.mkdir()
    any_rank(False, "folder_is_there")
    script = folder / f"rank-{ALL_RANKS.rank()}.py"
    # A ReLU near 0 would turn rounding into another path, on one processor or another.
    smooth = source.read_text().replace("layers.ReLU()", 'layers.Activation("silu")')
    script.write_text(explicit(smooth).text)
    sys.argv = [str(script)]
    return run_beside(partial(run_script, str(script)), folder)[0]


MADE = """
import pathlib
was_there = pathlib.Path("made.zip").exists()
pathlib.Path("made.zip").write_text("by this rank")
"""


def case_slow_folder() -> bool:
    """Return whether this rank found a file that the script makes; the second rank's folder takes its time."""
    folder = Path(os.environ["FOLDER"], "slow")
    if ALL_RANKS.rank() == 0:
        folder.mkdir()
        (folder.parent / "made.py").write_text(MADE)
    any_rank(False, "script_is_there")

    def slow(*folders: Path) -> None:
        time.sleep(1)
        mirror(*folders)

    with mock.patch.object(private_folder, "mirror", slow):
        run_beside(partial(run_adopted, str(folder.parent / "made.py"), []), folder)
    return bool(vars(sys.modules["__main__"])["was_there"])


BESIDE = """
import sys
from pathlib import Path
(Path(__file__).parent / "out").mkdir()
for folder in (Path(__file__).parent / "out", Path(sys.argv[1])):
    with open(folder / "log.txt", "a") as file:
        file.write("once")
"""


def case_beside() -> list[str]:
    """Return what a script has written beside itself, and to a folder of its arguments, from another folder."""
    folder = Path(os.environ["FOLDER"], "beside")
    if ALL_RANKS.rank() == 0:
        for made in (folder / "src", folder / "here" / "deep"):
            made.mkdir(parents=True)
        (folder / "src" / "script.py").write_text(BESIDE)
    any_rank(False, "script_is_there")
    arguments = [str(folder / "here" / "deep")]
    script = str(folder / "src" / "script.py")
    run_beside(partial(run_adopted, script, arguments), folder / "here")
    any_rank(False, "all_have_written")
    return [path.read_text() for path in sorted(folder.rglob("log.txt"))]


WHOLE = """
import keras, numpy
keras.utils.set_random_seed(1)
x = numpy.random.normal(size=(16, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(2, "sigmoid")])
model.compile("adam", keras.losses.Dice())  # Of the whole batch: a Trainer refuses it.
seen = []
note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model.layers[-1].kernel.numpy()))
model.fit(x, abs(x[:, :2]), batch_size=8, epochs=2, callbacks=[note])
"""


def case_whole() -> list[Any]:
    """Return what this rank has after each epoch of a fit that every rank trains on whole batches."""
    script = _written("whole.py", WHOLE)
    run_beside(partial(run_adopted, str(script), []), script.parent)
    seen: list[Any] = vars(sys.modules["__main__"])["seen"]
    return seen


def _written(name: str, text: str) -> Path:
    """Return the path of a script that rank 0 writes."""
    script = Path(os.environ["FOLDER"], name)
    if ALL_RANKS.rank() == 0:
        script.write_text(text)
    any_rank(False, "script_is_there")
    return script


PARTED = """
import keras, numpy
keras.utils.set_random_seed(1)
x = numpy.random.normal(size=(16, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.1), "mse")
for _ in range({fits}):  # As a loop until some time is up.
    model.fit(x, x[:, :1] ** 2, batch_size=8, verbose=0)
if {evaluates}:
    model.evaluate(x, x[:, :1] ** 2, batch_size=8, verbose=0)
"""


PARTED_LOOP = """
import keras, numpy, tensorflow as tf
keras.utils.set_random_seed(1)
x = tf.constant(numpy.random.normal(size=(16, 4)).astype("float32"))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.1)
@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = keras.losses.MeanSquaredError()(y, model(x))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss
for _ in range({fits}):
    step(x, x[:, :1] ** 2)
"""


def case_parted() -> dict[str, Any]:
    """Return how far rank 0's weights are from those of one process after loops of different length, and what it told.

    The second rank reaches the end of the script first, or last, or comes to another call.
    """
    rank, found = ALL_RANKS.rank(), {}
    own = Path(os.environ["FOLDER"], f"rank {rank}")
    own.mkdir(exist_ok=True)
    for name, text, fits, evaluates in (
        ("fewer", PARTED, (5, 3), 0),
        ("more", PARTED, (3, 5), 0),
        ("other", PARTED, (4, 3), 1),
        ("loop", PARTED_LOOP, (30, 20), 0),
    ):
        script = own / f"{name}.py"
        script.write_text(text.format(fits=fits[rank], evaluates=evaluates))
        weights, told = run_beside(partial(run_adopted, str(script), []), own)
        any_rank(False, "parted")
        firsts = own.with_name("rank 0") / script.name
        one = reference(partial(_one_process, firsts), name=name, any_size=True)
        found[name] = [one.apart(weights, "weights", "relative"), told]
    return found if rank == 0 else {}


GROWN = """
import keras, numpy, tempfile, tensorflow as tf
keras.utils.set_random_seed(1)
x = numpy.random.normal(size=(50, 4)).astype("float32")
y = x[:, :1] ** 2
file = tempfile.mkdtemp() + "/model.keras"
class Items(keras.utils.PyDataset):
    def __len__(self): return -(-50 // {batch})
    def __getitem__(self, n): return x[n * {batch}:][:{batch}], y[n * {batch}:][:{batch}]
kinds = {{
    "arrays": dict(x=x, y=y, batch_size={batch}),
    "Dataset": dict(x=tf.data.Dataset.from_tensor_slices((x, y)).batch({batch})),
    "PyDataset": dict(x=Items(workers=1), shuffle=False),
}}
found = {{}}
for name, data in kinds.items():
    keras.utils.set_random_seed(2)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, "tanh")(inputs)
    model = keras.Model(inputs, {{"y": keras.layers.Dense(1, name="y")(hidden), "hidden": hidden}})
    model.compile(keras.optimizers.SGD({rate}, momentum=0.9), {{"y": "mse", "hidden": None}})
    fit = model.fit(**data, epochs=2, validation_data=(x, y), verbose=0)
    model.save(file)
    model = keras.models.load_model(file)  # With its learning rate.
    model.fit(**data, verbose=0)
    model.fit(**data, verbose=0)
    found[name] = [*model.get_weights(), *fit.history["val_loss"], float(model.optimizer.learning_rate) / {rate}]
"""

CALLS = """
import keras, numpy, tensorflow as tf
keras.utils.set_random_seed(1)
x = numpy.random.normal(size=(50, 4)).astype("float32")
y = x[:, :1] ** 2
found = {}
def built(loss="mse", kind=keras.Model):
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, "tanh")(inputs)
    model = kind(inputs, {"y": keras.layers.Dense(1, name="y")(hidden), "hidden": hidden})
    model.compile("sgd", {"y": loss, "hidden": None})
    return model
model = built()
fit = model.fit(x, y, epochs=2, steps_per_epoch=5, validation_data=(x, y), validation_steps=4, verbose=0)
found["steps"] = [fit.history["loss"], fit.history["val_loss"][0], model.evaluate(x, y, steps=3, verbose=0)]
found["predictions"] = [model.predict(x[:8], verbose=0), model.predict(x, verbose=0)]
found["in small batches"] = model.predict(x, batch_size=5, verbose=0)
found["in steps"] = [model.predict(x, steps=2, verbose=0), model.predict(x, steps=3, batch_size=5, verbose=0)]
def sparse():
    for n in range(5):
        yield (tf.sparse.from_dense(x[n * 10:][:10]),)
found["of a generator"] = model.predict(sparse(), verbose=0)
sums = built(keras.losses.MeanSquaredError(reduction="sum"))
sums.fit(x, y, batch_size=16, verbose=0)
found["a sum"] = [sums.evaluate(x, y, verbose=0), sums.evaluate(x, y, batch_size=16, verbose=0)]
fit = sums.fit(x, y, batch_size=16, validation_data=(x, y), validation_batch_size=10, verbose=0)
found["a sum"] += fit.history["val_loss"]
class OfBatches(keras.layers.Layer):
    def call(self, x, training=None):
        return x if training else x - tf.reduce_mean(x, axis=0)
mixing = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), OfBatches()])
mixing.compile("sgd", "mse")
mixing.fit(x, y, batch_size=10, verbose=0)
found["of batches"] = mixing.predict(x, batch_size=10, verbose=0)
class Counting(keras.layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
    def call(self, x, training=None):
        if not training:
            self.count.assign_add(1.0)
        return x
counting = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1), Counting()])
counting.compile("sgd", "mse")
counting.fit(x, y, batch_size=10, verbose=0)
counting.predict(x, batch_size=10, verbose=0)
found["counted"] = float(counting.layers[-1].count)
layers = [keras.layers.Embedding(9, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
words = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
words.compile("sgd", "mse")
numbers = numpy.arange(200).reshape(50, 4) % 9
words.fit(numbers, y, batch_size=10, verbose=0)
numbers[20, 3] = 99  # Of one worker's share.
try:
    words.predict(numbers, batch_size=10, verbose=0)
except tf.errors.InvalidArgumentError:
    numbers[20, 3] = 0
found["after an error"] = words.predict(numbers, batch_size=10, verbose=0)
def froze(retrace):
    model = built()
    model.fit(x, y, batch_size=10, verbose=0)
    model.layers[1].trainable = False
    if retrace:
        model.make_train_function(force=True)
    model.fit(x, y, batch_size=10, verbose=0)
    return [*model.get_weights(), model.layers[1].trainable]
found["frozen, not compiled"] = froze(retrace=False)
found["frozen, traced again"] = froze(retrace=True)
"""


def case_grown() -> dict[str, Any]:
    """Return how far weights, losses and rates are from those of one process with a batch twice as large."""
    texts = [GROWN.format(batch=8 * n, rate=0.01 * n) for n in (1, 2)]
    return _beside_one_process(*texts, AdoptOptions("per-worker", "linear"))


def case_calls() -> dict[str, Any]:
    """Return how far what fits, evaluations and predictions return is from one process, and the messages."""
    return _beside_one_process(CALLS, CALLS, AdoptOptions(explain=True))


def _beside_one_process(adopted: str, plain: str, options: AdoptOptions) -> dict[str, Any]:
    """Return how far apart the values of `found` in two scripts are, and what the first one was told."""
    script = Path(os.environ["FOLDER"], f"rank {ALL_RANKS.rank()}", "script.py")
    script.parent.mkdir(exist_ok=True)
    script.write_text(adopted)
    _, told = run_beside(partial(run_adopted, str(script), [], options), script.parent)
    found = vars(sys.modules["__main__"])["found"]
    any_rank(False, "both_have_ended")
    script.write_text(plain)
    run_beside(partial(run_script, str(script)), script.parent)
    wanted = vars(sys.modules["__main__"])["found"]
    return {
        "apart": {name: far(found[name], wanted[name], "relative") for name in wanted},
        "told": told,
    }


def _one_process(script: Path) -> dict[str, Any]:
    folder = Path(os.environ["FOLDER"], f"plain {script.stem}")
    folder.mkdir()
    sys.argv = [str(script)]
    weights, _ = run_beside(partial(run_script, str(script)), folder)
    return {"weights": weights}


def run_beside(script: Callable[[], None], folder: Path) -> tuple[list[list[Any]], list[str]]:
    """Run a script in `folder`; return the weights of its models, and hvdtrain's messages."""
    models: list[keras.Model] = []
    compiling, calling = BaseTrainer.compile, keras.Model.__call__
    called: list[keras.Model] = []

    def noting(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(model is known for known in models):
            models.append(model)
        return compiling(model, *args, **kwargs)

    def noting_call(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(model is known for known in called):
            called.append(model)
        return calling(model, *args, **kwargs)

    before, path, environment = Path.cwd(), list(sys.path), dict(os.environ)
    keras.utils.set_random_seed(0)
    os.chdir(folder)
    try:
        with (
            mock.patch.object(BaseTrainer, "compile", noting),
            mock.patch.object(keras.Model, "__call__", noting_call),
            _messages() as told,
            contextlib.suppress(SystemExit),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            script()
    finally:
        os.chdir(before)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)
        logging.getLogger().handlers.clear()
        tf.config.run_functions_eagerly(False)
        keras.config.set_dtype_policy("float32")
    of_script = vars(sys.modules["__main__"]).values()
    models += [one for one in of_script if isinstance(one, keras.Model) and one not in models]
    models = models or called  # A model of a function's own, in a loop.
    weights = [[np.asarray(one) for one in model.weights] for model in models if model.weights]
    keras.backend.clear_session()
    return weights, told


@contextlib.contextmanager
def _messages() -> Iterator[list[str]]:
    """Collect what hvdtrain logs and warns of."""
    told: list[str] = []

    def hear(record: logging.LogRecord) -> bool:
        told.append(record.getMessage())
        return False

    logger().addFilter(hear)
    with warnings.catch_warnings(record=True, action="always") as warned:
        try:
            yield told
        finally:
            logger().removeFilter(hear)
            told += [str(one.message) for one in warned]


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
