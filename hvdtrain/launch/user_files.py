"""Check files that the user specifies: configurations, hostfiles, scripts, and those that Horovod writes."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.launch.plan import LaunchPlan

MOST_BYTES = 2**20
"""Maximum size of a text file: more than any configuration, and a bound for devices such as /dev/zero."""
PIPE_SECONDS = 10.0
"""Time for which the writer of a pipe, such as `<(command)`, may be silent."""


def read_text(path: Path, what: str) -> str:
    """Return the text of a file.

    Args:
        path: Path of the file.
        what: Kind of the file for messages, such as "hostfile".

    Raises:
        UsageError: The file cannot be read, is not UTF-8, is longer than MOST_BYTES, or is a pipe whose writer is
            silent for PIPE_SECONDS.
    """
    try:
        # Opening a pipe without a writer would block forever.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
            data = b""
            while len(data) <= MOST_BYTES:
                if not select.select([file], [], [], PIPE_SECONDS)[0]:
                    raise UsageError(
                        f"cannot read the {what} {path}: nothing was written to this pipe for "
                        f"{PIPE_SECONDS:g} seconds"
                    )
                piece = file.read(MOST_BYTES)
                if not piece:
                    break
                data += piece
        text = data.decode()
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the {what} {path} is not a text file (UTF-8)") from error
    if len(data) > MOST_BYTES:
        raise UsageError(f"the {what} {path} is longer than a megabyte: is it the right file?")
    return text


def check_files(plan: LaunchPlan, *, elsewhere: bool) -> None:
    """Check that the files of the plan can be read or written.

    Args:
        plan: The plan.
        elsewhere: Whether ranks run on other hosts, where their output files may be.

    Raises:
        UsageError: A file cannot be used.
    """
    key, discovery = plan.ssh_identity_file, plan.host_discovery_script
    if key is not None and not key.is_file():
        raise UsageError(f"--ssh-identity-file: no such file: {key}")
    if discovery is not None and not discovery.is_file():
        raise UsageError(f"--host-discovery-script: no such file: {discovery}")
    if discovery is not None and not os.access(discovery, os.X_OK):
        raise UsageError(
            f"--host-discovery-script: {discovery} cannot be executed: chmod +x {discovery}"
        )
    if not elsewhere:
        _check_outputs(plan)


def _check_outputs(plan: LaunchPlan) -> None:
    """Check the output files: Horovod does not report those it cannot write, and mpirun crashes."""
    for option, file in (
        ("--timeline-filename", plan.timeline_filename),
        ("--autotune-log-file", plan.autotune_log_file),
    ):
        if file is not None and file.is_dir():
            raise UsageError(f"{option}: {file} is a folder: pass a file")
        if file is not None and not os.access(file.parent, os.W_OK | os.X_OK):
            raise UsageError(f"{option}: cannot write to the folder {file.parent}")
    folder = plan.output_filename
    if folder is not None:
        if folder.is_file():
            raise UsageError(f"--output-filename: {folder} is a file: pass a folder")
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not os.access(there, os.W_OK | os.X_OK):
            raise UsageError(f"--output-filename: cannot write to the folder {there}")


def check_script(script: Path) -> None:
    """Check that a training script can be read. Raises UsageError if not."""
    if script.is_dir():
        raise UsageError(f"{script} is a folder: pass the training script")
    if not script.is_file():
        raise UsageError(f"no such script: {script} (in {Path.cwd()}){_meant(script)}")
    try:
        script.open("rb").close()
    except OSError as error:
        raise UsageError(f"cannot read the script {script}: {error.strerror}") from error


def _meant(script: Path) -> str:
    """Return a suggestion for a name that is not a file. Empty if nothing similar exists."""
    if Path(f"{script}.py").is_file():
        return f". Did you mean {script}.py?"
    module = Path(*str(script).split("."))
    if Path(f"{module}.py").is_file() or (module / "__main__.py").is_file():
        return f". Did you mean -m {script}?"
    return ""
