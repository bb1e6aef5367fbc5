"""Finds, in the text of a script, how many examples a batch of a `fit` has."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set

_KERAS_BATCH = "32"
"""Batch size of keras.Model.fit for arrays."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def batch_size(call: ast.Call, given: Mapping[str, ast.expr], tree: ast.Module) -> str | None:
    """Return the batch size as text for the place of `call`; None if the script does not show it there.

    It is an argument of fit, Keras's own for arrays, or that with which a Dataset is batched.

    Args:
        call: A call of fit.
        given: Its arguments by name.
        tree: The script.
    """
    if "batch_size" in given and not _is_none(given["batch_size"]):
        return ast.unparse(given["batch_size"])
    if "y" in given and not _is_none(given["y"]):
        return _KERAS_BATCH
    found = list(_batched(given["x"], tree, frozenset())) if "x" in given else []
    sizes = {ast.unparse(one) for one in found}
    is_known = all(_names_in(one) <= _names_at(call, tree) for one in found)
    return sizes.pop() if len(sizes) == 1 and is_known else None


def calls_of(tree: ast.AST, method: str) -> Iterator[ast.Call]:
    """Yield the calls of a function or method of this name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) == method:
            yield node


def name_of(function: ast.expr) -> str:
    """Return the name of a function or method that is called; empty if it has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _batched(value: ast.expr, tree: ast.Module, seen: Set[str]) -> Iterator[ast.expr]:
    """Yield the batch sizes in an expression, or else in what the names in it stand for."""
    found = [call.args[0] for call in calls_of(value, "batch") if call.args]
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            found += [word.value for word in node.keywords if word.arg == "batch_size"]
    yield from found
    if not found:
        names = _names_in(value) - seen
        for node in ast.walk(tree):
            for meant in _meant(node, names):
                yield from _batched(meant, tree, seen | names)


def _meant(node: ast.AST, names: Set[str]) -> Iterator[ast.expr]:
    """Yield what a statement assigns to one of `names`, or what a function of such a name returns."""
    if isinstance(node, ast.Assign) and any(_names_in(one) & names for one in node.targets):
        yield node.value
    elif isinstance(node, ast.For) and _names_in(node.target) & names:
        yield node.iter
    elif isinstance(node, ast.FunctionDef) and node.name in names:
        returned = (one.value for one in ast.walk(node) if isinstance(one, ast.Return))
        yield from (value for value in returned if value is not None)


def _names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _names_at(call: ast.Call, tree: ast.Module) -> set[str]:
    """Return the names that are defined where `call` stands: in the module, and in the functions around it."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS) and any(one is call for one in ast.walk(node))
    ]
    return {name for scope in (tree, *around) for name in _defined(scope)}


def _defined(scope: ast.AST) -> Iterator[str]:
    """Yield the names that a module or function defines, without those of functions inside it."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield from _defined(node)
