"""TPU: synchronous training on the cores of a TPU, through tf.distribute.TPUStrategy.

Every core has its own copy of the variables. A step, with its allreduce and update, is one TPU program. All batches
have one static shape. `steps_per_execution` runs several steps without returning to Python;
`precision="mixed_bfloat16"` computes in the TPU's native format.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.keras_internals import replica_scope
from hvdtrain.strategies.replica_steps import ReplicaSteps, variables_on_replicas
from hvdtrain.strategies.replica_strategy import ReplicaStrategy
from hvdtrain.strategies.strategy import ModelSource
from hvdtrain.strategies.trial import in_one_line
from hvdtrain.strategy_names import TPU as NAME
from hvdtrain.strategy_names import TPU_CHIPS

METADATA = "169.254.169.254"
"""Address of the metadata server on Google Cloud machines; elsewhere nothing answers there."""

SECONDS = 3.0
"""Time-out for an address to answer."""


class TPU(ReplicaStrategy):
    """The cores of one TPU, or of a TPU slice on several hosts that one process drives.

    Args:
        name: "local" for the chips of this machine, or the name or address (grpc://host:port) of a TPU. Default:
            the variable TPU_NAME, or else "local".
    """

    name: ClassVar[str] = NAME

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self._tpu = name

    def connect(self) -> tf.distribute.Strategy:
        strategy = connect(self._tpu)
        replica_scope.read_mirrored_scalars()
        return strategy

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        assert self._strategy is not None
        return variables_on_replicas(self._strategy)

    def build(self, model: ModelSource) -> keras.Model:
        if isinstance(model, keras.Model) and model.variables:
            raise UsageError(
                f"strategy {NAME}: the model was built before the TPU was connected, so its "
                "variables are elsewhere: pass the Trainer a function that builds it, "
                "Trainer(build_model, ...)"
            )
        return super().build(model)

    def distribute(self, optimizer: Any) -> Any:
        """Return an optimizer of the same configuration whose variables are on the TPU.

        Raises:
            UsageError: The optimizer is distributed by Horovod, or has variables already, which are elsewhere.
        """
        super().distribute(optimizer)
        if optimizer.built:
            raise UsageError(
                f"strategy {NAME}: the optimizer was used before the TPU was connected, so its "
                "state is elsewhere: pass the Trainer a new one"
            )
        with self.scope():
            return replica_scope.made_again(optimizer)

    def steps(self, model: keras.Model, examples: int) -> ReplicaSteps:
        assert self._strategy is not None
        if model.run_eagerly:
            raise UsageError(
                f"run_eagerly=True does not work with strategy {NAME}: a TPU runs compiled programs only. Debug with "
                "strategy='horovod'"
            )
        return ReplicaSteps(model, self._strategy, examples, parameter_device=None)


def connect(name: str | None) -> tf.distribute.Strategy:
    """Find the TPU, initialize its system, and return the strategy over its cores.

    Raises:
        UsageError: There is no TPU, or it cannot be started. Raised within seconds where TensorFlow's own resolver
            retries for minutes.
    """
    address = find_tpu(name, os.environ, Path("/dev"))
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address)
        if address != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (tf.errors.OpError, ValueError, RuntimeError, ImportError, OSError) as error:
        raise UsageError(
            f"strategy {NAME}: the TPU {address!r} cannot be started: {in_one_line(error)}"
        ) from error


def find_tpu(name: str | None, environ: Mapping[str, str], devices: Path) -> str:
    """Return the address for TensorFlow's resolver: "local", or a name or address that answers.

    Raises:
        UsageError: There is no TPU that this TensorFlow can use.
    """
    wanted = name or environ.get("TPU_NAME") or None
    chips = any(path for pattern in TPU_CHIPS for path in devices.glob(pattern))
    if wanted is None and not chips:
        raise UsageError(
            f"strategy {NAME}: this machine has no TPU (no chip in {devices}), and TPU_NAME does not name another: run "
            "on a TPU machine, set TPU_NAME to a TPU's name or to grpc://host:port, or use "
            "another strategy (hvdtrain strategies lists them)"
        )
    if wanted in (None, "local"):
        if not chips:
            raise UsageError(
                f"strategy {NAME}: {wanted!r} asks for a TPU in this machine, which has none (no chip in {devices})"
            )
        if importlib.util.find_spec("libtpu") is None:
            raise UsageError(
                f"strategy {NAME}: this TensorFlow cannot use the TPU of this machine: pip install tensorflow-tpu, of "
                f"the version {tf.__version__}"
            )
        return "local"
    assert wanted is not None
    if wanted.startswith("grpc://"):
        host, _, port = wanted.removeprefix("grpc://").partition(":")
        _require_answer(host, port, f"no TPU answers at {wanted}")
    else:
        _require_answer(
            environ.get("GCE_METADATA_IP", METADATA),
            "80",
            f"the TPU {wanted!r} can be looked up only on Google Cloud machines, and this is not "
            "one: use its address, grpc://host:port",
        )
    return wanted


def _require_answer(host: str, port: str, complaint: str) -> None:
    try:
        with socket.create_connection((host, int(port or 8470)), SECONDS):
            pass
    except (OSError, ValueError) as error:
        raise UsageError(f"strategy {NAME}: {complaint} ({error})") from error
