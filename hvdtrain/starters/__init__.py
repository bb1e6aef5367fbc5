"""The training scripts that `hvdtrain new` copies, and their configuration file.

There is one copy of each script, in `scripts/` of the sources, where people read and run it. `scripts/` beside this
file contains symbolic links to them: setuptools puts their targets into a wheel or source archive, and an editable
install follows them. `run.yaml` is a template of the configuration for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from hvdtrain.errors import HvdtrainError, UsageError

CONFIG = "run.yaml"
_IN_SOURCES = re.compile(r"\bscripts/\w+\.py\b")
"""The path by which a script's docstring shows how to run it."""
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Starter:
    """A script to copy.

    Attributes:
        name: Name on the command line.
        shows: What the script shows, for the list of starters.
        arguments: Arguments of the script for its run.yaml, as a YAML list.
        launch: Lines of launch options for its run.yaml.
    """

    name: str
    shows: str
    arguments: str = "[]"
    launch: str = "np: 2                   # workers"

    @property
    def script(self) -> str:
        """File name of the copy."""
        return f"{self.name}.py"


_ALL = (
    Starter("mnist", "the Trainer with a convolutional network, on handwritten digits"),
    Starter("tabular", "the Trainer on a million rows of NumPy arrays"),
    Starter("large-batch", "large batches: a scaled rate with warm-up, LARS and LAMB"),
    Starter("custom-loop", "a training loop of your own, step by step"),
    Starter("horovod-style", "model.fit with Horovod's callbacks, without the Trainer"),
    Starter(
        "tpu",
        "the Trainer on the cores of a TPU",
        launch="strategy: tpu           # one process, all cores",
    ),
    Starter(
        "parameter-server",
        "the Trainer with parameter servers: asynchronous training of a recommender with large tables",
        launch="strategy: parameter-server\n"
        "workers: 2              # compute\n"
        "ps: 2                   # hold the tables",
    ),
    Starter(
        "model-parallel",
        "the Trainer with a transformer divided over the workers: tensor and pipeline parallelism",
        arguments="[--pipeline, 2]",
    ),
)
STARTERS: Mapping[str, Starter] = {starter.name: starter for starter in _ALL}


def contents(starter: Starter) -> dict[str, str]:
    """Return the text of each file that a user gets, by file name.

    Raises:
        HvdtrainError: The installation lacks the script.
    """
    script = _FOLDER / "scripts" / starter.script
    try:
        text = script.read_text(encoding="utf-8")
    except OSError as error:
        raise HvdtrainError(
            f"this installation of hvdtrain lacks {script}: {error.strerror}; install hvdtrain again"
        ) from error
    config = (_FOLDER / CONFIG).read_text(encoding="utf-8")
    return {
        starter.script: _IN_SOURCES.sub(starter.script, text),
        CONFIG: Template(config).substitute(
            script=starter.script, arguments=f"{starter.arguments:<11}", launch=starter.launch
        ),
    }


def copy(starter: Starter, folder: Path, *, force: bool) -> list[Path]:
    """Write the script and its configuration into `folder`, which is created if necessary.

    Args:
        starter: Script to copy.
        folder: Folder to write to.
        force: Whether to overwrite existing files.

    Returns:
        Paths of the files.

    Raises:
        UsageError: A file exists already, and `force` is not set (then nothing is written), or the folder cannot be
            written to.
    """
    texts = contents(starter)
    there = [str(folder / name) for name in texts if (folder / name).exists()]
    if there and not force:
        verb = "is" if len(there) == 1 else "are"
        raise UsageError(
            f"{' and '.join(there)} {verb} there already: choose another folder, or overwrite with --force"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error
    return [folder / name for name in texts]
