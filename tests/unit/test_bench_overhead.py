"""What `hvdtrain bench overhead` and `bench checkpoints` time: neighbouring epochs, on the same examples."""

import itertools
import time
from typing import Any

import keras
import pytest
from click.testing import CliRunner

from hvdtrain.bench import networks, torch_peer
from hvdtrain.bench.checkpoint_cost import PAIRS, _saves, _steps
from hvdtrain.bench.measurement import Comparison
from hvdtrain.bench.networks import MODELS, TOKENS, VOCABULARY, examples
from hvdtrain.bench.overhead import EPOCHS, dataset, seconds_of_step
from hvdtrain.cli import bench_costs, bench_options
from hvdtrain.cli.bench import bench


def tiny() -> keras.Model:
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(10)])


def test_a_dataset_holds_the_same_examples_as_the_arrays():
    x, y = examples(tiny(), 12, seed=0)
    batches = [(a.numpy(), b.numpy()) for a, b in dataset((x, y), 5)]
    assert [len(b) for _, b in batches] == [5, 5, 2]
    rows = {(*a.tolist(), int(b)) for xs, ys in batches for a, b in zip(xs, ys, strict=True)}
    assert rows == {(*a.tolist(), int(b)) for a, b in zip(x, y, strict=True)}


def test_the_first_epoch_is_not_timed():
    slow = 0.3

    def fit(callbacks: list[keras.callbacks.Callback], **_: object) -> None:
        for epoch in range(1 + EPOCHS):
            callbacks[0].on_epoch_begin(epoch, {})
            time.sleep(0.01 if epoch else slow)
        callbacks[0].on_train_end({})

    assert 0.01 / 4 <= seconds_of_step(fit, {}, steps=4) < slow / 4


PARAMETERS = {
    "mlp": 22_609_930,
    "mlp-100m": 102_340_618,
    "resnet50": 23_608_202,
    "transformer": 11_286_400,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_networks_have_the_parameters_that_they_say(name: str) -> None:
    keras.backend.clear_session()
    assert MODELS[name]().count_params() == PARAMETERS[name]
    assert f"{PARAMETERS[name]:,} parameters" in str(
        getattr(networks, name.replace("-", "")).__doc__
    )


def test_a_transformer_predicts_the_next_token() -> None:
    keras.backend.clear_session()
    model = MODELS["transformer"]()
    x, y = examples(model, 2, seed=0)
    assert x.shape == y.shape == (2, TOKENS) and x.max() < VOCABULARY
    assert (x[:, 1:] == y[:, :-1]).all()
    assert model.output_shape == (None, TOKENS, VOCABULARY)
    # No token sees those after it.
    other = x.copy()
    other[:, 10:] = 0
    before, after = (model.predict(tokens, verbose=0) for tokens in (x, other))
    assert abs(before - after)[:, :10].max() < 1e-5 < abs(before - after)[:, 10:].max()


def test_pytorch_has_the_same_tokens() -> None:
    assert (torch_peer.TOKENS, torch_peer.VOCABULARY) == (TOKENS, VOCABULARY)


@pytest.mark.parametrize("flags", [["--adopt"], []])
def test_the_command_that_repeats_it(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(*args: Any) -> list[Comparison]:
        asked.append(args[-1])
        return [Comparison(2.0, 1.0)]

    monkeypatch.setattr(bench_costs, "measure_overhead", measure)
    monkeypatch.setattr(bench_options, "installed_controllers", lambda: ("mpi",))
    words = ["overhead", "--model", "mnist", "--data", "arrays", *flags]
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    assert asked == [bool(flags)]
    (again,) = (line for line in done.output.splitlines() if line.startswith("to repeat: "))
    given = again.removeprefix("to repeat: bench ").split()
    assert ("--adopt" in given) == bool(flags) and "True" not in given
    assert CliRunner().invoke(bench, given).exit_code == 0
    assert "ratio 0.500" in done.output


def test_a_checkpoint_costs_what_epochs_with_one_take_longer_than_their_neighbours() -> None:
    """Epochs become slower and slower, which is no cost of checkpoints: each with one takes 1.1 times as long."""
    seconds = [
        (1 + number / 100) * (1.1 if _saves(1 + number) else 1) for number in range(2 * PAIRS)
    ]
    times = [0.0, *itertools.accumulate(seconds, initial=7.0)]
    without, saving = _steps(times, every=50)
    assert without == pytest.approx(1.115 / 50, rel=0.02)
    # Pairs begin with either kind, so half of them show a little more, and half a little less.
    assert saving / without == pytest.approx(1.1, rel=0.002)
