"""Names of environment variables and exit codes, shared by the launcher and the trainer."""

LOG_DIR = "HVDTRAIN_LOG_DIR"
"""Folder of this launch's per-rank files; `hvdtrain run` sets it for its workers."""

CONFIG = "config.json"
EVENTS = "events.jsonl"
"""Files in a Trainer's run_dir: its configuration, and its log of events (`hvdtrain.trainer.event_log`)."""

STALL_WARNING_SECONDS = 20
STALL_SHUTDOWN_SECONDS = 50
"""Seconds after which Horovod's stall check warns, then ends the job, when some ranks wait for the others.

Horovod's own default never ends a stalled job. If rank 0 must work alone for longer, raise
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
"""The watchdog ended the run: a rank was frozen or missing, or no rank made progress."""

EXIT_PREEMPTED = 75
"""The training was preempted and has saved a checkpoint; run it again to continue (EX_TEMPFAIL in sysexits.h)."""

RESUME = "HVDTRAIN_RESUME"
"""auto, must or never: overrides the argument `resume` of a Trainer with checkpoints (`hvdtrain run --resume`)."""

START_FOLDER = "HVDTRAIN_START_FOLDER"
"""Working folder in which a rank started; its script may change to another."""

STATUS_PIPE = "HVDTRAIN_NEWS"
"""File descriptor of the pipe on which a launcher reports the state of the ranks to `hvdtrain run`."""

CONTROL_PIPE = "HVDTRAIN_ORDERS"
"""File descriptor of the pipe on which `hvdtrain run` tells a launcher to end a rank: {"end": pid, "host": name}."""

GRACE_SECONDS = "HVDTRAIN_GRACE_SECONDS"
"""Seconds that a script with a signal handler has to exit when the run is ended."""

STOPPED_SECONDS = "HVDTRAIN_STOPPED_SECONDS"
"""Seconds after which a stopped process of the run (SIGSTOP) counts as hung; inf: never (--hang-timeout 0)."""

HANG_TIMEOUT = "HVDTRAIN_HANG_TIMEOUT"
HANG_SECONDS = 1800
"""Seconds without progress after which a run is ended, 0: none: the variable (`hvdtrain run --hang-timeout`) and the
default."""

LAUNCH_ID = "HVDTRAIN_LAUNCH_ID"
"""Unique ID of one `hvdtrain run`, in the environment of each of its processes, so that none is left behind."""

TERMINAL = "HVDTRAIN_TERMINAL"
"""File descriptors of rank 0 that are shown on a terminal: 1, 2 or 12; 0 if none. Set by `hvdtrain run`."""
DRAWN = "v"
"""Behind them: `hvdtrain run` draws the events that rank 0 writes to its standard output (`hvdtrain.view.channel`)."""

EXIT_SIGNAL_BASE = 128
"""Added to a signal's number: the exit code of a process that the signal ended, as shells report it."""

RANK_CORES = "HVDTRAIN_RANK_CORES"
"""CPU cores of this rank alone, if the launcher knows them (srun may have bound the rank to them)."""

FORWARD = "HVDTRAIN_FORWARD"
"""Comma-separated names of the variables that --env forwards to the ranks on all hosts."""

SECRET_WORD = "HVDTRAIN_SECRET_"
"""Prefix of numbered variables, each with a word of a batch job's command that must not be in the batch script."""

HASH_SEED = "PYTHONHASHSEED"
"""Seed of Python's string hashes, the same on all ranks, so that they iterate over a set of names in one order."""
