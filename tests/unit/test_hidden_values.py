"""A secret that was given as `--env NAME=VALUE` does not stay in the process list."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdtrain.cli.command_table import main
from hvdtrain.cli.hidden_values import without_values

REPOSITORY = Path(__file__).parents[2]


def test_values_are_taken_out_before_the_script_only() -> None:
    argv = ["python", "hvdtrain", "run", "--env", "A_KEY=x", "--env=B_KEY=y", "--env", "C=z"]
    script = ["train.py", "--env", "A_KEY=x"]
    shown = without_values([*argv, *script], {"A_KEY", "B_KEY"}, trailing=2)
    assert shown == [
        *("python", "hvdtrain", "run", "--env", "A_KEY", "--env=B_KEY", "--env", "C=z"),
        *script,
    ]
    assert without_values(["a", "A_KEY=x"], {"A_KEY"}, 0) == ["a", "A_KEY=x"]
    assert without_values(argv, set(), 0) == argv


def test_the_command_starts_again_with_the_value_in_its_environment() -> None:
    code = (
        "import os, sys\n"
        "from hvdtrain.cli.hidden_values import conceal_secrets\n"
        "from hvdtrain.launch.env_forwarding import parse_variable\n"
        "given = [parse_variable(text) for text in sys.argv[2::2]]\n"
        "conceal_secrets(given, ())\n"
        "print(open('/proc/self/cmdline').read().split(chr(0))[3:-1], os.environ['A_KEY'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--env", "A_KEY=hush", "--env", "B=1"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['--env', 'A_KEY', '--env', 'B=1'] hush\n"


def test_the_words_of_a_file_are_none_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments that a configuration file gives to the script do not stand at the end of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "run.yaml").write_text("np: 2\nscript: train.py\narguments: [--epochs, 5]\n")
    words = ["run", "--config", "run.yaml", "--env", "API_KEY=hush"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "hvdtrain", *words])

    class Replaced(Exception):
        pass

    def replace(program: str, argv: list[str], environ: dict[str, str]) -> None:
        raise Replaced(argv[1:], environ["API_KEY"])

    monkeypatch.setattr(os, "execve", replace)
    monkeypatch.setattr("hvdtrain.cli.run.run_launch", lambda *_, **__: 0)
    result = CliRunner().invoke(main, words)
    assert isinstance(result.exception, Replaced), result.output
    assert result.exception.args == (["hvdtrain", *words[:-1], "API_KEY"], "hush")
