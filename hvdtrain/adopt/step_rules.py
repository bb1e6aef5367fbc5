"""How a step's results on the shares of a batch make its result on the whole batch, found from one trial of both.

A rule is "same" (each share has the result of the whole), "mean", "sum", or "rows" (those of one share after those of
another). Several may fit a trial: all of them fit what is 0 on every share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TOLERANCE = 1e-3
"""Relative to the largest value. Another order of sums makes 1e-5; a share that counts wrongly, 1e-1."""
ROUNDING = 1e-6
"""Of float32, of a variable that hardly changes, relative to its largest value."""


def output_rules(whole: np.ndarray, shares: Sequence[np.ndarray]) -> set[str]:
    """Return the rules that explain a result of a step.

    Args:
        whole: That of the whole batch, of any shape and dtype.
        shares: Those of the shares, in the order of ranks.
    """
    rules = set()
    if whole.ndim and all(share.shape[1:] == whole.shape[1:] for share in shares):
        rows = np.concatenate(shares)
        if rows.shape == whole.shape and _close(rows, whole, _largest(whole)):
            rules.add("rows")
    if any(share.shape != whole.shape for share in shares):
        return rules
    scale = _largest(whole)
    if all(_close(share, whole, scale) for share in shares):
        rules.add("same")
    return rules | _sums(whole, shares, scale)


def state_rules(before: np.ndarray, whole: np.ndarray, shares: Sequence[np.ndarray]) -> set[str]:
    """Return the rules that explain what a step has made of a variable.

    Args:
        before: Its value before the step.
        whole: Its value after the step on the whole batch.
        shares: Its values after the step on each share.
    """
    if whole.dtype.kind not in "iuf":
        same = all(np.array_equal(share, whole) for share in shares)
        return {"same"} if same else set()
    kind = np.float64 if whole.dtype.kind == "f" else np.int64
    before = before.astype(kind)
    change = whole.astype(kind) - before
    changes = [share.astype(kind) - before for share in shares]
    scale = max(map(_largest, (change, *changes))) + ROUNDING / TOLERANCE * _largest(before)
    rules = _sums(change, changes, scale)
    if all(_close(one, change, scale) for one in changes):
        rules.add("same")
    return rules


def chosen(rules: set[str], is_weight: bool) -> str | None:
    """Return the rule to go by; None if several differ.

    Args:
        rules: Those that fit.
        is_weight: Whether it follows from gradients, which are the same on all ranks.
    """
    if "sum" not in rules and {"same", "mean"} <= rules:
        # The mean is right for both: shares that were alike so far (no padding, all correct) may differ later.
        return "same" if is_weight else "mean"
    return next(iter(rules)) if len(rules) == 1 else None


def same_gradients(whole: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> bool:
    """Whether gradients are those of the whole batch. Small ones may differ by the rounding of the largest."""
    floor = ROUNDING / TOLERANCE * max(map(_largest, whole), default=0.0)
    return all(
        one.shape == other.shape and _close(one, other, _largest(one) + floor)
        for one, other in zip(whole, found, strict=True)
    )


def _sums(whole: np.ndarray, shares: Sequence[np.ndarray], scale: float) -> set[str]:
    if whole.dtype.kind not in "iuf":
        return set()
    total: np.ndarray = np.asarray(np.sum(shares, axis=0, dtype=np.float64))
    rules = {"sum"} if _close(total, whole, scale) else set()
    if whole.dtype.kind == "f" and _close(np.asarray(total / len(shares)), whole, scale):
        rules.add("mean")
    return rules


def _close(one: np.ndarray, other: np.ndarray, scale: float) -> bool:
    if other.dtype.kind != "f" or one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    return bool(np.allclose(one, other, rtol=0, atol=TOLERANCE * scale, equal_nan=True))


def _largest(array: np.ndarray) -> float:
    if array.dtype.kind not in "iuf":
        return 0.0
    finite = np.abs(array[np.isfinite(array)].astype(np.float64))
    return float(finite.max(initial=0.0))
