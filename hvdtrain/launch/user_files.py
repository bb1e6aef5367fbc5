"""Read the files that the user specifies: configurations, hostfiles and scripts."""

from __future__ import annotations

import os
import select
import shlex
from difflib import get_close_matches
from pathlib import Path

from hvdtrain.errors import UsageError

MOST_BYTES = 2**20
"""Maximum size of a text file: more than any configuration, and a bound for devices such as /dev/zero."""
PIPE_SECONDS = 10.0
"""Time for which the writer of a pipe, such as `<(command)`, may be silent."""


def read_text(path: Path, what: str) -> str:
    """Return the text of a file; messages call it `what`, such as "hostfile".

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


def check_script(script: Path) -> None:
    """Check that a training script can be read. Raises UsageError if not."""
    if script.is_dir():
        raise UsageError(f"{script} is a folder: pass the training script")
    if not script.is_file():
        raise UsageError(f"no such script: {script} (in {Path.cwd()}){_meant(script)}")
    if script.suffix == ".ipynb":
        quoted = shlex.quote(str(script))
        raise UsageError(
            f"{script} is a notebook: convert it to a script (jupyter nbconvert --to script {quoted}), or call "
            "hvdtrain.launch in it"
        )
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
    beside = {path.stem: path for path in script.parent.glob("*.py") if path.is_file()}
    close = get_close_matches(script.stem, beside, n=1)
    return f". Did you mean {beside[close[0]]}?" if close else ""
