"""How charts are drawn: with matplotlib, which is an extra, in one style."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import EngineError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5b5b5b", "#8f7a00"]
"""Colours that the colour-blind can tell apart: Okabe and Ito 2008, with two darker ones for thin lines on white."""
CHARTS = (".png", ".svg")
"""File types of charts."""


def require_drawing() -> None:
    """Raise EngineError if charts cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise EngineError("charts are drawn with matplotlib: pip install matplotlib") from error


def check_output(path: Path, suffixes: Sequence[str] = CHARTS) -> None:
    """Refuse a file before the work that it should hold is done.

    Args:
        path: Path of the file.
        suffixes: File types that can be written; all but .json are charts.

    Raises:
        UsageError: If its type is another one, or its folder does not exist or is not writable.
        EngineError: If it is a chart, and charts cannot be drawn.
    """
    if path.suffix not in suffixes:
        raise UsageError(f"{str(path)!r}: expected a name that ends with {' or '.join(suffixes)}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"folder {str(path.parent)!r} does not exist or is not writable")
    if path.suffix in CHARTS:
        require_drawing()


@contextmanager
def drawing(width: float, height: float, **settings: Any) -> Iterator[Figure]:
    """Return an empty drawing of this size in inches; draw and save it inside the `with` block.

    Args:
        settings: Further settings of matplotlib, with "_" for ".", as in `font_size=10`.

    Raises:
        EngineError: If matplotlib is not installed.
    """
    require_drawing()
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "text.parse_math": False,  # A name may contain dollars.
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
    style |= {name.replace("_", "."): value for name, value in settings.items()}
    with matplotlib.rc_context(style):
        yield Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, title: str, path: Path) -> None:
    """Write a drawing with its title to a .png or .svg file.

    Raises:
        EngineError: If the file cannot be written.
    """
    width = int(14 * figure.get_figwidth())  # Characters that fit at this size.
    figure.suptitle("\n".join(textwrap.wrap(title, width)), fontsize=9, x=0.01, ha="left")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise EngineError(f"{path} cannot be written: {error.strerror or error}") from error
