"""Each line of `hvdtrain doctor` about software, GPUs and Horovod: what turns it red, and the fix."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_programs import path_with

from hvdtrain.doctor import horovod_checks, software
from hvdtrain.doctor.checks import Result
from hvdtrain.doctor.horovod_checks import (
    Build,
    allreduce_result,
    check_loading,
    check_local_allreduce,
    nccl,
    readable,
    reason,
)
from hvdtrain.doctor.software import check_backend
from hvdtrain.install import selftest
from hvdtrain.install.build_environment import Missing, TensorFlow
from hvdtrain.launch.running.timed_command import CompletedCommand


def ran(returncode: int | None = 0, stdout: str = "", stderr: str = "") -> CompletedCommand:
    return CompletedCommand(returncode, stdout, stderr, started=0.0, seconds=2.5)


def statuses(findings: Any) -> list[str]:
    return [finding.status for finding in findings]


# Software


@pytest.mark.parametrize(
    ("version", "text", "inside"),
    [
        ("2.21.0", "==2.21.0", True),
        ("2.21", "==2.21.0", True),
        ("2.21.0+cpu", "==2.21.0", True),
        ("3.15.1", ">=3.15,<3.16", True),
        ("3.16.0", ">=3.15,<3.16", False),
        ("3.9.2", ">=3.15,<3.16", False),
        ("3.16.0rc1", ">=3.15,<3.16", False),
        ("1.0", "", True),
    ],
)
def test_range(version: str, text: str, inside: bool) -> None:
    assert (version in software.Range(text)) is inside


def test_ranges_are_those_of_setup_cfg() -> None:
    setup = (Path(__file__).parents[2] / "setup.cfg").read_text()
    assert f"python_requires = {software.tested_python().text}" in setup
    assert f"tensorflow-cpu{software.tested_range('tensorflow-cpu').text}\n" in setup
    assert f"tensorflow[and-cuda]{software.tested_range('tensorflow').text}\n" in setup
    assert f"keras{software.tested_range('keras').text}\n" in setup


def test_sources_that_are_not_installed_refuse_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.metadata", unknown)
    monkeypatch.setattr("importlib.metadata.requires", unknown)
    assert software.check_python("3.11.2").status == "ok"
    assert software.check_keras("3.15.0").status == "ok"


@pytest.mark.parametrize("version", ["3.10.14", "3.14.0"])
def test_wrong_python(version: str) -> None:
    finding = software.check_python(version)
    assert (finding.status, finding.fix) == (
        "fail",
        "create an environment with Python 3.11, 3.12 or 3.13",
    )
    assert "tested: >=3.11,<3.14" in finding.seen


def test_tensorflow_that_is_missing_has_the_fix_of_the_installer() -> None:
    finding = software.check_tensorflow(Missing("TensorFlow is not installed in /v: run `x`."))
    assert (finding.status, finding.seen) == ("fail", "TensorFlow is not installed in /v")
    assert finding.fix == "run `x`."


@pytest.mark.parametrize(
    ("version", "status"), [("2.21.0", "ok"), ("2.21.1", "ok"), ("2.20.0", "fail")]
)
def test_tensorflow_of_another_minor_version(version: str, status: str) -> None:
    assert software.check_tensorflow(TensorFlow("tensorflow", version)).status == status


def test_another_tensorflow_earlier_in_the_path_turns_two_lines_red(tmp_path: Path) -> None:
    """As the doctor sees it: metadata of another release first in PYTHONPATH."""
    record = tmp_path / "tensorflow_cpu-2.19.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tensorflow-cpu\nVersion: 2.19.0\n"
    )
    code = (
        "from hvdtrain.doctor import software as v\n"
        "v.installed_key = lambda: 'cp311-linux-tensorflow2.21.0-gloo'\n"
        "v.version_of = lambda name: {'keras': '3.15.0', 'horovod': '0.28.1'}[name]\n"
        "for f in v.check_versions(): print(f.name, f.status, f.seen, f.fix, sep='|')"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines()}
    assert lines["TensorFlow"] == [
        "fail",
        "2.19.0 (tensorflow-cpu); tested: 2.21.0",
        "pip install 'hvdtrain[cpu]'",
    ]
    assert lines["Horovod"] == [
        "fail",
        "0.28.1, built for TensorFlow 2.21.0; installed: 2.19.0",
        "hvdtrain install-horovod",
    ]
    assert lines["Keras"][0] == "ok"


@pytest.mark.parametrize(
    ("version", "seen"), [(None, "not installed"), ("3.14.0", "3.14.0; tested: >=3.15,<3.16")]
)
def test_wrong_keras(version: str | None, seen: str) -> None:
    finding = software.check_keras(version)
    assert finding == Result("Keras", "fail", seen, "pip install 'keras>=3.15,<3.16'")


@pytest.mark.parametrize(
    ("version", "seen", "fix"),
    [
        (None, "not installed", "hvdtrain install-horovod"),
        ("0.27.0", "0.27.0; tested: 0.28.1", "hvdtrain install-horovod --force"),
    ],
)
def test_wrong_horovod(version: str | None, seen: str, fix: str) -> None:
    finding = software.check_horovod(version, None, TensorFlow("tensorflow", "2.21.0"))
    assert finding == Result("Horovod", "fail", seen, fix)


@pytest.fixture
def keras_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keras's settings in a home folder of the test."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".keras").mkdir()
    return tmp_path / ".keras/keras.json"


@pytest.mark.parametrize(
    ("environ", "text", "status", "seen"),
    [
        ({"KERAS_BACKEND": "jax"}, None, "fail", "KERAS_BACKEND is jax"),
        ({}, '{"backend": "torch"}', "fail", "torch, in "),
        ({"TF_USE_LEGACY_KERAS": "1"}, None, "warn", "TF_USE_LEGACY_KERAS makes tf.keras Keras 2"),
    ],
)
def test_wrong_backend(
    environ: dict[str, str], text: str | None, status: str, seen: str, keras_json: Path
) -> None:
    if text:
        keras_json.write_text(text)
    finding = check_backend(environ)
    assert finding.status == status
    assert finding.seen.startswith(seen)
    assert "TF_USE_LEGACY_KERAS" in finding.fix or "KERAS_BACKEND=tensorflow" in finding.fix


@pytest.mark.parametrize("text", ["", "no json", "{}", '{"backend": "tensorflow"}'])
def test_right_backend(text: str, keras_json: Path) -> None:
    keras_json.write_text(text)
    assert check_backend({}).status == "ok"


def test_settings_with_which_keras_does_not_load(keras_json: Path) -> None:
    keras_json.write_text("[]")
    assert "Keras does not load" in check_backend({}).seen
    keras_json.unlink()
    keras_json.mkdir()
    assert check_backend({}).status == "fail"


# GPUs


SMI = 'echo "NVIDIA H100, 570.1"; echo "NVIDIA H100, 570.1"'
TWO = [horovod_checks.Gpu("NVIDIA H100", "570.1")] * 2
CUDA = Build(mpi=True, gloo=True, nccl=True, tensorflow_cuda=True, gpus=2)
CPU = Build(mpi=True, gloo=True, nccl=False, tensorflow_cuda=False, gpus=0)


def test_gpus_are_listed(tmp_path: Path) -> None:
    assert horovod_checks.list_gpus(path_with(tmp_path, {"nvidia-smi": SMI}), 10) == TWO


@pytest.mark.parametrize(
    ("smi", "status", "seen", "fix"),
    [
        (None, "skip", "no NVIDIA GPU here", ""),
        ("echo 'Driver/library version mismatch' >&2; exit 18", "fail", "mismatch", "reboot"),
        ("exit 0", "fail", "lists no GPU", "docker run --gpus all"),
        ("/bin/sleep 30", "fail", "took longer than 1 s", "dmesg"),
    ],
)
def test_nvidia_smi(smi: str | None, status: str, seen: str, fix: str, tmp_path: Path) -> None:
    environ = path_with(tmp_path, {"nvidia-smi": smi} if smi else {})
    finding = horovod_checks.list_gpus(environ, 1)
    assert isinstance(finding, Result)
    assert finding.status == status
    assert seen in finding.seen
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (2, "570.1; 2 x NVIDIA H100"),
        (1, "570.1; 2 x NVIDIA H100; CUDA_VISIBLE_DEVICES selects 1"),
    ],
)
def test_driver(visible: int, seen: str) -> None:
    assert horovod_checks.check_driver(TWO, visible) == Result("NVIDIA driver", "ok", seen)


def test_gpus_that_are_all_hidden(tmp_path: Path) -> None:
    """Then nothing else is asked of them."""
    environ = {**path_with(tmp_path, {"nvidia-smi": SMI}), "CUDA_VISIBLE_DEVICES": "-1"}
    (driver,) = horovod_checks.check_gpus(CUDA, environ, 10)
    assert (driver.status, driver.fix) == ("warn", "unset CUDA_VISIBLE_DEVICES")


def test_tensorflow_sees_fewer_gpus_than_there_are() -> None:
    one = Build(mpi=True, gloo=True, nccl=True, tensorflow_cuda=True, gpus=1)
    finding = horovod_checks.check_tensorflow_gpus(2, one)
    assert (finding.status, finding.seen) == ("fail", "1 of 2")
    assert "hvdtrain[gpu]" in finding.fix
    assert horovod_checks.check_tensorflow_gpus(2, CUDA).status == "ok"
    assert horovod_checks.check_tensorflow_gpus(2, CPU).status == "warn"


def test_nccl() -> None:
    without = Build(mpi=True, gloo=True, nccl=False, tensorflow_cuda=True, gpus=2)
    finding = horovod_checks.check_nccl(2, without, {}, 1)
    assert (finding.status, finding.fix) == ("fail", "hvdtrain install-horovod --gpu")
    assert horovod_checks.check_nccl(2, CPU, {}, 1).status == "skip"
    good = ran(stdout='@hvdtrain-engine {"version": "2.27.3"}\n')
    assert horovod_checks.nccl_result(good, 2, 1) == Result(
        horovod_checks.NCCL, "ok", "2 of 2, NCCL 2.27.3"
    )
    assert "NCCL_P2P_DISABLE=1" in horovod_checks.nccl_result(ran(None), 2, 1).fix
    broken = ran(stdout='@hvdtrain-engine {"error": "NCCL: unhandled system error"}\n')
    assert horovod_checks.nccl_result(broken, 2, 1).seen == "NCCL: unhandled system error"


def test_no_nccl_library(tmp_path: Path) -> None:
    answer = nccl(2, str(tmp_path / "libnccl.so.2"))
    assert "cannot open shared object" in answer["error"]
    said = ran(stdout=f'@hvdtrain-engine {{"error": "{answer["error"]}"}}\n')
    assert "pip install nvidia-nccl-cu12" in horovod_checks.nccl_result(said, 2, 1).fix
    assert readable(22703) == "2.27.3"


# Horovod


@pytest.mark.parametrize(
    ("stderr", "fix"),
    [
        ("ImportError: libmpi.so.40: cannot open shared object file", "module load openmpi"),
        ("NotFoundError: mpi_lib.so: undefined symbol: _ZN10tensorflow", "install-horovod --force"),
        ("ModuleNotFoundError: No module named 'tensorflow'", "pip install 'hvdtrain[cpu]'"),
        ("ModuleNotFoundError: No module named 'horovod'", "hvdtrain install-horovod"),
    ],
)
def test_horovod_that_does_not_load(stderr: str, fix: str) -> None:
    loaded, finding = check_loading(ran(1, stderr=f"Traceback ...\n{stderr}\n"), 60)
    assert loaded is None
    assert (finding.status, finding.seen) == ("fail", stderr)
    assert fix in finding.fix


def test_horovod_that_hangs_or_loads() -> None:
    assert check_loading(ran(None), 60)[1].seen == "took longer than 60 s"
    line = '@hvdtrain-engine {"mpi": true, "gloo": true, "nccl": false, "tensorflow_cuda": false, "gpus": 0}'
    loaded, finding = check_loading(ran(0, stdout=f"noise\n{line}\n"), 60)
    assert loaded == CPU
    assert finding.seen == "with mpi, gloo (2.5 s with TensorFlow)"


@pytest.mark.parametrize(("built", "status"), [(["mpi", "gloo"], "warn"), (["mpi"], "fail")])
def test_no_mpirun(built: list[Any], status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod with MPI in an environment without mpirun, in PATH or beside Python: a launch takes Gloo if it can."""
    monkeypatch.setattr(horovod_checks, "installed_controllers", lambda: frozenset(built))
    monkeypatch.setattr(horovod_checks, "find_mpirun", lambda path: None)
    finding = check_local_allreduce("mpi", {"PATH": "/nowhere"}, 1)
    assert finding.status == status
    assert "no mpirun in PATH" in finding.seen
    assert "module load openmpi" in finding.fix
    assert "--controller gloo" in finding.fix


def test_a_controller_that_was_not_built_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_checks, "installed_controllers", lambda: frozenset(["gloo"]))
    assert check_local_allreduce("mpi", {}, 1).status == "skip"


def test_an_allreduce_has_the_environment_that_a_job_would_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A variable that makes every run fail must not be hidden from it."""
    asked: dict[str, Any] = {}

    def stand_in(argv: list[str], **rest: Any) -> CompletedCommand:
        asked.update(rest, argv=argv)
        return ran(0, stdout=f"{selftest.PASSED}\n")

    monkeypatch.setattr(horovod_checks, "installed_controllers", lambda: frozenset(["gloo"]))
    monkeypatch.setattr(horovod_checks, "run", stand_in)
    user = {"HVDTRAIN_ENV": "NOT_SET", "HOROVOD_CPU_OPERATIONS": "mpi", "HVDTRAIN_AUTOTUNE": "1"}
    other_kind = {"HVDTRAIN_CONTAINER": "image.sif", "HVDTRAIN_STRATEGY": "tpu"}
    assert check_local_allreduce("gloo", {**user, **other_kind}, 60).status == "ok"
    assert user.items() <= asked["environ"].items()
    assert "HVDTRAIN_CONTAINER" not in asked["environ"]
    assert asked["argv"][asked["argv"].index("--strategy") + 1] == "horovod"


def test_gloo_is_not_tried_where_it_is_known_to_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("socket.gethostbyname", unknown)
    monkeypatch.setattr(horovod_checks, "runs_over_mpi", lambda environ: True)
    assert check_local_allreduce("gloo", {}, 1).status == "skip"


@pytest.mark.parametrize(
    ("said", "seen", "fix"),
    [
        (ran(None), "took longer than 60 s", "see where it waits: hvdtrain run"),
        (ran(0), "ended without a result", "for the full output: hvdtrain run"),
        (
            ran(
                1,
                stderr="rank 0 failed:\nTraceback\n  x\nOSError: [Errno 28] No space left on device\n",
            ),
            "OSError: [Errno 28] No space left on device",
            "free space in /dev/shm",
        ),
        (
            ran(
                1,
                stderr="mpirun has detected... please use --allow-run-as-root\nlogs of all workers: x\n",
            ),
            "mpirun has detected... please use --allow-run-as-root",
            "OMPI_ALLOW_RUN_AS_ROOT=1",
        ),
        (ran(2, stderr="Error: what you gave\n"), "what you gave", "for the full output"),
    ],
)
def test_an_allreduce_that_fails(said: CompletedCommand, seen: str, fix: str) -> None:
    finding = allreduce_result("allreduce", 2, said, "", ["hvdtrain", "run"], 60)
    assert (finding.status, finding.seen) == ("fail", seen)
    assert fix in finding.fix


def test_a_launcher_that_fails_is_quoted_from_its_start() -> None:
    """The message of `hvdtrain run` ends with the launcher's last lines, which are general advice."""
    said = ran(127, stderr="horovodrun failed (exit code 127):\n* check your network\n-----\n")
    log = "bash: line 1: orted: command not found\n-----\nORTE was unable ...\n* check your network"
    finding = allreduce_result("allreduce", 2, said, log, ["hvdtrain", "run"], 60)
    assert finding.seen == "bash: line 1: orted: command not found"
    assert "PATH on every host" in finding.fix


def test_an_allreduce_that_works() -> None:
    finding = allreduce_result("allreduce", 2, ran(0, stdout=f"{selftest.PASSED}\n"), "", ["x"], 60)
    assert finding == Result("allreduce", "ok", "2 ranks, 2.5 s")


def test_the_reason_is_an_error_rather_than_a_rule() -> None:
    assert reason(["-----", "There are not enough slots", "-----"]) == "There are not enough slots"
    assert reason(["first", "x.y.SomeError: why"]) == "x.y.SomeError: why"
    assert reason([]) == ""
