"""The API reference documents every argument, and every error that a function raises itself."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTED = re.findall(r"^::: (\S+)", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
BORROWED = re.compile(r"[Aa]rguments as\s+in (\w+)")


def _public(body: list[ast.stmt]) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {n.name: n for n in body if isinstance(n, kinds) and not n.name.startswith("_")}


def _listed(dotted: str) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    path = ROOT / (dotted.replace(".", "/") + ".py")
    if path.exists():
        yield from _public(ast.parse(path.read_text()).body).values()
    else:
        module, name = dotted.rsplit(".", 1)
        room = ROOT / module.replace(".", "/")
        files = room.glob("*.py") if room.is_dir() else [room.with_suffix(".py")]
        found = [_public(ast.parse(path.read_text()).body).get(name) for path in files]
        yield next(node for node in found if node)


def _with_methods(node: ast.FunctionDef | ast.ClassDef) -> Iterator[tuple[str, str, ast.AST]]:
    """Each documented function: its name, its docstring (of a constructor: the class's) and its node."""
    text = ast.get_docstring(node) or ""
    if isinstance(node, ast.FunctionDef):
        yield node.name, text, node
        return
    for method in node.body:
        if isinstance(method, ast.FunctionDef):
            own = text if method.name == "__init__" else ast.get_docstring(method)
            # Without one the reference does not show it: callbacks' hooks, which Keras documents.
            if own and (method.name == "__init__" or not method.name.startswith("_")):
                yield f"{node.name}.{method.name}", own, method


DOCUMENTED = [
    found for dotted in LISTED for node in _listed(dotted) for found in _with_methods(node)
]
TEXTS = {name: text for name, text, _ in DOCUMENTED}


def _arguments(text: str) -> str:
    borrowed = BORROWED.search(text)
    return text + (_arguments(TEXTS[borrowed[1]]) if borrowed else "")


def _raised(node: ast.AST) -> set[str]:
    """Classes that the function raises by name; what functions inside it raise counts as well."""
    calls = [n.exc for n in ast.walk(node) if isinstance(n, ast.Raise)]
    names = {c.func.id for c in calls if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)}
    return {name for name in names if name[0].isupper() and name != "SystemExit"}


@pytest.mark.parametrize(("name", "text", "node"), DOCUMENTED, ids=[d[0] for d in DOCUMENTED])
def test_arguments_and_errors_are_documented(name: str, text: str, node: ast.FunctionDef) -> None:
    given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    names = [a.arg for a in given if a.arg not in ("self", "cls")]
    known = _arguments(text)
    assert [a for a in names if f"{a}: " not in known and f"`{a}`" not in known] == []
    errors = text.partition("Raises:")[2] if "Raises:" in text else text.partition("Raise ")[2]
    assert [error for error in sorted(_raised(node)) if error not in errors] == []
