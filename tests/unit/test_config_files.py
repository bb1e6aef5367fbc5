"""Configuration files: what is read, what is refused and how, and which layer goes before which."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from horovod.runner import launch as horovod_launch
from horovod.runner.common.util import config_parser

from hvdtrain.cli.command_table import main
from hvdtrain.launch import user_files
from hvdtrain.launch.config_files import HOROVOD_SECTIONS
from hvdtrain.launch.plan_validation import CONDITIONS

HOROVOD_LAYOUT = """\
controller: mpi
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 2.5
  cache_capacity: 512
  hierarchical_allreduce: true
  hierarchical_allgather: false
  torus_allreduce: false
autotune:
  enabled: true
  log_file: autotune.csv
  warmup_samples: 5
  steps_per_sample: 20
  bayes_opt_max_samples: 30
  gaussian_process_noise: 0.5
timeline:
  filename: timeline.json
  mark_cycles: true
stall_check:
  enabled: true
  warning_time_seconds: 30
  shutdown_time_seconds: 90
library_options:
  mpi_threads_disable: true
  num_nccl_streams: 2
  thread_affinity: 1
  gloo_timeout_seconds: 60
logging:
  level: INFO
  with_timestamp: true
"""


def call(*args: str, **env: str | None) -> Result:
    return CliRunner().invoke(main, ["run", *args], prog_name="hvdtrain", env=env)


def shown(*args: str, **env: str | None) -> dict[str, tuple[Any, str]]:
    """What --show-config prints: key -> (value, source)."""
    result = call("--show-config", *args, **env)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()[1:]
    values = yaml.safe_load(result.stdout)
    sources = [line.rpartition("  # ")[2] for line in lines]
    return {key: (values[key], source) for key, source in zip(values, sources, strict=True)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def test_script_arguments_and_options_from_a_file(folder: Path) -> None:
    (folder / "run.yaml").write_text(
        "script: train.py\n"
        "arguments: [--lr, 0.10, --fast, no, --epochs, 5]\n"
        "np: 4\n"
        "hosts: {a: 2, b: 2}\n"
        "network_interfaces: [eth0, ib0]\n"
        "blacklist-cooldown-range: null\n"
        "controller: gloo\n"
        "env: {A: 1.10, ON: yes, FROM_HERE: }\n"
        "tcp: true\n"
    )
    printed = call("--config", "run.yaml", "--dry-run", FROM_HERE="x").stdout
    assert printed.endswith("hvdtrain.worker train.py --lr 0.10 --fast no --epochs 5\n")
    assert "-np 4 --gloo -H a:2,b:2 --network-interfaces eth0,ib0 " in printed
    assert printed.startswith("env A=1.10 ON=yes ")
    assert printed.startswith("env A=1.10 ON=yes horovodrun -np 4 ")
    assert " --tcp " in printed
    other = call("--config", "run.yaml", "--dry-run", "train.py", "--epochs", "9", FROM_HERE="x")
    assert other.stdout.endswith("hvdtrain.worker train.py --epochs 9\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("controler: gloo", "there is no option 'controler'. Did you mean 'controller' or"),
        ("fusion_treshold_mb: 1", "Did you mean 'fusion-threshold-mb'?"),
        ("zzz: 1", "there is no option 'zzz'."),
        ("dry-run: true", "there is no option 'dry-run'."),
        ("autotune: {enable: true}", "no key 'enable' in autotune. Did you mean 'enabled'?"),
        ("params: {autotune: true}", "no key 'autotune' in params."),
        ("params: 3", "params is a section"),
        ("np: 2\nnp: 3", "'np' appears twice"),
        ("np: 2\nnum-proc: 3", "np and num-proc are the same"),
        (
            "fusion_threshold_mb: 1\nparams: {fusion_threshold_mb: 1}",
            "are the same option: use only one",
        ),
        ("np: two", "np: 'two' is invalid: expected an integer"),
        ("np: 2.5", "np: 2.5 is invalid: expected an integer"),
        ("np: true", "np: True is invalid: expected an integer"),
        ("tcp: 1", "tcp: 1 is invalid: expected true or false"),
        ("cycle-time-ms: fast", "cycle-time-ms: 'fast' is not a valid float"),
        ("cycle-time-ms: [1]", "cycle-time-ms: [1] is invalid: expected a number"),
        ("controller: gluu", "controller: 'gluu' is not one of 'auto', 'mpi', 'gloo'"),
        ("controller: 3", "controller: 3 is invalid: expected a string"),
        ("hosts: a", "hosts: cannot read 'a'"),
        ("hosts: {a: many}", "hosts: {'a': 'many'} is invalid: expected slots for each host"),
        ("hosts: 4", "hosts: 4 is invalid"),
        ("log-dir: [a]", "log-dir: ['a'] is invalid"),
        ("arguments: --epochs 5", "arguments: '--epochs 5' is invalid: expected a list"),
        ("env: {A B: x}", "env: 'A B' is not a valid name"),
        ("env: {A: [1]}", "env: {'A': [1]} is invalid"),
        ("env: A", "env: 'A' is invalid: expected a list"),
        ("blacklist-cooldown-range: [1]", "expected 2 integers"),
        ("params:\n  cycle_time_ms: x", "params.cycle_time_ms: 'x' is not a valid float"),
        ("- np", "expected one option per line"),
        ("np 4", "expected one option per line"),
        ("np: [", "is not valid YAML: line 1, column 6: "),
        ("np: !!python/object:os.system x", "is not valid YAML: line 1, column 5: "),
        ("? {a: 1}\n: 2", "line 1: a key must be a single word"),
        ("log-dir: 2024-13-45", "month must be in 1..12: put strings in quotes"),
        ('arguments: ["a\\0b"]', "line 1: a string cannot contain a NUL byte"),
        ('env: {A: "\\ud800"}', "line 1: a string cannot contain a NUL byte, or half of a surr"),
        ('np: 2\nlog-dir: "a\\0b"', "line 2: a string cannot contain a NUL byte"),
        ("np: " + "[" * 2000 + "]" * 2000, "is nested too deeply"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_place(
    folder: Path, text: str, message: str
) -> None:
    (folder / "run.yaml").write_text(text)
    result = call("--config", "run.yaml", "-np", "1", "train.py")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert "run.yaml" in result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_files_that_cannot_be_read(folder: Path) -> None:
    (folder / "binary").write_bytes(b"\xff\xfe\x00")
    for name, message in (
        ("nothing.yaml", "cannot read the configuration nothing.yaml: No such file"),
        (".", "cannot read the configuration .: Is a directory"),
        ("binary", "is not a text file"),
        ("/dev/zero", "configuration /dev/zero is longer than a megabyte"),
    ):
        result = call("--config", name, "train.py")
        assert result.exit_code == 2
        assert message in result.stderr


def test_a_pipe_is_read_to_its_end_and_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_files, "PIPE_SECONDS", 0.5)
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    result = call("--config", "pipe", "train.py")
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: cannot read the configuration pipe: nothing was written to this pipe for 0.5 seconds\n",
    )
    monkeypatch.setattr(user_files, "PIPE_SECONDS", 20)
    # The shell's <(command), which takes its time and writes more than a pipe holds.
    slow = f"(echo np: 3; sleep 0.2; seq -f '# %.0f' 20000) > {pipe}"
    with subprocess.Popen(["sh", "-c", slow]):
        assert user_files.read_text(pipe, "configuration").splitlines()[::20000] == [
            "np: 3",
            "# 20000",
        ]


def test_the_arguments_are_for_the_script_of_the_file(folder: Path) -> None:
    (folder / "other.py").touch()
    (folder / "run.yaml").write_text("np: 1\nscript: train.py\narguments: [--epochs, 5]\n")
    (folder / "plain.yaml").write_text("np: 1\narguments: [--epochs, 5]\n")
    for config, words, told in (
        ("run.yaml", [], "train.py --epochs 5"),
        ("run.yaml", ["train.py"], "train.py --epochs 5"),
        ("run.yaml", ["./other.py"], "other.py"),
        ("run.yaml", ["other.py", "-x"], "other.py -x"),
        ("plain.yaml", ["other.py"], "other.py --epochs 5"),
    ):
        for strategy in ([], ["--strategy", "central-storage"]):
            printed = call("--dry-run", *strategy, "--config", config, *words).stdout
            assert printed.endswith(f" -P -m hvdtrain.worker {told}\n"), printed
    assert "arguments" not in shown("--config", "run.yaml", "other.py")


def test_an_empty_file_says_nothing(folder: Path) -> None:
    (folder / "run.yaml").write_text("# nothing yet\nnp:\nparams:\n")
    with_file = shown("--config", "run.yaml", "-np", "1", "train.py")
    assert with_file == shown("-np", "1", "train.py")


def test_horovods_own_layout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file, given to horovodrun and to hvdtrain, makes the same environment."""
    (folder / "run.yaml").write_text(HOROVOD_LAYOUT)
    mine = {}
    # horovodrun heeds Gloo's option with MPI and the other way round; here that is said.
    for controller, other in (("mpi", "--gloo-timeout-seconds"), ("gloo", "--mpi-threads-disable")):
        flags = ["--config-file", "run.yaml", f"--{controller}", "-H", "a:1,b:1"]
        printed = call(*flags, "--dry-run", "train.py")
        assert printed.exit_code == 0, printed.stderr
        words = shlex.split(printed.stdout)
        monkeypatch.setattr(sys, "argv", words[words.index("horovodrun") :])
        mine |= config_parser.set_env_from_args({}, horovod_launch.parse_args())
        assert other not in words
    monkeypatch.setattr(sys, "argv", ["horovodrun", "-np", "2", "--config-file", "run.yaml", "x"])
    theirs = config_parser.set_env_from_args({}, horovod_launch.parse_args())
    # Said by both: whether the stall check is on (hvdtrain says it only when it is off).
    assert theirs.pop("HOROVOD_STALL_CHECK_DISABLE") == "0"
    assert mine == theirs


def test_horovods_keys_are_all_known() -> None:
    asked: dict[str, set[str]] = {}

    class Section(dict[str, Any]):
        def __init__(self, name: str) -> None:
            super().__init__(true=True)
            self._name = name

        def get(self, key: str, default: Any = None) -> Any:  # type: ignore[override]
            asked.setdefault(self._name, set()).add(key)
            if self._name == "":
                return "gloo" if key == "controller" else Section(key)
            return default

    class Args:
        use_gloo = use_mpi = False

    config_parser.set_args_from_config(Args(), Section(""), set())
    assert asked.pop("") == {"controller", *HOROVOD_SECTIONS}
    assert asked == {name: set(keys) for name, keys in HOROVOD_SECTIONS.items()}


def test_a_section_that_is_off_has_no_effect(folder: Path) -> None:
    (folder / "run.yaml").write_text(
        "autotune: {warmup_samples: 3}\ntimeline: {mark_cycles: true}\n"
        "stall_check: {enabled: false, shutdown_time_seconds: 9}\n"
    )
    result = call("--config", "run.yaml", "-np", "1", "--dry-run", "train.py")
    assert "autotune" not in result.stdout
    assert "timeline" not in result.stdout
    assert "--no-stall-check" in result.stdout
    assert "shutdown-time" not in result.stdout


def test_a_value_from_before_makes_void_what_hangs_on_the_one_behind(folder: Path) -> None:
    (folder / "hostfile").write_text("a slots=2\n")
    (folder / "run.yaml").write_text(
        "controller: mpi\nmpi-args: -v\nautotune: true\nautotune-log-file: x\nhostfile: hostfile\n"
    )
    base = ["--config", "run.yaml", "--dry-run"]
    printed = call(*base, "--controller", "gloo", "--no-autotune", "-H", "b:1", "train.py").stdout
    assert " -np 1 --gloo -H b:1 --no-autotune " in printed
    assert "mpi-args" not in printed
    # At the command line itself it is a mistake.
    wrong = call(*base, "--controller", "gloo", "--mpi-args=-v", "train.py")
    assert "--mpi-args has no effect here: add --controller mpi" in wrong.stderr


def test_secrets_are_not_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # A secret's value is put there.
    (folder / "run.yaml").write_text("env: {API_TOKEN: hush, A: open}\n")
    args = ["--config", "run.yaml", "-np", "1", "train.py", "--password", "hush"]
    result = call("--show-config", *args)
    assert "hush" not in result.output
    assert "env: {API_TOKEN: null, A: open}" in result.stdout
    printed = call("--dry-run", *args)
    assert "hush" not in printed.output
    assert " A=open " in printed.stdout
    assert "before you paste this, set API_TOKEN" in printed.stderr


def test_what_a_file_says_for_another_launch_is_left_out(folder: Path) -> None:
    (folder / "run.yaml").write_text(
        "timeline-mark-cycles: true\nssh-port: 7\nhierarchical-allreduce: true\n"
    )
    words = ["--config", "run.yaml", "--dry-run", "-np", "1", "--mpi", "train.py"]
    done = call(*words, HVDTRAIN_RESET_LIMIT="3")
    assert done.exit_code == 0
    assert done.stderr.splitlines() == [
        f"{name} has no effect here and is ignored: {remedy}"
        for name, remedy in (
            ("--reset-limit", CONDITIONS["elastic"].remedy),
            ("--hierarchical-allreduce", CONDITIONS["several hosts"].remedy),
            ("--timeline-mark-cycles", CONDITIONS["timeline"].remedy),
        )
    ]
    assert "--mpi --ssh-port 7 --stall" in done.stdout
    # One line for an option that lacks two things.
    (folder / "run.yaml").write_text("controller: gloo\nhierarchical-allreduce: true\n")
    done = call(*words[:5], "train.py")
    remedy = CONDITIONS["mpi"].remedy
    assert done.stderr == f"--hierarchical-allreduce has no effect here and is ignored: {remedy}\n"
    # What is typed is meant for this one.
    assert call(*words[2:-1], "--reset-limit", "3", "train.py").exit_code == 2


# Horovod's own config.default.yaml, as far as 0.28.1 has its names.
SAMPLE = """\
controller: gloo
params:
  fusion_threshold_mb: 64
  cycle_time_ms: 5
  cache_capacity: 1024
  hierarchical_allreduce: false
  hierarchical_allgather: false
autotune:
  enabled: false
  log_file: 'horovod_autotune_log.txt'
  warmup_samples: 3
  bayes_opt_max_samples: 20
  gaussian_process_noise: 0.8
timeline:
  filename: 'horovod_timeline.json'
  mark_cycles: false
stall_check:
  enabled: true
  warning_time_seconds: 60
  shutdown_time_seconds: 0
library_options:
  mpi_threads_disable: false
  num_nccl_streams: 1
"""


def test_horovods_sample(folder: Path) -> None:
    (folder / "run.yaml").write_text(SAMPLE)
    done = call("--config-file", "run.yaml", "--dry-run", "-np", "1", "train.py")
    assert (done.exit_code, done.stderr) == (0, "")
    times = "--stall-check-warning-time-seconds 60 --stall-check-shutdown-time-seconds 0"
    assert times in done.stdout
    for known, old, now in (
        ("warmup_samples: 3", "cycles_per_sample: 10", "steps_per_sample"),
        ("mpi_threads_disable: false", "mpi_threads_disabled: false", "mpi_threads_disable"),
        ("num_nccl_streams: 1", "mlsl_bgt_affinity: 0", "thread_affinity"),
    ):
        (folder / "run.yaml").write_text(SAMPLE.replace(known, old))
        done = call("--config-file", "run.yaml", "--dry-run", "-np", "1", "train.py")
        assert (done.exit_code, f"'{now}'" in done.stderr) == (2, True), done.stderr


def test_paths_begin_at_the_files_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = folder / "conf"
    conf.mkdir()
    (conf / "train.py").touch()
    (conf / "hosts").write_text("a slots=2\n")
    (conf / "run.yaml").write_text(
        "script: train.py\nhostfile: hosts\nlog-dir: ~/logs\nautotune-log-file: a.csv\n"
        "autotune: {enabled: true}\ntimeline: {filename: t.json}\n"
    )
    values = {key: value for key, (value, _) in shown("--config", "conf/run.yaml").items()}
    assert (values["script"], values["hostfile"]) == ("conf/train.py", "conf/hosts")
    assert values["log-dir"] == str(Path("~/logs").expanduser())
    assert values["autotune-log-file"] == "conf/a.csv"
    assert values["timeline-filename"] == "t.json", "a section of horovodrun's"
    monkeypatch.chdir(conf)
    assert shown("--config", "run.yaml")["script"][0] == "train.py"
    (conf / "run.yaml").write_text("script: bash\narguments: [job.sh]\nnp: 1\n")
    monkeypatch.chdir(folder)
    printed = call("--config", "conf/run.yaml", "--dry-run").stdout
    assert printed.endswith(" --program bash job.sh\n")


def test_arguments_behind_dashes_are_for_the_script_of_the_file(folder: Path) -> None:
    (folder / "run.yaml").write_text("np: 1\nscript: train.py\narguments: [--epochs, 5]\n")
    for words, told in (
        (["--", "--epochs", "9"], "train.py --epochs 9"),
        (["--", "a//b"], "train.py a//b"),
        (["--", "--", "x"], "train.py -- x"),
        (["train.py", "--", "x"], "train.py -- x"),
        (["train.py", "x", "--", "y"], "train.py x -- y"),
        ([], "train.py --epochs 5"),
    ):
        for config in (["--config", "run.yaml"], []):
            printed = call("--dry-run", *config, *words, HVDTRAIN_CONFIG="run.yaml")
            assert printed.stdout.endswith(f" -m hvdtrain.worker {told}\n"), printed.stdout
    assert shown("--config", "run.yaml", "--", "-x")["arguments"] == (["-x"], "command line")
    wrong = call("--config", "run.yaml", "--epoch", "9")
    assert "No such option '--epoch'" in wrong.stderr
    assert "If the configuration names the script, put its arguments after --." in wrong.stderr
    (folder / "-t.py").touch()
    assert call("--dry-run", "-np", "1", "--", "-t.py", "x").stdout.endswith(" -t.py x\n")


def test_a_password_in_an_image_is_not_shown(folder: Path) -> None:
    image = ["--container", "docker://ann:hunter2@registry/image:1", "-np", "1", "train.py"]
    result = call("--show-config", *image)
    assert "container: 'docker://ann:***@registry/image:1'" in result.stdout
    (folder / "run.yaml").write_text(f"container: {image[1]}\n")
    assert "hunter2" not in call("--show-config", "--config", "run.yaml", *image[2:]).output
