"""How far a probe's parts may be from the whole, by the precision that the device computes in."""

from __future__ import annotations

import pytest
import tensorflow as tf

from hvdtrain.strategies import probe as probes


@pytest.mark.parametrize(
    ("gpus", "tf32", "dtype", "tolerance"),
    [
        (["GPU:0"], True, "float32", 3e-2),
        (["GPU:0"], False, "float32", 1e-3),
        ([], True, "float32", 1e-3),
        (["GPU:0"], True, "float64", 1e-3),
    ],
)
def test_tensor_float_32_has_the_tolerance_of_its_bits(
    gpus: list[str],
    tf32: bool,
    dtype: str,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: tf32)
    assert probes._tolerance(dtype) == tolerance
