"""`hvdtrain.launch`: a function on several ranks, from a script without a guard and from a notebook."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Without `if __name__ == "__main__"`, with a class and a global of its own.
SCRIPT = """
import glob, json, os, signal, sys, threading
import hvdtrain
from hvdtrain.rank_variables import is_rank
from hvdtrain.launch.hosts import Host  # makes hvdtrain.launch the package, too

class Point:
    def __init__(self, x):
        self.x = x

OFFSET = 10
said = {}
before = set(glob.glob("/tmp/hvdtrain-function-*"))

def ranks_left():
    found = []
    for process in glob.glob("/proc/[0-9]*"):
        try:
            command = open(f"{process}/cmdline", "rb").read()
            if b"hvdtrain.worker.function_rank" in command and os.readlink(f"{process}/cwd") == os.getcwd():
                found.append(process)
        except OSError:
            pass
    return found

def rank():
    from hvdtrain.rank_variables import rank_of
    return rank_of(os.environ)

def error_of(function, *args, **options):
    try:
        return ["returned", hvdtrain.launch(function, args=args, **options)]
    except hvdtrain.LaunchError as error:
        return [str(error), error.rank, error.exit_code, error.traceback, error.log_dir.is_dir()]

def point(a, b):
    print("hello of rank", rank())
    key = [name for name in os.environ if name.startswith("HVDTRAIN_FUNCTION")]
    return Point(a + b + rank() + OFFSET), key, bytes(100_000_000)

points = hvdtrain.launch(point, args=(1,), kwargs={"b": 2})
said["points"] = [one.x for one, *_ in points]
said["class"] = all(type(one) is Point for one, *_ in points)
said["keys"] = [key for _, key, _ in points]
said["sizes"] = [len(data) for *_, data in points]

def fails():
    if rank() == 1:
        raise ValueError("boom")
    threading.Event().wait(60)

def killed():
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait(60)

def nested():
    return hvdtrain.launch(print)

def exits():
    sys.exit(0)

def interrupted():
    if rank() == 0:
        os.kill(caller, signal.SIGINT)
    threading.Event().wait(60)

def asked():
    sys.exit(130)

def terminated():
    if rank() == 0:
        os.kill(caller, signal.SIGTERM)
    threading.Event().wait(60)

def lock():
    return threading.Lock()

class Here:
    def __reduce__(self):
        return rank_only, ()

def rank_only():
    if not is_rank(os.environ):
        raise ValueError("not a rank")

def unreadable():
    return Here() if rank() == 1 else 0

caller, came = os.getpid(), []
signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
for function in (fails, killed, nested, exits, asked, terminated, lock, unreadable):
    said[function.__name__] = error_of(function)
said["came"] = came
try:
    hvdtrain.launch(interrupted)
except KeyboardInterrupt:
    said["interrupted"] = True
said["heavy"] = sorted({"tensorflow", "keras", "horovod", "numpy"} & set(sys.modules))
said["left"] = sorted(set(glob.glob("/tmp/hvdtrain-function-*")) - before)
said["processes"] = ranks_left()
print(json.dumps(said))
"""
# In a folder that is not the working folder; what it prints goes to an object of its own.
IMPORTS = """
import json, pathlib, statistics, sys
import comm
import hvdtrain

class Log:
    def write(self, text):
        with open("printed", "a") as file:
            file.write(text)

def imported():
    import comm, statistics
    print("hello")
    return comm.__file__, statistics.__file__

shown, sys.stdout, sys.stderr = sys.stdout, Log(), None
found = hvdtrain.launch(imported)
sys.stdout = shown
print(json.dumps([found, list(imported()), pathlib.Path("printed").read_text()]))
"""
CELLS = (
    "def hello(name):\n    print('hello', name)\n    return name * 2",
    "import hvdtrain\nhvdtrain.launch(hello, np=2, args=('cell',))",
)
PAGE = Path(__file__).parents[2] / "docs/notebooks.md"


def run_script(text: str, folder: Path) -> str:
    (folder / "script.py").write_text(text)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return run_script(SCRIPT, tmp_path_factory.mktemp("script")).splitlines()


@pytest.fixture(scope="module")
def said(printed: list[str]) -> dict[str, list[object]]:
    found: dict[str, list[object]] = json.loads(printed[-1])
    return found


def test_results_come_in_the_order_of_ranks(said: dict[str, list[object]]) -> None:
    assert said["points"] == [13, 14]
    assert said["class"]
    assert said["sizes"] == [100_000_000] * 2


def test_rank_0_is_shown_and_the_script_is_not_run_again(printed: list[str]) -> None:
    assert [line for line in printed if "hello" in line] == ["hello of rank 0"]


def test_the_function_does_not_see_the_key(said: dict[str, list[object]]) -> None:
    assert said["keys"] == [[], []]


def test_the_caller_loads_nothing_heavy(said: dict[str, list[object]]) -> None:
    assert said["heavy"] == []


def test_the_first_failure_comes_back(said: dict[str, list[object]]) -> None:
    message, rank, code, text, has_logs = said["fails"]
    assert (rank, code, has_logs) == (1, 1, True)
    assert str(message).startswith("rank 1 failed:\nTraceback")
    assert 'script.py", line' in str(text) and str(text).endswith("ValueError: boom")
    assert "hvdtrain/worker" not in str(text)


def test_a_killed_rank_is_named(said: dict[str, list[object]]) -> None:
    message, rank, code, *_ = said["killed"]
    assert (rank, code) == (1, 137) and "rank 1 was killed by SIGKILL" in str(message)


def test_a_launch_inside_of_a_rank_is_refused(said: dict[str, list[object]]) -> None:
    message, _, code, *_ = said["nested"]
    assert code == 2 and "one of 2 processes of another launch" in str(message)


def test_sys_exit_gives_no_result(said: dict[str, list[object]]) -> None:
    assert str(said["exits"][0]).startswith("rank 0 ended without a result: its function called")


def test_a_result_that_cannot_be_pickled_is_named(said: dict[str, list[object]]) -> None:
    assert "the function returned a lock that cannot be pickled" in str(said["lock"][0])


def test_a_result_that_cannot_be_unpickled_is_named(said: dict[str, list[object]]) -> None:
    message, rank, code, *_ = said["unreadable"]
    assert (rank, code) == (1, 0)
    assert str(message).startswith("the result of rank 1 cannot be unpickled here (ValueError: not")


def test_ctrl_c_ends_the_ranks(said: dict[str, list[object]]) -> None:
    assert said["interrupted"]


def test_only_a_signal_to_the_caller_is_one_to_it(said: dict[str, list[object]]) -> None:
    message, rank, code, *_ = said["asked"]
    assert (rank, code) == (0, 130) and "was killed by SIGINT" in str(message)
    message, rank, code, *_ = said["terminated"]
    assert (rank, code) == (None, 143) and str(message).startswith("the run was ended by SIGTERM")
    assert said["came"] == [signal.SIGTERM]


def test_ranks_import_what_the_caller_imports(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app/comm.py").write_text("")
    (tmp_path / "statistics.py").write_text("raise SystemExit('of the working folder')")
    (tmp_path / "app/script.py").write_text(IMPORTS)
    command = [sys.executable, "app/script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found, own, shown = json.loads(done.stdout.splitlines()[-1])
    assert found == [own, own] and own[0] == str(tmp_path / "app/comm.py")
    assert shown == "hello\n"


def test_nothing_is_left_behind(said: dict[str, list[object]]) -> None:
    assert said["processes"] == []
    assert said["left"] == []


def test_a_function_of_a_cell(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = notebook.cells[1].outputs
    shown = "".join(one.text for one in outputs if one.output_type == "stream")
    results = [one.data["text/plain"] for one in outputs if one.output_type == "execute_result"]
    assert shown == "hello cell\n"
    assert results == ["['cellcell', 'cellcell']"]


@pytest.mark.slow
def test_the_page_on_notebooks_trains(tmp_path: Path) -> None:
    """It does so too in a notebook that was a job of one rank before: its Gloo must not pass to workers over MPI."""
    page = PAGE.read_text().split("```python\n")[1].split("```")[0]
    alone = "import hvdtrain, os\n\nbefore = set(os.environ)\nhvdtrain.init()\n"
    alone += "assert not any('GLOO' in value.upper() for name, value in os.environ.items() if name not in before)\n"
    run_script(page.replace("import hvdtrain\n", alone, 1), tmp_path)
