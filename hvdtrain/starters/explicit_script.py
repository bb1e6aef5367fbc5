"""Writes into an ordinary Keras script what `hvdtrain run --adopt` does when it runs: for `hvdtrain new --from`.

The script is only read, never run. Each change is a piece of text in its place; the rest stays as it was written.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.starters.script_batches import batch_size, calls_of, name_of

_OF_FIT = (
    *("x", "y", "batch_size", "epochs", "verbose", "callbacks", "validation_split", "validation_data", "shuffle"),
    *("class_weight", "sample_weight", "initial_epoch", "steps_per_epoch", "validation_steps"),
    *("validation_batch_size", "validation_freq"),
)  # fmt: skip
"""Arguments of keras.Model.fit, in their order."""
_OF_KERAS_ALONE = {
    *("batch_size", "epochs", "initial_epoch", "steps_per_epoch", "validation_data", "validation_split")
}  # fmt: skip
"""Arguments that the `fit` of other libraries lacks."""
_OF_TRAINER_ITSELF = ("batch_size", "validation_batch_size")
"""Arguments that the fit of a Trainer does not take."""
_POSITIONAL = 2
"""Number of arguments that both take by their places: x and y."""
_WRITERS = {
    *("save", "save_weights", "export", "savefig", "save_img", "savetxt", "savez", "savez_compressed"),
    *("to_csv", "to_json", "dump", "write_text", "write_bytes", "extractall"),
}  # fmt: skip
"""Functions and methods that write a file."""
_LOOP = (
    "every worker trains this on whole batches. To share them, put hvdtrain.keras.DistributedGradientTape around the "
    "tape, pass the data through dataset.apply(hvdtrain.data.shard), and call hvdtrain.keras.broadcast_variables first"
)
_WRITTEN_BEFORE = (
    "every worker writes this file. Let rank 0 write it first: with hvdtrain.first_rank_first():"
)
_WRITTEN_AFTER = "every worker writes this file: let rank 0 alone do it"
_ENGINES = {"horovod", "hvdtrain"}
_NORMALIZATION = "BatchNormalization"


@dataclass(frozen=True)
class Note:
    """What is left to the user.

    Attributes:
        line: Number of the line, from 1.
        text: What to do there, and why.
    """

    line: int
    text: str


@dataclass(frozen=True)
class Explicit:
    """A script for hvdtrain.

    Attributes:
        text: The script.
        fits: Number of calls of `fit` that became a Trainer's.
        notes: What is left to the user, by line.
    """

    text: str
    fits: int
    notes: tuple[Note, ...]


@dataclass(frozen=True)
class _Edit:
    """Text in place of the bytes begin..end of the script."""

    begin: int
    end: int
    text: str


def explicit(script: str) -> Explicit:
    """Return `script` with Trainers in place of the models' `fit`, and files written by rank 0 only.

    Raises:
        SyntaxError: It is not Python.
        UsageError: It uses Horovod or hvdtrain already.
    """
    source = _Source(script)
    tree = ast.parse(script)
    _require_ordinary(tree)
    edits: list[_Edit] = []
    notes = [*_loops(tree), *_folders(tree)]
    trained = []
    for call in filter(_is_kerass, calls_of(tree, "fit")):
        found = _trainer_in_place(call, tree, source)
        if isinstance(found, Note):
            notes.append(found)
        else:
            trained.append(call.lineno)
            edits += found
    if trained:
        edits = [_imports(tree, source), *edits, *_synchronized(tree, source)]
    for statement in _writing(tree):
        if not trained or statement.lineno < min(trained):
            notes.append(Note(statement.lineno, _WRITTEN_BEFORE))
        elif not _is_alone(statement, source):
            notes.append(Note(statement.lineno, _WRITTEN_AFTER))
        else:
            edits += _by_rank_0(statement, source)
    return Explicit(source.edited(edits), len(trained), tuple(sorted(notes, key=lambda n: n.line)))


def _require_ordinary(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and _modules(node) & _ENGINES:
            raise UsageError(
                f"line {node.lineno} imports Horovod or hvdtrain: it is no ordinary script"
            )


def _modules(node: ast.Import | ast.ImportFrom) -> set[str]:
    names = (
        [node.module or ""]
        if isinstance(node, ast.ImportFrom)
        else [one.name for one in node.names]
    )
    return {name.partition(".")[0] for name in names}


class _Source:
    """A script as bytes, in which ast counts columns."""

    def __init__(self, script: str) -> None:
        self._bytes = script.encode()
        lengths = [len(line) for line in self._bytes.splitlines(keepends=True)]
        self._begins = [sum(lengths[:number]) for number in range(len(lengths) + 1)]

    def begin(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._begins[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._begins[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        return self._bytes[self.begin(node) : self.end(node)].decode()

    def line_begins(self, first: int, last: int) -> list[int]:
        """Return where the lines first..last begin, both counted from 1 and included."""
        return self._begins[first - 1 : last]

    def around(self, statement: ast.stmt) -> tuple[str, str]:
        """Return what stands before and after a statement in its lines."""
        assert statement.end_lineno is not None
        before = self._bytes[self._begins[statement.lineno - 1] : self.begin(statement)]
        after = self._bytes[self.end(statement) : self._begins[statement.end_lineno]]
        return before.decode(), after.decode()

    def edited(self, edits: Sequence[_Edit]) -> str:
        parts, place = [], 0
        for edit in sorted(edits, key=lambda edit: (edit.begin, edit.end)):
            parts += [self._bytes[place : edit.begin], edit.text.encode()]
            place = edit.end
        return b"".join([*parts, self._bytes[place:]]).decode()


def _is_kerass(call: ast.Call) -> bool:
    """Whether this is a fit of a Keras model, as far as its arguments show: that of a scaler has no epochs."""
    names = {keyword.arg for keyword in call.keywords}
    return isinstance(call.func, ast.Attribute) and bool(
        names & _OF_KERAS_ALONE or len(call.args) > _POSITIONAL
    )


def _trainer_in_place(call: ast.Call, tree: ast.Module, source: _Source) -> list[_Edit] | Note:
    """Return the edits that make `model.fit(...)` a Trainer's."""
    assert isinstance(call.func, ast.Attribute)
    words = [keyword.arg for keyword in call.keywords]
    if any(isinstance(one, ast.Starred) for one in call.args) or None in words:
        return Note(
            call.lineno,
            "this fit is not changed, because of its *arguments: use an hvdtrain.Trainer",
        )
    if source.text(call.func.value) in ("self", "super()"):
        return Note(
            call.lineno, "this fit is not changed: use an hvdtrain.Trainer where its model is used"
        )
    given: list[tuple[str, ast.expr | ast.keyword, ast.expr]] = [
        (name, value, value) for name, value in zip(_OF_FIT, call.args, strict=False)
    ]
    given += [(keyword.arg or "", keyword, keyword.value) for keyword in call.keywords]
    size = batch_size(call, {name: value for name, _, value in given}, tree)
    if size is None:
        return Note(
            call.lineno,
            "this fit is not changed, as the size of its batches is not found: use an hvdtrain.Trainer",
        )
    model = call.func.value
    edits = [
        _Edit(source.begin(model), source.begin(model), "hvdtrain.Trainer("),
        _Edit(source.end(model), source.end(model), f", global_batch_size={size})"),
    ]
    place = source.end(call.func) + 1
    kept = 0
    for number, (name, node, _) in enumerate(given):
        if name in _OF_TRAINER_ITSELF:
            # With the comma before it, or after it if there is nothing before.
            last = number == len(given) - 1
            begin = place if kept else source.begin(node)
            end = source.end(node) if kept or last else source.begin(given[number + 1][1])
            edits.append(_Edit(begin, end, ""))
        else:
            if _POSITIONAL <= number < len(call.args):
                edits.append(_Edit(source.begin(node), source.begin(node), f"{name}="))
            kept += 1
        place = source.end(node)
    return edits


def _imports(tree: ast.Module, source: _Source) -> _Edit:
    """Return the edit that imports and starts hvdtrain, after the imports at the beginning of the script."""
    last: ast.stmt | None = None
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            last = statement
        elif not _sets_environment(statement) and not _is_text(statement):
            break
    lines = "import hvdtrain\nimport hvdtrain.keras\n\nhvdtrain.init(seed=0)\n"
    if last is None:
        return _Edit(0, 0, lines)
    place = source.end(last) + len(source.around(last)[1].encode())
    return _Edit(place, place, lines)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _sets_environment(statement: ast.stmt) -> bool:
    """Whether this is a line such as os.environ["KERAS_BACKEND"] = "tensorflow", which stands among imports."""
    return isinstance(statement, ast.Assign | ast.Expr) and any(
        isinstance(node, ast.Attribute) and node.attr == "environ" for node in ast.walk(statement)
    )


def _synchronized(tree: ast.AST, source: _Source) -> Iterator[_Edit]:
    """Yield the edits that let BatchNormalization normalize over the whole batch."""
    for call in calls_of(tree, _NORMALIZATION):
        begin, end = source.begin(call.func), source.end(call.func)
        yield _Edit(begin, end, "hvdtrain.keras.SyncBatchNormalization")


def _writing(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the outermost statements that do nothing but write a file: a call, or a `with open(..., "w")`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt) and _writes(node):
            yield node
        else:
            yield from _writing(node)


def _writes(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.With):
        return any(_opens_to_write(one.context_expr) for one in statement.items)
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    return isinstance(function, ast.Attribute) and function.attr in _WRITERS


def _opens_to_write(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call) or name_of(value.func) != "open":
        return False
    words = [*value.args[1:2], *(word.value for word in value.keywords if word.arg == "mode")]
    return any(isinstance(one, ast.Constant) and set(str(one.value)) & set("wax") for one in words)


def _is_alone(statement: ast.stmt, source: _Source) -> bool:
    """Whether nothing but a comment shares its lines with a statement."""
    before, after = map(str.strip, source.around(statement))
    return not before and (not after or after.startswith("#"))


def _by_rank_0(statement: ast.stmt, source: _Source) -> Iterator[_Edit]:
    """Yield the edits that put a statement under an `if`."""
    assert statement.end_lineno is not None
    inside = {
        line
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno is not None
        for line in range(node.lineno + 1, node.end_lineno + 1)
    }
    margin, _ = source.around(statement)
    deeper = "\t" if "\t" in margin else "    "
    place = source.begin(statement)
    yield _Edit(place, place, f"if hvdtrain.keras.rank() == 0:\n{margin}{deeper}")
    begins = source.line_begins(statement.lineno + 1, statement.end_lineno)
    for number, begin in enumerate(begins, statement.lineno + 1):
        if number not in inside:  # The lines of a text are left as they are.
            yield _Edit(begin, begin, deeper)


def _loops(tree: ast.AST) -> Iterator[Note]:
    """Yield notes on training loops of the script's own."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    of_models = {call for one in classes for call in calls_of(one, "gradient")}
    for call in calls_of(tree, "gradient"):
        if call not in of_models:
            yield Note(call.lineno, _LOOP)
    for call in calls_of(tree, "train_on_batch"):
        yield Note(
            call.lineno,
            "train_on_batch trains on each worker alone: use the fit of an hvdtrain.Trainer",
        )


def _folders(tree: ast.AST) -> Iterator[Note]:
    for call in (*calls_of(tree, "mkdir"), *calls_of(tree, "makedirs")):
        if "exist_ok" not in [word.arg for word in call.keywords]:
            yield Note(call.lineno, "every worker makes this folder: pass exist_ok=True")
