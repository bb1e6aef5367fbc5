"""Examples in files: each rank reads and decodes only the examples that it trains on.

Examples are numbered by file, or by record across all TFRecord files. Their order is a permutation that depends on seed
and pass, as for arrays, so a global batch holds the same examples for any number of workers. To number records, each
rank first reads the 12-byte header of each, which takes about a second per million. The records themselves are read,
and their checksums verified, when they are needed.
"""

from __future__ import annotations

import glob
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data import structures, tf_dataset
from hvdtrain.data.arrays import to_array
from hvdtrain.data.class_weight import apply_class_weight, weighted_element
from hvdtrain.data.indexed import KnownSource, Slot
from hvdtrain.data.share import ReadOptions, Share
from hvdtrain.data.streams import global_batches
from hvdtrain.data.tf_data_graph import COUNTING, nodes_of_all
from hvdtrain.errors import UsageError, warn_user

RECORDS = re.compile(r"\.tfrecords?(-\d+-of-\d+)?$")
HEADER = struct.Struct("<QI")  # length of the record, checksum of the length
FOOTER = 4  # bytes of the checksum of the record
GZIP = b"\x1f\x8b"
OPEN_FILES = 256
"""Maximum number of open TFRecord files; a process may have 1024 open files of all kinds."""
STATELESS = (
    "use the functions of tf.random and tf.image that begin with stateless_, with a seed made of the file name or the "
    "record (tf.strings.to_hash_bucket_fast)"
)
COMPARED_BYTES = 4096
"""Number of bytes at the end of a file by which ranks check that they have the same file."""


@dataclass(frozen=True, eq=False)
class Files:
    """Files of examples, as returned by `from_files` and passed as x to fit, evaluate and predict.

    Attributes:
        paths: Paths of the files, in order.
        read: Maps a file name or a serialized record to an example; see `from_files`.
        labels: One label per file, shape (files, ...), or None.
        records: Whether these are TFRecord files.
    """

    paths: tuple[str, ...]
    read: Callable[..., Any]
    labels: np.ndarray | None
    records: bool


def from_files(
    files: str | Path | Sequence[str | Path],
    read: Callable[..., Any],
    *,
    labels: Any = None,
    records: bool | None = None,
) -> Files:
    """Return the examples in files, as data for Trainer.fit, evaluate and predict.

        train = hvdtrain.data.from_files("train-*.tfrecord", parse)
        trainer.fit(train, epochs=10)

    Each rank reads and decodes only its own examples. The examples of a batch depend on seed and epoch, never on the
    number of workers. Every rank needs access to all files.

    Args:
        files: A path, a pattern ("images/*/*.png", in alphabetical order), or a list of paths.
        read: Function that maps the file name of one example (a scalar string tensor), or one serialized record, to x,
            (x, y) or (x, y, sample_weight) of a fixed shape. It is traced by TensorFlow, as in tf.data.Dataset.map: use
            tf.io.read_file, tf.io.decode_png, tf.io.parse_single_example. Its random numbers must depend on its
            arguments only (tf.random.stateless_uniform); others differ with the number of workers, and checkpoints
            refuse them. To read in Python, write a keras.utils.PyDataset instead.
        labels: Array of shape (files, ...), for files of one example each; `read` gets the label of the file as its
            second argument.
        records: Whether these are (uncompressed) TFRecord files of many examples. Default: decided by their names
            (train.tfrecord, train.tfrecord-00000-of-00010).

    Raises:
        UsageError: If no file matches, or the number of labels differs from that of files. During reading: if a file is
            not a TFRecord file, or a record is damaged.
    """
    paths = _paths(files)
    if records is None:
        records = all(RECORDS.search(path) for path in paths)
    if labels is not None:
        labels = np.asarray(to_array(labels, "from_files: labels"))
        if records or labels.shape[:1] != (len(paths),):
            raise UsageError(
                f"from_files: labels has shape {labels.shape}; expected one entry for each of the "
                f"{len(paths)} files, which hold one example each. The labels of TFRecord files "
                "are in the records."
            )
    return Files(paths, read, labels, records)


@dataclass(frozen=True, eq=False, kw_only=True)
class FileSource(KnownSource):
    """`Files` as a `Source`.

    Attributes:
        files: Files to read.
        keys: Function that returns the arguments of `read` for the examples of the given numbers.
        threads: Number of tf.data's threads.
    """

    files: Files
    keys: Callable[[np.ndarray], tuple]
    threads: int

    @property
    def element(self) -> Any:
        return weighted_element(self._given, self.reading)

    @property
    def unrepeatable(self) -> str:  # type: ignore[override]
        if not self._drawing:
            return ""
        return (
            f"the function read of from_files draws random numbers ({self._drawing}) whose order differs from run to "
            f"run: {STATELESS}"
        )

    def epoch(self, epoch: int, rank: int, size: int, begin: int = 0) -> Iterator[Share]:
        if size > 1 and self._drawing:
            warn_user(
                f"the function read of from_files draws random numbers ({self._drawing}), other ones with {size} "
                f"workers than with one: {STATELESS}"
            )
        return super().epoch(epoch, rank, size, begin)

    @cached_property
    def _drawing(self) -> str:
        return next((node.op for node in nodes_of_all(self._empty) if node.op in COUNTING), "")

    @cached_property
    def _empty(self) -> Any:
        """The pipeline without examples, to learn what it yields and does."""
        return self._decoded(iter(()), 1)

    @cached_property
    def _given(self) -> Any:
        tf_dataset.require_dense(self._empty, "the function read of from_files")
        return tf_dataset.element_of(self._empty, self.reading.float_dtype)

    @cached_property
    def _read(self) -> Callable[..., Any]:
        """`read`, traced once and not in every epoch."""
        import tensorflow as tf

        return tf.function(self.files.read)

    def sample(self) -> dict[str, list[float | str]]:
        places = np.unique(
            np.linspace(0, len(self.files.paths) - 1, structures.SAMPLED).astype(int)
        )
        return {"the files": [_mark(self.files.paths[place]) for place in places]}

    def _shares(self, slots: Sequence[Slot]) -> Iterator[Share]:
        bare = structures.is_bare(self._given)
        batches = ((batch,) if bare else batch for batch in self._batches(slots))
        # tf.data makes batches of one length; a share may have one example more or fewer, also that of a smaller batch.
        shares = global_batches(batches, lambda step: slots[step].end - slots[step].begin)
        for slot, share in zip(slots, shares, strict=True):
            data = structures.concatenate(share.pieces)
            data = structures.cast_floats(data, self.reading.float_dtype)
            data = apply_class_weight(data, self.reading, "the files")
            yield slot.share(structures.as_given(data, bare))

    def _batches(self, slots: Sequence[Slot]) -> Iterator[Any]:
        """Yield the rank's decoded examples, in batches of the length of its first share."""
        import tensorflow as tf

        rows = slots[0].end - slots[0].begin
        damaged: list[UsageError] = []
        try:
            wanted = self._wanted(slots, damaged)
            yield from tf_dataset.read(self._decoded(wanted, rows))
        except tf.errors.OpError:
            if damaged:  # tf.data has turned the UsageError into a traceback as text.
                raise damaged[0] from None
            raise

    def _wanted(self, slots: Sequence[Slot], damaged: list[UsageError]) -> Iterator[tuple]:
        """Yield the arguments of `read` for the rank's examples; also put an error on the way into `damaged`."""
        order = self.order(self.pass_length)
        for slot in slots:
            rows = order.rows(slot.begin, slot.end)
            rows = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            try:
                keys = self.keys(rows)
            except UsageError as error:
                damaged.append(error)
                raise
            yield keys

    def _decoded(self, wanted: Iterator[tuple], rows: int) -> Any:
        import tensorflow as tf

        signature: tuple[Any, ...] = (tf.TensorSpec([None], tf.string),)
        if self.files.labels is not None:
            labels = self.files.labels
            signature += (tf.TensorSpec([None, *labels.shape[1:]], labels.dtype),)
        dataset = tf.data.Dataset.from_generator(lambda: wanted, output_signature=signature)
        dataset = dataset.unbatch().map(self._read, num_parallel_calls=self.threads)
        dataset = dataset.batch(rows).prefetch(1)
        return dataset.with_options(tf_dataset.options_of(dataset, self.threads))


def file_source(files: Files, reading: ReadOptions, threads: int) -> FileSource:
    """Locate the examples, and return their source, which reads them with so many of tf.data's threads.

    Raises:
        UsageError: If a file is not an uncompressed TFRecord file, or there are no records.
        OSError: If a file cannot be read.
    """
    keys: Callable[[np.ndarray], tuple]
    if files.records:
        keys = records = _Records(files.paths)
        count = len(records)
    else:
        names = np.array([os.fsencode(path) for path in files.paths], object)
        labels = () if files.labels is None else (files.labels,)
        count = len(names)

        def keys(rows: np.ndarray) -> tuple:
            return names[rows], *(part[rows] for part in labels)

    if not count:
        raise UsageError("the TFRecord files contain no records.")
    return FileSource(
        files=files,
        keys=keys,
        threads=threads,
        pass_length=count,
        reading=reading,
    )


class _Records:
    """The records of TFRecord files, by number."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        begins = [record_begins(path) for path in paths]
        self._ends = np.cumsum([len(one) for one in begins])
        self._begins = np.concatenate(begins)
        self._reader = lru_cache(OPEN_FILES)(_reader)

    def __len__(self) -> int:
        return len(self._begins)

    def __call__(self, rows: np.ndarray) -> tuple:
        return ([self._record(row) for row in rows.tolist()],)

    def _record(self, row: int) -> bytes:
        import tensorflow as tf

        path = self._paths[int(np.searchsorted(self._ends, row, side="right"))]
        begin = int(self._begins[row])
        try:
            record, _ = self._reader(path).read(begin)
        except (tf.errors.OpError, IndexError) as error:
            raise UsageError(
                f"{path}: the record at byte {begin} cannot be read ({error}). The file is damaged or was "
                "changed after training began."
            ) from error
        return bytes(record)


def _reader(path: str) -> Any:
    from tensorflow.python.lib.io.tf_record import tf_record_random_reader

    return tf_record_random_reader(os.fsencode(path))


def record_begins(path: str) -> np.ndarray:
    """Return the byte offsets of the records of a TFRecord file, int64; reads only their headers.

    Raises:
        UsageError: If the file is compressed, truncated, or not a TFRecord file.
    """
    begins = []
    with Path(path).open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        begin = 0
        while begin < size:
            header = os.pread(file.fileno(), HEADER.size, begin)
            end = size + 1
            if len(header) == HEADER.size:
                end = begin + HEADER.size + HEADER.unpack(header)[0] + FOOTER
            if end > size:
                what = "is truncated, or not a TFRecord file"
                if not begin and header.startswith(GZIP):
                    what = (
                        "is compressed, so its records cannot be located without reading all of it"
                    )
                raise UsageError(
                    f"{path} {what} (at byte {begin} of {size}). Write it uncompressed, or read it with "
                    "tf.data.TFRecordDataset and hvdtrain.data.shard."
                )
            begins.append(begin)
            begin = end
    return np.array(begins, np.int64)


def _mark(path: str) -> str:
    """Return a file's name, size and a checksum of its end, as text.

    The folder is left out, because it may differ between machines.
    """
    with Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - COMPARED_BYTES))
        return f"{Path(path).name} {size} {zlib.crc32(file.read())}"


def _paths(files: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    if not isinstance(files, str | Path):
        found = [str(path) for path in files]
        missing = next((path for path in found if not Path(path).is_file()), None)
        if missing is not None:
            raise UsageError(f"from_files: no such file: {missing}.")
    elif Path(files).is_file():  # Even if its name looks like a pattern.
        found = [str(files)]
    else:
        found = sorted(path for path in glob.glob(str(files)) if Path(path).is_file())  # noqa: PTH207
    if not found:
        raise UsageError(f"from_files: no file matches {str(files)!r}.")
    return tuple(found)
