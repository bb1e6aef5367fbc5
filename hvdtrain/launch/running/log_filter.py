"""Hide output that does not concern the user: TensorFlow's start-up messages, and repetitions among ranks.

Hides only messages of TensorFlow that say nothing about the user's run, recognized by their text or their source
file in TensorFlow; everything else is shown. The script's own absl and glog lines differ from these only in the
source file.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

_STAMP = rb"(?:[IWE]\d{4} [\d:.]++ +\d++ |(?:\d{4}-\d\d-\d\d )?+[\d:.]++ +[IWE] )"
# Source files of TensorFlow, XLA and gRPC with information messages (I) about what they found or did.
_CHATTY = (
    rb"cpu_feature_guard|cudart_stub|cuda_(?:dnn|blas|fft|executor|diagnostics|platform|solvers)"
    rb"|cuda_gpu_executor|cublas_\w+|gpu_device|gpu_helpers|gpu_process_state|gpu_cudamallocasync_allocator"
    rb"|pluggable_device\w*|rocm_\w+|pjrt_\w+|tpu_\w+|device_compiler|xla_\w+|gpu_compiler|nvptx_\w+"
    rb"|ptx_compiler_helpers|subprocess_compilation|asm_compiler|conv_algorithm_picker|gemm_algorithm_picker"
    rb"|autotuner(?:_util)?|dump_mlir_util|mlir_graph_optimization_pass|mlir_\w*bridge\w*|direct_session"
    rb"|master_session|profiler_(?:lock|session)|nccl_(?:manager|utils)|collective_param_resolver_\w+"
    rb"|coordination_service\w*|grpc_(?:server_lib|channel|client\w*)|local_rendezvous|base_rendezvous_mgr"
)
_OF_TENSORFLOW = rb"(?:external/)?(?:local_)?(?:tensorflow|xla|tsl)/\S+"
_GREETINGS = re.compile(
    rb"|".join(
        (
            rb"WARNING: All log messages before absl::InitializeLog\(\) is called",
            rb"I\d{4} [\d:.]++ +\d++ (?:%s)\.(?:cu\.)?(?:cc|h):\d+\]" % _CHATTY,
            # Older logging: 2025-01-01 00:00:00.000000: I tensorflow/core/util/port.cc:153] ...
            rb"(?:\d{4}-\d\d-\d\d )?+[\d:.]++ +I %s:\d+\]" % _OF_TENSORFLOW,
            _STAMP + rb".*(?:"
            rb"XLA service 0x[0-9a-f]+ initialized"
            rb"|StreamExecutor (?:device )?[\[(]\d+[\])]: "
            rb"|Reading (?:SavedModel from|meta graph with tags)|Restoring SavedModel bundle|SavedModel load for tags"
            rb"|Unable to register (?:cuDNN|cuBLAS|cuFFT) factory"
            rb"|computation placer already registered"
            rb"|oneDNN custom operations are on"
            rb"|Could not find cuda drivers"
            rb"|failed call to cuInit: .*(?:no CUDA-capable device|UNKNOWN ERROR \(303\))"
            rb"|Could not find TensorRT"
            rb"|Local rendezvous is aborting with status"  # Also reported by an exception.
            rb"|OP_REQUIRES failed at mpi_ops\.cc:\d+ : UNKNOWN: Horovod has been shut down"  # Also an exception.
            rb"|Failed to remove function remotely"  # From a worker that has gone.
            rb")",
            # Continuation lines of the previous one.
            rb"Additional GRPC error information from remote target ",
            rb":UNKNOWN:Error received from peer ",
            rb"This could happen if the remote target has been disconnected from the client",
            rb"To enable the following instructions: .*rebuild TensorFlow",
            rb"Skipping registering GPU devices",
            # From a shell of horovodrun, here or on another host; the outcome of the run reports the same.
            rb"(?:Terminated|Killed)\Z",
            rb"(?:a|ba|da|k|z)?sh: line \d+: +\d+ [A-Z][a-z]+.* -m hvdtrain\.worker ",
        )
    )
)
# Possible beginnings of such a line, before it is complete.
_BEGUN = re.compile(
    rb"(?:[IWE]\d|\d{4}-\d|WARNING: All|To enable|Skipping reg|Terminated|Killed|\w*sh: line )"
)
# The parts that differ between two ranks' copies of a message: time stamps, process and thread numbers.
_VARYING = re.compile(
    rb"\A(?:([IWEF])\d{4} [\d:.]++ +\d++ |\[?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+:? ?)"
)


# Beginnings of lines that are noise or have a time stamp. One search usually shows that none of many lines matches,
# and the lookahead on the first character skips most of them.
_REMARKABLE = re.compile(
    rb"\n(?=[IWEFASTK:\[\dabdkzs])"
    rb"(?:[IWEF]\d{4} |\[?\d{4}-\d\d-\d\d |[\d:.]{5,40}+ +[IWE] |WARNING: All|Additional GRPC|:UNKNOWN:|This could"
    rb"|To enable|Skipping reg|Terminated|Killed|(?:a|ba|da|k|z)?sh: line )"
)
_EMPTY = frozenset({b"\n", b"\r\n", b"\r"})
_LARGEST_MEMORY = 10_000


def is_noise(line: bytes) -> bool:
    """Return whether `line`, from standard error, is start-up noise."""
    return _GREETINGS.match(line) is not None


def without_noise(lines: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return the lines that are not start-up noise, as they are and as changed by `without_stamp`."""
    kept = lines.splitlines(keepends=True)
    if _REMARKABLE.search(b"\n" + lines.replace(b"\r", b"\n")) is None:
        return kept, kept
    kept = [line for line in kept if not is_noise(line.rstrip(b"\r\n"))]
    return kept, list(map(without_stamp, kept))


def may_be_noise(begin: bytes) -> bool:
    """Return whether a line with this beginning may turn out to be noise."""
    return _BEGUN.match(begin) is not None


def without_stamp(line: bytes) -> bytes:
    """Return `line` without its time stamp and process number, to compare the lines of two ranks."""
    stamp = _VARYING.match(line)
    return b"%s %s" % (stamp[1] or b"", line[stamp.end() :]) if stamp else line


@dataclass
class Echoes:
    """Detects lines that several ranks print. Stores hashes, because lines may be long."""

    _said: defaultdict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    _shown: dict[int, int] = field(default_factory=dict)
    _kept: defaultdict[int, bool] = field(default_factory=lambda: defaultdict(lambda: True))

    def without_echoes(self, rank: int, lines: list[bytes], texts: list[bytes]) -> list[bytes]:
        """Return the lines of `rank` that are not echoes of another rank's.

        `texts` are the lines without time stamps. A rank's k-th copy of a text is an echo if k copies have been shown.
        Empty lines go with the line before.
        """
        said, shown = self._said[rank], self._shown
        hashes = list(map(hash, texts))
        if self._kept[rank] and shown.keys().isdisjoint(hashes):  # All new, as in most floods.
            times = Counter(hashes)
            for empty in _EMPTY:
                times.pop(hash(empty), None)
            said.update(times)
            shown.update(times)
            kept = lines
        else:
            kept, keep = [], self._kept[rank]
            for line, text in zip(lines, hashes, strict=True):
                if line not in _EMPTY:
                    count = said[text] = said.get(text, 0) + 1
                    if keep := count > shown.get(text, 0):
                        shown[text] = count
                if keep:
                    kept.append(line)
            self._kept[rank] = keep
        if len(shown) > _LARGEST_MEMORY:
            shown.clear()
            self._said.clear()
        return kept
