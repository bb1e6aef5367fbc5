"""Measures the throughput of other ways to train on the same cores, and of hvdtrain.

Each way trains in turns with one process of Keras on all cores, so that their ratio hardly depends on the machine's
varying speed. All train the same network on the same global batch, held in memory, with SGD and momentum: Keras on one
core (with its share of the batch), MirroredStrategy, Horovod's own optimizer on tf-keras, with Horovod's own settings,
and PyTorch's DistributedDataParallel. Ways that are not installed are left out.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.bench import scaling, torch_peer
from hvdtrain.bench.measurement import THREADS, Comparison, Launch, take_core
from hvdtrain.bench.scaling import training_step
from hvdtrain.bench.turns import Job, Training, end, in_turns, keep_mpi, serve, take_turns
from hvdtrain.errors import EngineError


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        title: Title in the table.
        ours: Whether hvdtrain trains.
        cores: "one" core, "all" cores of one process, or "each" core a rank.
        needs: Name of a module that must be installed.
    """

    title: str
    ours: bool
    cores: str
    needs: str = "keras"


WAYS = {
    "plain": Way("Keras, one core", False, "one"),
    "threads": Way("Keras, one process on all cores", False, "all"),
    "mirrored": Way("MirroredStrategy, one process on all cores", False, "all"),
    "horovod": Way("Horovod's optimizer on tf-keras", False, "each", "tf_keras"),
    "torch": Way("PyTorch, DistributedDataParallel", False, "each", "torch"),
    "bare": Way("hvd.allreduce on each gradient", False, "each"),
    "keras": Way("hvdtrain.keras", True, "each"),
    "trainer": Way("hvdtrain.Trainer", True, "each"),
}
"""Name for `build`, `scaling.build` or `torch_peer.build` -> way."""
REFERENCE = "threads"
"""The way with which each other takes turns."""


def measure_peers(
    model: str,
    batch_size: int,
    passes: int,
    size: int,
    launch: Launch,
    without_settings: Launch,
) -> Iterator[tuple[str, list[Comparison] | EngineError]]:
    """Yield the examples per second of the reference and of each other way that is installed, in each pass.

    Another framework that fails is left out: its error takes the place of its figures. `without_settings` starts ranks
    without hvdtrain's settings.

    Raises:
        EngineError: If a way of Keras or hvdtrain failed.
    """

    def job(name: str) -> Job:
        way = WAYS[name]
        modules = {"torch": torch_peer.__file__, **dict.fromkeys(_BUILD, __file__)}
        script = Path(modules.get(name, scaling.__file__))
        options = {"way": name, "name": model, "batch_size": batch_size}
        if way.cores == "all":
            options["batch_size"], options["cores"] = batch_size * size, size
        ranks = size if way.cores == "each" else 1
        begin = {"horovod": without_settings, "torch": torchrun}.get(name, launch)
        return start(begin, ranks, script, options, _environment(name, way, size))

    with in_turns() as start:
        reference = job(REFERENCE)
        for name, way in WAYS.items():
            if name == REFERENCE or not importlib.util.find_spec(way.needs):
                continue
            try:
                other = job(name)
                turns = [take_turns(reference) + take_turns(other) for _ in range(passes)]
            except EngineError as error:
                if way.needs == "keras":
                    raise
                yield name, error
                continue
            end([other])
            yield name, [Comparison(*(turn.rate for turn in both)) for both in turns]


def torchrun(np: int, script: Path, arguments: tuple[str, ...]) -> list[str]:
    """Return the argv that runs `script` in `np` processes of PyTorch on this machine."""
    run = [sys.executable, "-P", "-m", "torch.distributed.run"]
    return [*run, "--standalone", f"--nproc-per-node={np}", str(script), *arguments]


def _environment(name: str, way: Way, size: int) -> dict[str, str]:
    if way.cores == "all":
        return dict.fromkeys(THREADS, str(size))
    return {"TF_USE_LEGACY_KERAS": "1"} if name == "horovod" else {}


def build(way: str, name: str, batch_size: int, cores: int = 1) -> Training:
    """Build what a process on several cores, or a rank, trains."""
    return _BUILD[way](name, batch_size, cores)


def _threads(name: str, batch_size: int, cores: int) -> Training:
    take_core(0, cores)
    return Training(training_step("plain", name, batch_size, 0, 1), 0, batch_size)


def _mirrored(name: str, batch_size: int, cores: int) -> Training:
    import keras
    import tensorflow as tf

    from hvdtrain.bench.networks import MODELS, examples, loss

    take_core(0, cores)
    (processor,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * cores
    tf.config.set_logical_device_configuration(processor, devices)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(cores)])
    with strategy.scope():
        model = MODELS[name]()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss(), jit_compile=False)
        # Before the first step, which could not create mirrored variables.
        model.optimizer.build(model.trainable_variables)
    model.make_train_function()
    x, y = examples(model, batch_size, 0)

    def part(values: Any) -> Any:
        """Divide the batch over the devices."""
        return strategy.experimental_distribute_values_from_function(
            lambda replica: tf.constant(values[replica.replica_id_in_sync_group :: cores])
        )

    batches = itertools.repeat((part(x), part(y)))
    return Training(lambda: float(model.train_function(batches)["loss"]), 0, batch_size)


def _horovod(name: str, batch_size: int, cores: int) -> Training:
    keep_mpi()
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf
    import tf_keras

    from hvdtrain.bench.networks import MODELS, examples, loss

    hvd.init()
    take_core(hvd.local_rank())
    model = MODELS[name](tf_keras)
    optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.01, momentum=0.9))
    model.compile(optimizer, loss(tf_keras), jit_compile=False)
    function = model.make_train_function()
    batches = itertools.repeat(tuple(map(tf.constant, examples(model, batch_size, hvd.rank()))))
    return Training(
        lambda: float(function(batches)["loss"]),
        hvd.rank(),
        batch_size * hvd.size(),
        resume=hvd.init,
        pause=hvd.shutdown,
    )


_BUILD = {"threads": _threads, "mirrored": _mirrored, "horovod": _horovod}


if __name__ == "__main__":
    serve(build)
