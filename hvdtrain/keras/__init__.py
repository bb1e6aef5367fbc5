"""Horovod for Keras 3: `import hvdtrain.keras as hvd` in place of `import horovod.tensorflow.keras as hvd`.

Names, arguments and meaning are Horovod's. With Keras 2 (TF_USE_LEGACY_KERAS=1 and tf-keras), where Horovod's own
module works, this module exports Horovod's objects unchanged.

In addition to horovod.tensorflow.keras it has `Compression.bf16`, `check_replicas`, `broadcast_variables` for Keras
variables, `SyncBatchNormalization`, `DistributedGradientTape`, `PartialDistributedGradientTape` and the optimizer
`LARS`.
"""

from hvdtrain.keras.legacy import horovod_names, uses_legacy_keras
from hvdtrain.runtime import load_horovod

if uses_legacy_keras():
    globals().update(horovod_names())
else:
    load_horovod()  # Raises one clear error if Horovod cannot be loaded.
    from hvdtrain.collectives.compression import Compression as Compression
    from hvdtrain.collectives.replicas import (
        broadcast_global_variables as broadcast_global_variables,
    )
    from hvdtrain.collectives.replicas import broadcast_variables as broadcast_variables
    from hvdtrain.collectives.replicas import check_replicas as check_replicas
    from hvdtrain.keras import callbacks as callbacks
    from hvdtrain.keras import elastic as elastic
    from hvdtrain.keras.collectives import *  # noqa: F403 - Horovod's collectives and queries
    from hvdtrain.keras.lars import LARS as LARS
    from hvdtrain.keras.optimizer import DistributedOptimizer as DistributedOptimizer
    from hvdtrain.keras.optimizer import PartialDistributedOptimizer as PartialDistributedOptimizer
    from hvdtrain.keras.saving import load_model as load_model
    from hvdtrain.keras.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
    from hvdtrain.keras.tape import DistributedGradientTape as DistributedGradientTape
    from hvdtrain.keras.tape import PartialDistributedGradientTape as PartialDistributedGradientTape
