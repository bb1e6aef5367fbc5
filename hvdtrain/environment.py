"""Names that the launch wing and the train wing share: environment variables and exit codes."""

LOG_DIR = "HVDTRAIN_LOG_DIR"
"""Folder of this launch's per-rank files; set by `hvdtrain run` for its workers."""

CONFIG = "config.json"
EVENTS = "events.jsonl"
"""Files in the run_dir of a Trainer: what it was asked to do, and what happened (`hvdtrain.trainer.event_log`)."""

STALL_WARNING_SECONDS = 20
STALL_SHUTDOWN_SECONDS = 50
"""Horovod's stall check: warn, then end the job, when some ranks wait this long for the others.

Horovod itself never ends a stalled job. A job whose rank 0 legitimately works alone for longer raises
HOROVOD_STALL_SHUTDOWN_TIME_SECONDS (or `hvdtrain run --stall-shutdown-seconds`).
"""

STALL_DEFAULTS = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": str(STALL_WARNING_SECONDS),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_SHUTDOWN_SECONDS),
}

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

EXIT_HANG = 124
"""The watchdog ended the run: a rank was frozen, gone or missing, or no rank made progress."""

EXIT_PREEMPTED = 75
"""A training was asked to stop, has saved, and continues when it is run again (EX_TEMPFAIL in sysexits.h)."""

RESUME = "HVDTRAIN_RESUME"
"""auto, must or never: goes before the argument `resume` of a Trainer with checkpoints (`hvdtrain run --resume`)."""

START_FOLDER = "HVDTRAIN_START_FOLDER"
"""The working folder in which a rank began, which its script may change."""

NEWS = "HVDTRAIN_NEWS"
"""Descriptor of a pipe on which a launcher reports to `hvdtrain run` what the ranks are doing."""

ORDERS = "HVDTRAIN_ORDERS"
"""Descriptor of a pipe on which `hvdtrain run` tells a launcher which ranks to end: {"end": pid, "host": name}."""

GRACE_SECONDS = "HVDTRAIN_GRACE_SECONDS"
"""How long scripts that have a handler for the signal may take when a run is ended."""

STOPPED_SECONDS = "HVDTRAIN_STOPPED_SECONDS"
"""After which a process of the run that is stopped (SIGSTOP) counts as hung; inf: never (--hang-timeout 0)."""

HANG_TIMEOUT = "HVDTRAIN_HANG_TIMEOUT"
HANG_SECONDS = 1800
"""Without progress, after which a run is ended, and what sets other ones (`hvdtrain run --hang-timeout`)."""

LAUNCH_ID = "HVDTRAIN_LAUNCH_ID"
"""Unique name of one `hvdtrain run`; every process of the run carries it, so that none is left behind."""

TERMINAL = "HVDTRAIN_TERMINAL"
"""Descriptors of rank 0 whose output ends in a terminal: 1, 2 or 12; 0 if none. Set by `hvdtrain run`."""

EXIT_SIGNAL_BASE = 128
"""A process that a signal ended exits with this plus the signal's number, as shells report it."""

RANK_CORES = "HVDTRAIN_RANK_CORES"
"""The cores of this rank alone, where the launcher knows them (srun, which may have bound it to them)."""

FORWARD = "HVDTRAIN_FORWARD"
"""Names, with commas between, of the variables that --env asked to travel to the ranks on all hosts."""

SECRET_WORD = "HVDTRAIN_SECRET_"
"""With a number appended: a word of a batch job's command that must not be in the batch script."""

HASH_SEED = "PYTHONHASHSEED"
"""Read by Python when it starts: the same on all ranks, so that they go through a set of names in one order."""
