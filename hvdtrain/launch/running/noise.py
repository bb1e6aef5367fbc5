"""Which lines on a rank's standard error are TensorFlow's greeting, and not worth a user's
attention.

Only patterns of messages that say nothing about the user's run; everything else is shown.
"""

from __future__ import annotations

import re

_STAMP = rb"(?:\d{4}-\d\d-\d\d )?[\d:.]+:? +"
_GREETINGS = re.compile(
    rb"|".join(
        (
            rb"WARNING: All log messages before absl::InitializeLog\(\) is called",
            rb"I\d{4} ",  # absl: I0000 00:00:1719 1234 port.cc:153] ...
            _STAMP + rb"I ",  # older logging: 2025-01-01 00:00:00.000000: I tensorflow/...
            rb"(?:[WE]\d{4} |" + _STAMP + rb"[WE] ).*(?:"
            rb"Unable to register (?:cuDNN|cuBLAS|cuFFT) factory"
            rb"|computation placer (?:already registered|.*already registered)"
            rb"|oneDNN custom operations are on"
            rb"|Could not find cuda drivers"
            rb"|failed call to cuInit: .*(?:no CUDA-capable device|UNKNOWN ERROR \(303\))"
            rb"|Could not find TensorRT"
            rb"|Local rendezvous is aborting with status"  # Told by an exception as well.
            rb"|Failed to remove function remotely"  # From a worker that has gone.
            rb")",
            # The rest of the last one.
            rb"Additional GRPC error information from remote target ",
            rb":UNKNOWN:Error received from peer ",
            rb"This could happen if the remote target has been disconnected from the client",
            rb"To enable the following instructions: .*rebuild TensorFlow",
            rb"Skipping registering GPU devices",
            rb"(?:Terminated|Killed)\Z",  # A shell of horovodrun's; the run's outcome says it.
        )
    )
)
# What differs between two ranks' copies of one message: time stamps, process and thread numbers.
_VARYING = re.compile(
    rb"\A(?:([IWEF])\d{4} [\d:.]+ +\d+ |\[?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+:? ?)"
)


def is_noise(line: bytes) -> bool:
    """Whether `line` (one line of standard error) is start-up noise."""
    return _GREETINGS.match(line) is not None


def without_stamp(line: bytes) -> bytes:
    """`line` without its time stamp and process number, to compare the lines of two ranks."""
    return _VARYING.sub(rb"\1 ", line)
