"""Global batches: which rank gets which example, at which step.

`make_source` turns the user's data into a `Source`; `Source.epoch` yields one `Share` per step. Nothing here
communicates: rank and size are arguments, and the caller compares what ranks must agree on (`Source.element`,
`Share.checksum`, the end of a stream).
"""

from hvdtrain.data.arrays import validation_split
from hvdtrain.data.files import from_files
from hvdtrain.data.indexed import KnownSource
from hvdtrain.data.make import make_source
from hvdtrain.data.prefetch import prefetch
from hvdtrain.data.sharding import shard
from hvdtrain.data.share import Part, Share, Source, split
from hvdtrain.data.structures import Spec
from hvdtrain.data.tf_data_graph import is_batched
from hvdtrain.data.user_sharded import ShardedSource

__all__ = [
    "KnownSource",
    "Part",
    "ShardedSource",
    "Share",
    "Source",
    "Spec",
    "from_files",
    "is_batched",
    "make_source",
    "prefetch",
    "shard",
    "split",
    "validation_split",
]
