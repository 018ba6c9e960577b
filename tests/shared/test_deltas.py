"""Differences between bodies: exact, smaller for near states, and of hostile ones nothing but an error."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from promptfed.shared.tensors import decode, deltas, encode
from promptfed.shared.tensors.compression import rounded, unrounded
from promptfed.shared.tensors.deltas import applied, difference


def states(count: int = 50_000, change: float = 1e-3) -> tuple[bytes, bytes]:
    """Two bodies, of which the second's numbers differ by a small part."""
    rng = np.random.default_rng(3)
    one = rng.standard_normal(count).astype(np.float32)
    two = one * (1 + change * rng.standard_normal(count)).astype(np.float32)
    return encode({"context": one}), encode({"context": two})


@pytest.mark.parametrize("part", [1 << 10, 4099, deltas.PART])
@pytest.mark.parametrize("cut", [0, 3])
def test_what_is_applied_is_the_body_bit_for_bit(
    part: int, cut: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deltas, "PART", part)
    base, body = (state[: len(state) - cut] for state in states())
    delta = b"".join(difference(body, base))
    assert b"".join(applied([delta], base)) == body
    assert b"".join(applied((delta[at : at + 100] for at in range(0, len(delta), 100)), base)) == body
    first, second = tmp_path / "base", tmp_path / "body"
    first.write_bytes(base)
    second.write_bytes(body)
    assert b"".join(difference(second, first)) == delta
    assert b"".join(applied([delta], first)) == body


def test_near_states_have_small_differences() -> None:
    base, body = states(change=1e-3)
    assert len(b"".join(difference(body, base))) < 0.65 * len(body)
    assert len(b"".join(difference(base, base))) < 0.01 * len(body)


def test_what_is_no_difference_is_an_error() -> None:
    base, body = states(1000)
    delta = b"".join(difference(body, base))
    with pytest.raises(ValueError, match="no difference"):
        list(difference(body, base[:-4]))
    for broken in (delta[:-9], b"", b"none of zlib", zlib.compress(bytes(len(base) - 4))):
        with pytest.raises(ValueError, match="the difference is"):
            list(applied([broken], base))


def test_a_bomb_ends_at_the_body_s_length() -> None:
    base, _ = states(1000)
    made = 0
    with pytest.raises(ValueError, match=r"longer than the body|not whole"):
        for part in applied([zlib.compress(bytes(100 << 20), 9)], base):
            made += len(part)
    assert made <= len(base)


def test_a_rounded_payload_has_half_the_bytes_and_two_to_three_digits(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    state = {"context": rng.standard_normal((40, 512)).astype(np.float32), "count": np.arange(5)}
    body = encode(rounded(state))
    assert len(body) < 0.51 * len(encode(state))
    file = tmp_path / "payload"
    file.write_bytes(body)
    made = unrounded(body)
    path = unrounded(file)
    assert isinstance(path, Path)
    assert path.read_bytes() == made
    back = decode(made)[0]
    assert back["context"].dtype == np.float32
    assert np.array_equal(back["count"], state["count"])
    assert float(np.abs(back["context"] / state["context"] - 1).max()) <= 2**-8
