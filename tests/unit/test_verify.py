"""What `hvdtrain verify` makes of recordings, written by hand: the verdict, its causes and the table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from hvdtrain.cli import bench_options
from hvdtrain.cli import verify as command
from hvdtrain.cli.command_table import main
from hvdtrain.data import Share
from hvdtrain.launch.running.timed_command import CompletedCommand
from hvdtrain.verify.comparison import compare
from hvdtrain.verify.likely_causes import likely_causes
from hvdtrain.verify.model_facts import facts_of
from hvdtrain.verify.recording import (
    GRADIENT_OF,
    RecordedStep,
    Recording,
    read_recording,
    write_facts,
    write_files,
    write_replicas,
    write_step,
)
from hvdtrain.verify.step_recorder import digests, in_order, turned_round

RNG = np.random.default_rng(0)
KERNEL, BIAS = RNG.normal(size=(4, 3)).astype("float32"), np.zeros(3, "float32")
RATE = "optimizer/learning_rate"


def recording(
    change: Mapping[int, Mapping[str, Any]] | None = None,
    examples: Mapping[int, tuple[str, ...]] | None = None,
    logs: Mapping[int, Mapping[str, float]] | None = None,
    noise: float = 0.0,
    apart: Mapping[int, tuple[str, ...]] | None = None,
    files: tuple[str, ...] = (),
    **facts: Any,
) -> Recording:
    """Three steps, each of which adds 0.1 to all weights; `noise` relative to that."""
    steps = []
    for step in range(4):
        arrays = {
            "dense/kernel": (KERNEL + 0.1 * step * (1 + noise)).astype("float32"),
            "dense/bias": (BIAS + 0.1 * step * (1 + noise)).astype("float32"),
            RATE: np.array(0.01, "float32"),
            "optimizer/iterations": np.array(step),
        }
        arrays |= (change or {}).get(step, {})
        read = (examples or {}).get(step, tuple(f"{step}{n}" for n in range(6)) if step else ())
        shown = (logs or {}).get(step, {"loss": 2.0 - 0.1 * step} if step else {})
        steps.append(RecordedStep(step, read, shown, arrays, (apart or {}).get(step, ())))
    return Recording(facts, steps, files)


ONE, REORDERED = recording(), recording(noise=1e-6)


def test_rounding_is_the_same() -> None:
    """Nine times the difference that another order makes is explained, and what is a hundred times float32's bits."""
    for noise in (0.0, 1e-6, 9e-6):
        steps = compare(ONE, REORDERED, recording(noise=noise))
        assert [step.outcome for step in steps] == ["same"] * 4
    assert [step.of for step in steps] == [0, 6, 6, 6]
    assert steps[2].whole == pytest.approx(9e-6, rel=0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dense/kernel", KERNEL + 0.2001),
        ("dense/kernel", np.where(np.arange(12).reshape(4, 3) == 5, np.nan, KERNEL + 0.2)),
        ("dense/kernel", KERNEL[:2] + 0.2),
        ("optimizer/iterations", np.array(3)),
        ("another", BIAS),
    ],
    ids=["value", "nan", "shape", "counter", "variable"],
)
def test_the_first_step_and_the_variable_that_differ(name: str, value: Any) -> None:
    steps = compare(ONE, REORDERED, recording({2: {name: value}}))
    assert [step.outcome for step in steps] == ["same", "same", "different", "same"]
    assert [gap.name for gap in steps[2].faults] == [name]


def test_a_variable_that_one_worker_sets_later_than_another() -> None:
    late = recording({0: {"dense/kernel": KERNEL * 0, "optimizer/momentum": BIAS}})
    assert [step.outcome for step in compare(ONE, REORDERED, late)] == ["same"] * 4


@pytest.mark.parametrize(
    ("precision", "limit"), [("float32", 1e-5), ("float16", 5e-3), ("bfloat16", 4e-2)]
)
def test_each_workers_sum_is_rounded(precision: str, limit: float) -> None:
    one = recording(precision=precision)
    for noise, outcome in ((0.8 * limit, "same"), (1.5 * limit, "different")):
        assert compare(one, one, recording(noise=noise))[1].outcome == outcome


def test_the_last_bit_of_a_value_that_hardly_changes() -> None:
    """A scale of BatchNormalization, near 1, in a training with a small rate."""
    begin = {0: {"norm/gamma": np.ones(8, "float32")}}
    gamma = np.full(8, 1.001, "float32")
    bits = gamma + np.float32(1.2e-7) * (np.arange(8) % 2)
    one = recording(begin | {1: {"norm/gamma": gamma}})
    for change, outcome in ((bits, "same"), (gamma + np.float32(1e-6), "different")):
        several = recording(begin | {1: {"norm/gamma": change.astype("float32")}})
        assert compare(one, one, several)[1].outcome == outcome


def test_a_kink_that_the_reversed_batch_has_elsewhere() -> None:
    """Where it changes one variable by rounding, it may change any other."""
    reordered = recording({1: {"dense/bias": BIAS + 0.1003}})
    for change, outcome in ((2e-4, "same"), (1e-2, "different")):
        several = recording({1: {"dense/kernel": KERNEL + 0.1 + change}})
        assert compare(ONE, reordered, several)[1].outcome == outcome


def test_a_nan_on_both_is_the_same() -> None:
    broken = {3: {"dense/bias": np.full(3, np.nan, "float32")}}
    last = compare(recording(broken), recording(broken, noise=1e-6), recording(broken))[3]
    assert last.outcome == "same"


def test_losses_count_too() -> None:
    steps = compare(ONE, REORDERED, recording(logs={3: {"loss": 1.71}}))
    assert [gap.name for gap in steps[3].faults] == ["loss"]
    steps = compare(ONE, REORDERED, recording(logs={3: {"loss": 1.7, "mae": 1.0}}))
    assert [gap.name for gap in steps[3].faults] == ["mae"]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_loss_that_is_not_finite(value: float) -> None:
    broken = recording(logs={3: {"loss": value}})
    assert compare(broken, broken, broken)[3].outcome == "same"
    for one, other in ((broken, ONE), (ONE, broken)):
        (gap,) = compare(one, one, other)[3].faults
        assert (gap.name, gap.found) == ("loss", np.inf)


def test_recordings_without_steps() -> None:
    assert compare(ONE, REORDERED, Recording({}, [])) == []


ROWS = {n: tuple(f"{n}{row}" for row in range(6)) for n in (1, 2, 3)}
TURNED = {n: rows[::-1] for n, rows in ROWS.items()}
OTHER = {n: tuple(f"x{row}" for row in rows) for n, rows in ROWS.items()}
MORE = {n: rows + rows for n, rows in ROWS.items()}
NOISE = {"change": {1: {"dense/bias": BIAS + 0.12}}}
FASTER = {step: {RATE: np.array(0.02)} for step in (0, 1)}
STARTED = {step: {"dense/kernel": KERNEL + 1} for step in (0, 1)}
GRADIENTS = {f"{GRADIENT_OF}dense/kernel": KERNEL, f"{GRADIENT_OF}dense/bias": BIAS + 1}


@pytest.mark.parametrize(
    ("one", "reordered", "several", "outcome", "cause"),
    [
        ({}, {"examples": OTHER}, {}, "same", ""),
        ({}, {"examples": OTHER}, {"examples": MORE}, "different", "generated or shuffled without a seed"),
        ({}, {}, {"examples": MORE}, "different", "A step has 6 examples on one worker and 12 on several"),
        ({}, {}, {"examples": TURNED}, "different", "same examples in a different order"),
        ({}, {}, {"examples": OTHER}, "different", "read different examples than one worker"),
        ({}, {}, {"change": FASTER}, "different", "0.01 on one worker and 0.02"),
        ({}, {"change": {0: {"dense/kernel": KERNEL + 1}}}, {}, "unclear", "initializes them without a seed"),
        ({}, {}, {"change": STARTED}, "different", "builds a different model"),
        ({}, {"noise": 0.5}, {"warnings": ["dropout draws"]}, "unclear", "dropout draws"),
        ({"warnings": ["both"]}, {}, {"noise": 0.5, "warnings": ["both", "new"]}, "different", "new"),
        ({}, {}, {"noise": 0.5, "sync": "LocalSGD(every=2)"}, "different", "sync=LocalSGD(every=2)"),
        ({}, {}, {"apart": {2: ("dense/kernel",)}}, "different", "values of dense/kernel after the step"),
        ({}, {}, {"apart": {0: ("dense/bias",)}}, "different", "start with different values of dense/bias"),
        ({}, {}, {"apart": {1: ("dense/bias", RATE)}}, "different", "The workers have different learning rates"),
        ({"settings": {"x": 1, "y": 2, "z": 3}}, {}, {"noise": 0.5, "settings": {"x": 1, "y": 4, "z": 3}}, "different",
         "y is 2 on one worker and 4 on several: it"),
        ({"settings": {"x": 1, "y": 2, "z": 3}}, {}, {"noise": 0.5, "settings": {"x": 1}}, "different",
         "The script builds a different model"),
        ({}, {}, {"noise": 1.0}, "different", "The change of the weights is 2 times"),
        ({}, {}, {"noise": 0.5, "logs": {1: {"loss": 0.95}}}, "different", "The loss is 0.5 times"),
        ({"change": {1: GRADIENTS}}, {}, {"change": {1: {name: 3 * a for name, a in GRADIENTS.items()}}},
         "different", "The gradient is 3 times"),
        ({"change": {1: GRADIENTS}}, {}, {"change": {1: {name: a + 1 for name, a in GRADIENTS.items()}}},
         "different", "each worker needs an equal share of the batch"),
        ({}, {}, {"noise": 0.5, "files": ("/a", "/b", "/c", "/d")}, "different", "write /a, /b, /c and 1 more: let"),
        ({}, {"noise": 0.5}, {}, "unclear", "the step draws random numbers"),
        ({}, NOISE, {"noise": 0.5}, "unclear", "dense/bias is trained by rounding"),
        ({}, {}, {"noise": 0.5}, "different", ""),
    ],
)  # fmt: skip
def test_causes(one: Any, reordered: Any, several: Any, outcome: str, cause: str) -> None:
    three = (recording(**one), recording(**{"noise": 1e-6} | reordered), recording(**several))
    steps = compare(*three)
    bad = next((step for step in steps if step.outcome != "same"), None)
    assert outcome == ("same" if bad is None else bad.outcome)
    if bad is not None:
        said = likely_causes(*three, bad)
        assert len(said) == bool(cause) and cause in "".join(said)


def test_a_file_of_several_workers_beside_the_data_that_differ() -> None:
    three = ONE, REORDERED, recording(examples=OTHER, files=("/data.npy",))
    data, file = likely_causes(*three, compare(*three)[1])
    assert "read different examples" in data and "Several workers write /data.npy" in file


def test_a_recording_comes_back(tmp_path: Path) -> None:
    half = np.arange(3, dtype=np.float32).astype(ml_dtypes.bfloat16)
    arrays = {"a/b": KERNEL, "file": half, "n": np.array(7)}
    write_facts(tmp_path, {"sync": None, "folder": tmp_path})
    for step in (0, 1):
        write_step(
            tmp_path, RecordedStep(step, ("a",) * step, {"loss": np.nan} if step else {}, arrays)
        )
    found = read_recording(tmp_path)
    assert found.facts == {"sync": None, "folder": str(tmp_path)}
    assert [(one.step, one.examples) for one in found.steps] == [(0, ()), (1, ("a",))]
    assert np.isnan(found.steps[1].logs["loss"])
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.steps[1].arrays[name], array.astype("float32"))
    assert read_recording(tmp_path / "absent") == Recording({}, [])


def test_what_the_ranks_hold_alike(tmp_path: Path) -> None:
    """Another order of sums on a GPU is no difference; an exchange of two values is, which has the same norm."""
    kernel, turned = RNG.normal(size=(4, 3)), np.array([2.0, 1.0])
    for step in (0, 1):
        write_step(tmp_path, RecordedStep(step, (), {}, {}))
    for rank, changed in enumerate((kernel, kernel * (1 + 1e-7))):
        bias = turned[:: 1 - 2 * rank]
        write_replicas(
            tmp_path, rank, 0, {"kernel": changed, "bias": turned, "rate": np.array(0.01)}
        )
        write_replicas(tmp_path, rank, 1, {"kernel": changed, "bias": bias, "n": np.array(rank)})
        write_files(tmp_path, rank, {"/both", f"/{rank}"})
    found = read_recording(tmp_path)
    assert [step.apart for step in found.steps] == [(), ("bias", "n")]
    assert found.files == ("/both",)


class Odd(keras.layers.Layer):
    def get_config(self) -> dict[str, Any]:
        raise ValueError("a stranger's")


def test_settings_and_warnings_of_models() -> None:
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.25, name="drop"), Odd()])
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(2, name="last")])
    adam = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1, beta_1=0.8))
    facts = facts_of([inner, model], [adam])
    assert facts["precision"] == "float32"
    half = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="mixed_float16")])
    assert facts_of([half], [])["precision"] == "float16"
    assert facts["settings"]["rate of layer 'drop'"] == 0.25
    assert facts["settings"]["units of layer 'last'"] == 2
    assert facts["settings"]["beta_1 of the optimizer"] == 0.8
    assert not [name for name in facts["settings"] if name.startswith("name of")]
    (warning,) = facts["warnings"]
    assert "'drop'" in warning


def share(rows: Any, *, examples: int | None = None, offset: int = 0) -> Share:
    data = (tf.constant(rows), {"label": tf.constant(rows)[:, :1]})
    return Share(data, len(rows) if examples is None else examples, 8, offset, None)


def test_an_example_has_one_digest_wherever_it_is() -> None:
    rows = RNG.normal(size=(5, 3)).astype("float32")
    whole = digests(share(rows))
    assert len(set(whole)) == 5
    assert digests(share(rows[2:4])) == whole[2:4]
    assert digests(turned_round(share(rows))) == whole[::-1]
    assert digests(share(rows[:1], examples=0)) == []
    words = Share((tf.constant(["a", "b"]), tf.ragged.constant([[1], [2, 3]])), 2, 2, 0, None)
    assert len(set(digests(words))) == 2


def test_a_batch_is_put_together_from_its_shares() -> None:
    """Two steps; ranks 1 and 2 hold parts of one model, rank 3 is idle in the second step."""
    first = [(0, ["a", "b"]), (0, ["e"])]
    second = [(2, ["c", "d"]), (1, ["f"])]
    idle = [(4, ["x"]), (2, [])]
    assert in_order([second, first, first, idle]) == ["a", "b", "c", "d", "x", "e", "f"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.touch()
    return path


def stand_in(monkeypatch: pytest.MonkeyPatch, runs: list[Recording]) -> list[list[str]]:
    """Let the three runs leave these recordings; returns their commands."""
    commands: list[list[str]] = []

    def run(argv: list[str], *, limit: float, environ: Mapping[str, str]) -> CompletedCommand:
        folder = Path(argv[argv.index("hvdtrain.verify.recorded_run") + 1])
        found = runs[len(commands)]
        commands.append(argv)
        write_facts(folder, found.facts)
        for step in found.steps:
            write_step(folder, step)
        return CompletedCommand(0, "", "", 0.0, 0.0)

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(bench_options, "installed_controllers", lambda: ("gloo",))
    return commands


def test_the_command(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = stand_in(monkeypatch, [ONE, REORDERED, recording(noise=2e-6)])
    words = ["verify", "-np", "3", "--steps", "4", "train.py", "--epochs", "2"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1].startswith("same: over 3 steps, 3 workers differ")
    for argv, order in zip(commands, ("forwards", "backwards", "forwards"), strict=True):
        assert argv[-6:] == ["4", order, "as-is", "train.py", "--epochs", "2"]
    assert ["-np" in argv for argv in commands] == [False, False, True]


@pytest.mark.parametrize("name", ["verify", "estimate"])
def test_a_mistyped_option_is_not_taken_for_the_script(script: Path, name: str) -> None:
    done = CliRunner().invoke(main, [name, "-np", "2", "--jsom", "train.py"])
    assert done.exit_code == 2
    assert "No such option '--jsom'. Did you mean '--json'?" in done.stderr


def test_a_difference_is_told_with_its_cause(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [ONE, REORDERED, recording({2: {RATE: np.array(0.02), "dense/kernel": KERNEL}})]
    stand_in(monkeypatch, runs)
    done = CliRunner().invoke(main, ["verify", "train.py"])
    assert done.exit_code == 1
    *_, first, kernel, rate, cause = done.stdout.splitlines()
    assert first == "different: from step 2 on"
    assert {kernel.split(":")[0], rate.split(":")[0]} == {"  dense/kernel", f"  {RATE}"}
    assert cause.startswith("likely cause: The learning rate is 0.01 on one worker and 0.02")
    stand_in(monkeypatch, runs)
    found = json.loads(CliRunner().invoke(main, ["verify", "--json", "train.py"]).stdout)
    assert (found["outcome"], found["step"], len(found["steps"])) == ("different", 2, 4)


def test_what_is_not_finite_is_null_in_json(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(
        monkeypatch,
        [
            ONE,
            REORDERED,
            recording({2: {"dense/bias": np.ones(3) * np.nan}}, logs={2: {"loss": np.nan}}),
        ],
    )
    done = CliRunner().invoke(main, ["verify", "--json", "train.py"])

    def refused(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    step = json.loads(done.stdout, parse_constant=refused)["steps"][2]
    assert step["loss"] == [1.8, None]
    assert {name for name, *_ in step["faults"]} == {"dense/bias", "loss"}


def test_another_number_of_steps(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = Recording({}, ONE.steps[:3])
    stand_in(monkeypatch, [ONE, REORDERED, short])
    done = CliRunner().invoke(main, ["verify", "train.py"])
    assert done.exit_code == 1
    assert "3 steps on one worker and 2 on several" in done.stdout


@pytest.mark.parametrize(
    ("code", "message"), [(3, "failed (exit code 3)"), (None, "took longer than 9 s")]
)
def test_a_run_that_fails(
    code: int | None, message: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = CompletedCommand(code, "", "the reason\n", 0.0, 0.0)
    monkeypatch.setattr(command, "run", lambda *args, **kwargs: ended)
    done = CliRunner().invoke(main, ["verify", "--timeout", "9", "train.py"])
    assert done.exit_code == 1
    assert f"The run on 1 worker {message}:\nthe reason" in done.output


def test_other_strategies_are_refused() -> None:
    from hvdtrain.errors import UsageError
    from hvdtrain.verify.step_recorder import RecordedSteps, Recorder

    loop: Any = SimpleNamespace(strategy=SimpleNamespace(name="tpu"))
    with pytest.raises(UsageError, match="strategy tpu cannot be verified"):
        RecordedSteps(loop, Recorder(Path(), 1, False))
