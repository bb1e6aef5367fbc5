"""The bootstrap of a rank, run alone: the script sees what Python would show it, and failures end."""

import os
import signal
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

from hvdtrain.environment import LAUNCH_ID, TERMINAL
from hvdtrain.worker.failure_report import Failure, from_line
from hvdtrain.worker.secret_files import deliver, withdraw

REPOSITORY = Path(__file__).parents[2]


def work(
    folder: Path, script: str, *args: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub" / "train.py").write_text(script)
    (folder / "sub" / "beside.py").write_text("here = True\n")
    return subprocess.run(
        [sys.executable, "-P", "-m", "hvdtrain.worker", "sub/train.py", *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_script_is_main(tmp_path: Path) -> None:
    script = "import sys, beside\nprint(__name__, sys.argv, __file__, sys.path[0])\n"
    result = work(tmp_path, script, "--epochs", "a b")
    assert result.stderr == ""
    assert result.stdout == (
        f"__main__ ['sub/train.py', '--epochs', 'a b'] {tmp_path}/sub/train.py {tmp_path / 'sub'}\n"
    )


@pytest.mark.parametrize("script", [["train.py"], ["-m", "package"]])
def test_a_working_folder_that_was_removed(tmp_path: Path, script: list[str]) -> None:
    (tmp_path / "gone").mkdir()
    command = [
        "sh",
        "-c",
        'rmdir "$PWD"; exec "$@"',
        "sh",
        sys.executable,
        "-P",
        "-m",
        "hvdtrain.worker",
    ]
    result = subprocess.run(
        [*command, *script],
        cwd=tmp_path / "gone",
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stderr.strip() == (
        f"{script[-1]}: the working folder cannot be used: No such file or directory (on this rank's host)"
    )


def test_a_safe_path_has_no_folder_of_the_script(tmp_path: Path) -> None:
    """As `python sub/train.py` has none."""
    script = "import sys\nprint([path for path in sys.path if path.endswith('sub')])\n"
    assert work(tmp_path, script, PYTHONSAFEPATH="1").stdout == "[]\n"
    assert work(tmp_path, script, PYTHONSAFEPATH="").stdout == f"[{str(tmp_path / 'sub')!r}]\n"


def test_the_environment_is_set_before_the_script(tmp_path: Path) -> None:
    names = "'OMP_NUM_THREADS', 'TF_CPP_MIN_LOG_LEVEL'"
    script = f"import os\nprint([os.environ[name] for name in ({names})])\n"
    assert work(tmp_path, script, OMP_NUM_THREADS="7", TF_CPP_MIN_LOG_LEVEL="0").stdout == (
        "['7', '0']\n"
    )


def test_sets_have_the_same_order_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "print({'a', 'b', 'c', 'd', 'e', 'f'}, hash('a'))\n"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    first, second, own = (tmp_path / name for name in ("first", "second", "own"))
    for folder in (first, second, own):
        folder.mkdir()
    printed = work(first, script).stdout
    assert work(second, script).stdout == printed
    assert work(own, script, PYTHONHASHSEED="3").stdout != printed


@pytest.mark.parametrize(
    ("script", "exit_code", "said"),
    [
        ("import sys\nsys.exit()", 0, ""),
        ("import sys\nsys.exit(0)", 0, ""),
        ("import sys\nsys.exit(3)", 3, ""),
        ("import sys\nsys.exit(256)", 1, ""),
        ("import sys\nsys.exit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("from hvdtrain import UsageError\nraise UsageError('wrong')", 2, "wrong\n"),
        (
            "def f():\n    raise ValueError('x')\nf()",
            1,
            'Traceback (most recent call last):\n  File "{folder}/sub/train.py", line 3, in <module>\n'
            "    f()\n  File \"{folder}/sub/train.py\", line 2, in f\n    raise ValueError('x')\n"
            "ValueError: x\n",
        ),
        (
            "def",
            1,
            '  File "{folder}/sub/train.py", line 1\n    def\n       ^\nSyntaxError: invalid syntax\n',
        ),
        ("import os\nos.kill(os.getpid(), 15)", -signal.SIGTERM, ""),
    ],
)
def test_how_scripts_end(tmp_path: Path, script: str, exit_code: int, said: str) -> None:
    result = work(tmp_path, script)
    assert result.returncode == exit_code
    assert result.stderr == said.replace("{folder}", str(tmp_path))
    assert result.stdout == ""


def test_an_interrupt_before_the_script_begins_ends_it_quietly(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from hvdtrain.worker import run_script\n"
        "run_script._take_delivery = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        "run_script.main()\n"
    )
    command = [sys.executable, "-c", code, "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_the_launcher_gets_one_line(tmp_path: Path) -> None:
    script, rank = "raise SystemExit('no <data>')", {LAUNCH_ID: "x", "HOROVOD_RANK": "3"}
    result = work(tmp_path, script, **rank, **{TERMINAL: "0"})
    lines = [line for line in result.stderr.splitlines() if line]
    assert [from_line(line) for line in lines] == [Failure(3, 1, False, "no <data>")]


def test_without_hvdtrain_run_the_user_gets_the_text(tmp_path: Path) -> None:
    """A command of --dry-run that was pasted is a launch too, but nobody reads its ranks."""
    result = work(tmp_path, "raise SystemExit('no <data>')", **{LAUNCH_ID: "x"})
    assert result.stderr == "no <data>\n"


def test_a_failed_rank_does_not_wait_for_ever(tmp_path: Path) -> None:
    """Exit functions run, but one that never returns does not keep the process."""
    script = (
        "import atexit, threading\n"
        "atexit.register(threading.Event().wait)\n"
        "atexit.register(print, 'goodbye')\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "raise ValueError('x')\n"
    )
    result = work(tmp_path, script)
    assert (result.returncode, result.stdout) == (1, "goodbye\n")


def test_a_chief_that_is_done_does_not_wait_for_its_workers(tmp_path: Path) -> None:
    """Nor for anything at its exit, as TensorFlow does for a worker that has died; but for the script's threads."""
    script = (
        "import atexit, threading, time\n"
        "atexit.register(threading.Event().wait)\n"
        "def late():\n    time.sleep(0.5)\n    print('late')\n"
        "threading.Thread(target=late).start()\n"
        "print('done', end=' ')\n"
    )
    result = work(tmp_path, script, HVDTRAIN_STRATEGY="parameter-server")
    assert (result.returncode, result.stdout, result.stderr) == (0, "done late\n", "")


def test_a_missing_script(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-m", "hvdtrain.worker", "none.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("no such script: none.py")


def test_a_script_that_is_no_text(tmp_path: Path) -> None:
    result = work(tmp_path, "print(1)\0")
    assert result.returncode == 2
    assert result.stderr.endswith("sub/train.py is not a Python script: it contains NUL bytes\n")


APPLY = "class %s:\n    def %s(self, gradients):\n        return gradients\n"
# Stand-ins for the modules that a script imports: what counts is their names and that operations are called.
STAND_INS = {
    "keras/__init__.py": "",
    "keras/src/callbacks/callback_list.py": (
        "from hvdtrain.worker.phases import _LOOP_PHASES\n"
        "CallbackList = type('CallbackList', (), {name: lambda self: None for name in _LOOP_PHASES})\n"
    ),
    "keras/src/optimizers/base_optimizer.py": APPLY % ("BaseOptimizer", "apply"),
    "tf_keras/__init__.py": "",
    "tf_keras/src/optimizers/optimizer.py": APPLY % ("Optimizer", "apply_gradients"),
    "horovod/__init__.py": "",
    "horovod/tensorflow/__init__.py": "from horovod.tensorflow import mpi_ops\n",
    "horovod/tensorflow/keras.py": "from horovod.tensorflow import mpi_ops\n",
    "horovod/tensorflow/mpi_ops.py": (
        "import types\n"
        "MPI_LIB = types.SimpleNamespace(horovod_allreduce=lambda x: x, horovod_broadcast=lambda x: x)\n"
    ),
}
IMPORT = "import keras\nfrom horovod.tensorflow import mpi_ops\n"
STEPS = (
    "from keras.src.optimizers.base_optimizer import BaseOptimizer\n"
    "assert [BaseOptimizer().apply(gradients) for gradients in (1, 2)] == [1, 2]\n"
)
COUNTED_STEPS = """
from keras.src.optimizers.base_optimizer import BaseOptimizer
apply, calls = BaseOptimizer.apply, []
BaseOptimizer.apply = lambda *given: calls.append(1) or apply(*given)
assert [BaseOptimizer().apply(gradients) for gradients in (1, 2)] == [1, 2] and calls == [1, 1]
"""
COUNTED_CALLS = """
library, calls = mpi_ops.MPI_LIB, []
reduce = library.horovod_allreduce
library.horovod_allreduce = lambda number: calls.append(1) or reduce(number)
assert [library.horovod_allreduce(number) for number in (1, 2)] == [1, 2] and calls == [1, 1]
"""
"""A script that wraps what is watched keeps its wrapper."""
STEP_OF_KERAS_2 = (
    "from tf_keras.src.optimizers.optimizer import Optimizer\nOptimizer().apply_gradients(1)\n"
)
FIT = (
    "from keras.src.callbacks.callback_list import CallbackList\nCallbackList().on_train_begin()\n"
)
AT_ONCE = "this script does not use Horovod: each of the 2 ranks trains its own model"
APART = "the 2 ranks never exchanged a value"
NOTHING = "horovod.tensorflow.keras does nothing on Keras 3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said", "environment"),
    [
        ("import keras", "", {}),
        (STEPS, APART, {}),
        (STEPS + "raise SystemExit(0)", APART, {}),
        (COUNTED_STEPS, APART, {}),
        (IMPORT, "", {}),
        (IMPORT + STEPS + COUNTED_CALLS, "", {}),
        (IMPORT + STEPS, APART, {}),
        (FIT + "raise SystemExit(1)", AT_ONCE, {}),
        (FIT + STEPS, AT_ONCE, {}),
        (IMPORT + FIT + STEPS, APART, {}),
        (IMPORT + STEPS + "mpi_ops.MPI_LIB.horovod_broadcast(1)", APART, {}),
        (
            IMPORT
            + STEPS
            + "assert [mpi_ops.MPI_LIB.horovod_allreduce(n) for n in (1, 2)] == [1, 2]",
            "",
            {},
        ),
        ("import horovod.tensorflow.keras", NOTHING, {}),
        (
            "import horovod.tensorflow.keras\n" + STEP_OF_KERAS_2,
            APART,
            {"TF_USE_LEGACY_KERAS": "1"},
        ),
        (STEPS, "", {"HOROVOD_RANK": "1"}),
        (STEPS, "", {"HOROVOD_SIZE": "1"}),
        (STEPS + "raise SystemExit(1)", "", {}),
    ],
)
def test_ranks_that_train_apart_are_told(
    tmp_path: Path, script: str, said: str, environment: dict[str, str]
) -> None:
    for name, content in STAND_INS.items():
        path = tmp_path / "sub" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    ranks = {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"} | environment
    result = work(tmp_path, script, **ranks)
    warnings = [line for line in result.stderr.splitlines() if "warning" in line]
    assert len(warnings) == (said != ""), result.stderr
    assert said in result.stderr and "AssertionError" not in result.stderr
    assert ("import hvdtrain.keras as hvd" in result.stderr) == (said != "")


SEEN = """
import json, sys
def names():
    return sorted(name for name in globals() if name.startswith("__"))
seen = [sys.argv, sys.path, __file__, __name__, repr(__spec__), repr(__package__), names(), __doc__]
seen += [type(__loader__).__name__, type(__builtins__).__name__, __annotations__]
seen += [sys.modules["__main__"].__dict__ is globals()]
print(json.dumps(seen))
"""


@pytest.mark.parametrize("archive", [False, True])
def test_the_script_sees_what_python_shows_it(tmp_path: Path, archive: bool) -> None:
    script = tmp_path / ("train.pyz" if archive else "train.py")
    if archive:
        (tmp_path / "app").mkdir()
        (tmp_path / "app/__main__.py").write_text(SEEN)
        zipapp.create_archive(tmp_path / "app", script)
    else:
        script.write_text(SEEN)
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "0"}
    by_python, by_worker = (
        subprocess.run([*words, script.name, "a"], cwd=tmp_path, env=environ, capture_output=True)
        for words in ([sys.executable], [sys.executable, "-P", "-m", "hvdtrain.worker"])
    )
    assert by_worker.stderr == b""
    assert by_worker.stdout == by_python.stdout != b""


def test_exit_functions_can_pickle_what_the_script_defines(tmp_path: Path) -> None:
    script = """
import atexit, multiprocessing, pickle
class Thing: pass
def double(x): return 2 * x
if __name__ == "__main__":
    atexit.register(lambda: print(pickle.loads(pickle.dumps(Thing()))))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [4]))
"""
    result = work(tmp_path, script)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("[8]\n<__main__.Thing object")


def test_an_error_without_a_text_is_told_all_the_same(tmp_path: Path) -> None:
    for how in ("raise Odd()", "raise SystemExit(Odd())", "raise Odd() from Odd()"):
        script = f"class Odd(Exception):\n    def __str__(self):\n        raise TypeError\n{how}\n"
        result = work(tmp_path, script, **{TERMINAL: "0"})
        lines = [line for line in result.stderr.splitlines() if line]
        (failure,) = (from_line(line) for line in lines)
        assert failure is not None and "Odd" in failure.text
        assert result.returncode == 1


def test_a_rank_without_standard_input_says_who_has_it(tmp_path: Path) -> None:
    for rank, hinted in (("0", False), ("1", True)):
        said = work(tmp_path, "input()", HOROVOD_RANK=rank).stderr
        assert "EOFError: EOF when reading a line" in said
        assert ("Standard input goes to rank 0 only: pass" in said) == hinted


def test_an_error_may_name_a_file_that_is_no_utf_8(tmp_path: Path) -> None:
    script = r"open(b'caf\xe9')" + "\n"
    result = work(tmp_path, script, **{TERMINAL: "0"})
    (failure,) = (from_line(line) for line in result.stderr.splitlines() if line)
    assert failure is not None and failure.text.endswith("No such file or directory: b'caf\\xe9'")
    script = r"raise SystemExit('no file caf\udce9')" + "\n"
    assert "caf\\udce9" in work(tmp_path, script, **{TERMINAL: "0"}).stderr


def test_what_was_sent_goes_before_what_the_hosts_login_sets(tmp_path: Path) -> None:
    launch_id = f"test-{os.getpid()}"
    deliver(launch_id, {"WANTED": "sent"})
    try:
        script = "import os; print(os.environ['WANTED'])"
        result = work(tmp_path, script, **{LAUNCH_ID: launch_id, "WANTED": "of the login"})
    finally:
        withdraw(launch_id)
    assert result.stdout == "sent\n"
