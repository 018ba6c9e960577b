"""Compressed changes: rounding without bias, sizes, and hostile payloads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from pydantic import ValidationError

from promptfed.shared.spec.sections import CompressionSpec
from promptfed.shared.tensors import TensorError, decode, encode
from promptfed.shared.tensors.compression import added, compressed, decompressed, subtracted

KINDS = ["bf16", "int8"]
Arrays = dict[str, np.ndarray]


def change(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    sizes = {"context": (4, 512), "odd": (3, 7, 61), "one": (1,), "none": (0, 5)}
    scaled = {name: rng.standard_normal(size) * 10.0 ** rng.integers(-3, 2) for name, size in sizes.items()}
    made = {name: array.astype(np.float32) for name, array in scaled.items()}
    return made | {"still": np.zeros((2, 3), np.float32), "count": np.arange(6)}


def expected(of: Arrays) -> dict[str, Any]:
    return {name: (array.shape, array.dtype.name) for name, array in of.items()}


def received(of: Arrays, up: str, seed: int) -> Arrays:
    body = encode(compressed(of, up, np.random.default_rng(seed)))
    return decompressed(decode(body)[0], expected(of), up)


@pytest.mark.parametrize("up", ["bf16", "int8"])
def test_rounding_is_unbiased_and_no_error_is_larger_than_a_step(up: str) -> None:
    given, draws = change(), 400
    told = [received(given, up, seed) for seed in range(draws)]
    for name in ("context", "odd", "one"):
        exact = given[name].astype(np.float64)
        errors = np.stack([one[name] - exact for one in told])
        step = np.abs(exact) * 2.0**-7 if up == "bf16" else np.full_like(exact, np.abs(exact).max() / 127)
        assert (np.abs(errors) <= step * (1 + 1e-3) + 1e-30).all()
        # The mean of 400 draws: at most half a step is a draw's standard deviation, here with five of them.
        assert (np.abs(errors.mean(axis=0)) <= 5 * step / 2 / np.sqrt(draws) + 1e-30).all()
        assert abs(errors.mean()) <= 5 * np.sqrt((step**2).sum() / 4 / draws) / exact.size + 1e-30
    assert all((one["still"] == 0).all() and (one["count"] == given["count"]).all() for one in told)


@pytest.mark.parametrize("up", KINDS)
def test_the_same_draws_give_the_same_bytes(up: str) -> None:
    bodies = [encode(compressed(change(), up, np.random.default_rng(seed))) for seed in (1, 1, 2)]
    assert bodies[0] == bodies[1]
    assert bodies[0] != bodies[2]


@pytest.mark.parametrize("before", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("own", ["float32", "int64"])
def test_only_floats_of_floats_are_told_as_changes(own: str, before: str) -> None:
    update, payload = (
        {"v": np.full(3, 5, own)},
        {"v": np.full(3, 2, ml_dtypes.bfloat16 if before == "bfloat16" else before)},
    )
    told = subtracted(update, payload)["v"].astype(float).tolist()
    assert told == ([3.0] * 3 if own == "float32" and before != "int64" else [5.0] * 3)
    assert added(subtracted(update, payload), payload)["v"].tolist() == [5] * 3


def test_updates_and_changes_are_inverse() -> None:
    payload = {"context": np.ones((2, 2), np.float32), "other": np.ones((3,), np.float32)}
    update = {
        "context": np.full((2, 2), 3, np.float32),
        "other": np.full((4,), 3, np.float32),
        "change.w": np.full((2,), 5, np.float32),
    }
    changes = subtracted(update, payload | {"change.w": np.ones((2,), np.float32)})
    assert {name: float(one.flat[0]) for name, one in changes.items()} == {"context": 2, "other": 3, "change.w": 5}
    back = added(changes, payload)
    assert all((back[name] == update[name]).all() for name in update)


def hostile(up: str, name: str, value: Any) -> str:
    given = {"w": np.linspace(-1, 1, 3000, dtype=np.float32)}
    sent = compressed(given, up, np.random.default_rng(0))
    if value is None:
        del sent[name]
    else:
        sent[name] = value
    with pytest.raises(TensorError) as error:
        decompressed(sent, expected(given), up)
    return f"{error.value.kind}: {error.value}"


NAN = float("nan")


HOSTILE = [
    ("int8", "w", np.zeros(2999, np.int8), "wrong-shape: tensor 'w' has shape (2999,); expected (3000,)"),
    ("int8", "w", np.zeros(3000, np.float32), "wrong-dtype: tensor 'w' is float32; int8 was asked for"),
    ("int8", "w#scale", np.array([1, NAN, 1], np.float32), "not-finite: tensor 'w#scale' holds NaN"),
    ("int8", "w#scale", np.array([1, np.inf, 1], np.float32), "not-finite: tensor 'w#scale' holds NaN"),
    ("int8", "w#scale", np.array([1, -1, 1], np.float32), "not-finite: tensor 'w#scale' holds a negative"),
    ("int8", "w#scale", np.ones(4, np.float32), "wrong-shape: tensor 'w#scale' has shape (4,); expected (3,)"),
    ("int8", "w#scale", None, "missing-tensor: tensor 'w#scale' is missing"),
    ("int8", "x", np.ones(4, np.float32), "unknown-tensor: tensor 'x' was not asked for"),
    ("bf16", "w", np.full(3000, NAN, ml_dtypes.bfloat16), "not-finite: tensor 'w' holds NaN"),
    ("bf16", "w", np.zeros(3000, np.float32), "wrong-dtype: tensor 'w' is float32; bfloat16 was asked for"),
]


@pytest.mark.parametrize(("up", "name", "value", "why"), HOSTILE)
def test_hostile_changes_are_refused_with_the_reason(up: str, name: str, value: Any, why: str) -> None:
    assert why in hostile(up, name, value)


def test_the_largest_floats_stay_finite() -> None:
    given = {"w": np.array([np.finfo(np.float32).max, -np.finfo(np.float32).max, 1e-45], np.float32)}
    told = [received(given, "bf16", seed)["w"] for seed in range(20)]
    assert np.isfinite(told).all()


def test_what_rounds_beyond_the_largest_level_stays_there() -> None:
    """Some numbers are more than 127 of their 127th parts in float32, and draws of zero round each of them up."""
    tried = np.linspace(1, 2, 4096, dtype=np.float32)
    above = tried[tried / (tried / np.float32(127)) > 127][:3]
    assert len(above) == 3
    given = np.zeros((3, 1024), np.float32)
    given[:, 0] = above
    zeros: Any = SimpleNamespace(random=lambda shape, dtype: np.zeros(shape, dtype))
    told = decompressed(compressed({"w": given}, "int8", zeros), expected({"w": given}), "int8")["w"]
    assert told == pytest.approx(given, rel=1e-6)


def test_only_known_encodings_are_taken() -> None:
    assert [CompressionSpec.model_validate({"up": up}).up for up in ("none", "bf16", "int8")]
    for up in ("int4", "topk(0.1)"):
        with pytest.raises(ValidationError, match="'none', 'bf16' or 'int8'"):
            CompressionSpec.model_validate({"up": up})
