"""The rules of docs/architecture.md: which package may import which, and how long a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hvdtrain"
# Links to the scripts that users copy are no part of the house.
FILES = sorted(path for path in PACKAGE.rglob("*.py") if not path.is_symlink())
TRAIN = {"keras", "keras_internals", "collectives", "data", "trainer", "runtime"}
LAUNCH = {"launch"}
GROUND = {
    "adopt_options",
    "environment",
    "errors",
    "event_intervals",
    "host_limits",
    "messages",
    "profiled_steps",
    "replaced_files",
    "standard_streams",
    "signals",
    "rank_variables",
    "strategy_names",
    "timeline_events",
    "tf_config",
    "worker",
}
# Room -> rooms of hvdtrain that it may import, beside itself and the ground floor.
ALLOWED = {
    "runtime": set(),
    "data": set(),
    "keras_internals": set(),
    "collectives": {"keras_internals"},
    "checkpoint": TRAIN - {"trainer"} | {"strategies", "parallel"},
    "keras": {"runtime", "collectives", "keras_internals"},
    "strategies": TRAIN - {"trainer"},
    "parallel": TRAIN - {"trainer"} | {"strategies"},
    "trackers": set(),
    "trainer": TRAIN | {"strategies", "parallel", "checkpoint", "view", "trackers"},
    "launch": {"view", "report"},
    "view": {"report"},
    "install": LAUNCH,
    "bench": LAUNCH | TRAIN | {"strategies", "parallel", "report", "adopt"},
    "doctor": LAUNCH | {"install"},
    "starters": set(),
    "estimate": TRAIN | {"strategies", "parallel"},
    "adopt": TRAIN | {"strategies"},
    "verify": TRAIN | {"strategies", "checkpoint", "trackers", "adopt"},
    "report": set(),
    "cli": LAUNCH | {"install", "bench", "doctor", "report", "view", "starters", "verify"},
    "start": LAUNCH,
}
COLLECTIVES = {
    "allreduce",
    "allgather",
    "broadcast",
    "broadcast_",
    "reducescatter",
    "alltoall",
    "barrier",
    "join",
}
COLLECTIVES |= {f"grouped_{name}" for name in COLLECTIVES}
# All others ask a Communicator. The public module, and what runs outside of the trainer: tests of the engine itself.
MAY_CALL_HOROVOD = {
    "collectives/communicator.py",
    "keras/collectives.py",
    "keras/differentiable.py",
    "runtime.py",
    "install/selftest.py",
    "bench/bandwidth.py",
    "bench/pipeline_bubble.py",
    "bench/scaling.py",
}
HEAVY = {"tensorflow", "keras", "horovod", "numpy", "mpi4py"}


def room_of(path: Path) -> str:
    """The folder, or the file's own name, below hvdtrain."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """The rooms of hvdtrain that a file names in an import, at any depth."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "hvdtrain":
                names = [f"hvdtrain.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {n.split(".")[1] for n in names if n.startswith("hvdtrain.")}
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    allowed = ALLOWED.get(room, set()) | GROUND | {room}
    known = {room_of(p) for p in FILES}
    assert imported_rooms(path) & known <= allowed


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


def horovods_collectives(path: Path) -> set[str]:
    """The collectives of Horovod that a file names."""
    tree = list(ast.walk(ast.parse(path.read_text())))
    modules, found = set(), set()
    for node in tree:
        if isinstance(node, ast.Import):
            modules |= {a.asname or "horovod" for a in node.names if a.name.startswith("horovod")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod"):
            modules |= {a.asname or a.name for a in node.names}
            found |= {a.name for a in node.names} & COLLECTIVES
        elif isinstance(node, ast.Assign) and "load_horovod" in ast.unparse(node.value):
            modules |= {ast.unparse(target) for target in node.targets}
    for node in tree:
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            found |= {node.attr} if ast.unparse(node.value).split(".")[0] in modules else set()
    return found


# Python starts a room by the one, and looks for the other in each.
MARKERS = {"__init__.py", "__main__.py"}
# A command's file has the command's name, which may be a room's as well.
NAMED = [path for path in FILES if path.name not in MARKERS and path.parent.name != "cli"]


def test_no_two_modules_share_a_name() -> None:
    names = [path.stem for path in NAMED]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


@pytest.mark.parametrize("path", NAMED, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_worth_opening(path: Path) -> None:
    assert len(path.read_text().splitlines()) >= 30


def module_of(path: Path) -> str:
    """The dotted name by which a file of the package is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(node: ast.AST, known: set[str]) -> set[str]:
    """The modules of `known` that are imported below `node`, inside functions too, but not for type checkers alone."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return set()
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & known
    if isinstance(node, ast.ImportFrom):
        names = {f"{node.module}.{alias.name}" for alias in node.names}
        return names & known or {str(node.module)} & known
    return {name for child in ast.iter_child_nodes(node) for name in imported_modules(child, known)}


def circles(imports: dict[str, set[str]]) -> set[str]:
    """The modules that import themselves by way of others: what is left when those that end nowhere are taken away."""
    left = dict(imports)
    while done := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in done}
    return set(left)


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}
    known = {module_of(path) for path in FILES}
    imports = {
        module_of(p): imported_modules(ast.parse(p.read_text()), known) - {module_of(p)}
        for p in FILES
    }
    assert circles(imports) == set()


def test_one_room_talks_to_horovod() -> None:
    callers = {str(p.relative_to(PACKAGE)) for p in FILES if horovods_collectives(p)}
    assert callers <= MAY_CALL_HOROVOD
    assert "collectives/communicator.py" in callers


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_programs_of_our_own_do_not_import_from_the_working_folder(path: Path) -> None:
    """A logging.py or queue.py there belongs to the user, or to whoever can write there."""
    for node in ast.walk(ast.parse(path.read_text())):
        words = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
        shown = [ast.unparse(word).replace("*(", "").replace("(", "") for word in words]
        for before, word, after in zip(shown, shown[1:], shown[2:], strict=False):
            if word in ("'-m'", "'-c'") and not after.startswith("cls="):
                assert before == "'-P'", ast.unparse(node)


def replaced_in_horovod(path: Path) -> set[str]:
    """What a file assigns to in Horovod's modules."""
    tree = list(ast.walk(ast.parse(path.read_text())))
    modules = {
        alias.asname or alias.name
        for node in tree
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod")
        for alias in node.names
    }
    return {
        ast.unparse(target)
        for node in tree
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) in modules
    }


def test_what_is_replaced_in_horovod_stands_in_one_file() -> None:
    """That of the launcher; a rank replaces how its notification service listens."""
    found = {str(p.relative_to(PACKAGE)): names for p in FILES if (names := replaced_in_horovod(p))}
    assert found.keys() == {"start/parts/horovod_patches.py", "worker/elastic_notifications.py"}
    assert found["worker/elastic_notifications.py"] == {"network.find_port"}


def test_the_launch_wing_loads_nothing_heavy() -> None:
    """Every module of the launch wing and the command line, imported in one fresh process."""
    modules = [
        module_of(path)
        for path in FILES
        if room_of(path) in {"launch", "cli", "install", "doctor", "starters"} | GROUND
        and path.name not in {"__main__.py", "selftest.py"}
    ]
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
print(sorted({HEAVY!r} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
