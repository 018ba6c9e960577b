"""Tensors on the wire: what comes back is what went in, and what cannot be right is named."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.tensors import TensorError, TensorSpec, check, decode, encode, norm, state_hash

GOOD = {"context": torch.arange(6, dtype=torch.float32).reshape(2, 3), "bias": torch.zeros(0, 4)}
EXPECTED = {"context": ((2, 3), "float32")}


def test_encode_and_decode_agree() -> None:
    body = encode(GOOD, {"task_id": "t", "metrics": {"loss": 0.5}})
    tensors, metadata = decode(body)
    assert metadata == {"task_id": "t", "metrics": {"loss": 0.5}}
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "context": [[0, 1, 2], [3, 4, 5]],
        "bias": [],
    }
    assert body == encode(dict(reversed(GOOD.items())), {"metrics": {"loss": 0.5}, "task_id": "t"})


def test_no_tensor_at_all_travels_too() -> None:
    assert decode(encode({}, {"task_id": "t"})) == ({}, {"task_id": "t"})


def test_state_hash_is_the_stated_one() -> None:
    tensor = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    literal = hashlib.sha256()
    for name, value in [("a", [7.0]), ("context", [1.0, -2.0, 0.5, 3.0])]:
        shape = "1" if name == "a" else "2,2"
        literal.update(f"{name}|float32|{shape}|".encode() + b"".join(struct.pack("<f", x) for x in value))
    assert state_hash({"context": tensor, "a": torch.tensor([7.0])}) == "sha256:" + literal.hexdigest()


def test_state_hash_sees_names_shapes_dtypes_and_values_but_not_strides() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    hashes = {
        state_hash({"a": base}),
        state_hash({"b": base}),
        state_hash({"a": base.reshape(3, 2)}),
        state_hash({"a": base.long()}),
        state_hash({"a": base + 1e-6}),
        state_hash({}),
    }
    assert len(hashes) == 6
    assert state_hash({"a": base.T.contiguous().T}) == state_hash({"a": base})


@pytest.mark.parametrize(
    ("tensors", "kind", "says"),
    [
        ({}, "missing-tensor", "'context' is missing"),
        ({"context": torch.zeros(2, 3), "more": torch.zeros(1)}, "unknown-tensor", "'more'"),
        ({"context": torch.zeros(3, 2)}, "wrong-shape", r"\(3, 2\)"),
        ({"context": torch.zeros(2, 3, dtype=torch.float64)}, "wrong-dtype", "float64"),
        ({"context": torch.full((2, 3), float("nan"))}, "not-finite", "NaN"),
        ({"context": torch.full((2, 3), float("inf"))}, "not-finite", "infinity"),
    ],
)
def test_check_names_what_is_wrong(tensors: dict[str, torch.Tensor], kind: str, says: str) -> None:
    with pytest.raises(TensorError, match=says) as caught:
        check(tensors, EXPECTED)
    assert caught.value.kind == kind


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "not-safetensors"),
        (b"\x80\x04pickle..", "not-safetensors"),
        (encode(GOOD)[:-3], "not-safetensors"),
        (encode(GOOD) + b"tail", "not-safetensors"),
        (raw(b"not json"), "not-safetensors"),
        (raw([1, 2]), "not-safetensors"),
        (raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "not-safetensors"),
        (raw({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "not-safetensors"),
        (raw({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)), "not-safetensors"),
        (raw(b"[" * 5000 + b"]" * 5000), "not-safetensors"),
        (raw(b" " * 1_000_001), "header-too-large"),
        (raw({"__metadata__": {"promptfed": "{"}}), "bad-metadata"),
        (raw({"__metadata__": {"other": "{}"}}), "bad-metadata"),
        (raw({"__metadata__": {"promptfed": 3}}), "bad-metadata"),
    ],
)
def test_decode_refuses_what_is_not_safetensors(body: bytes, kind: str) -> None:
    with pytest.raises(TensorError) as caught:
        decode(body)
    assert caught.value.kind == kind


@given(st.binary(max_size=200), st.integers(0, 200))
def test_decode_never_breaks_on_mutations(noise: bytes, position: int) -> None:
    body = encode(GOOD, {"task_id": "t"})
    for attempt in (noise, body[:position] + noise + body[position + len(noise) :]):
        with contextlib.suppress(TensorError):  # any other exception fails the test
            tensors, _ = decode(attempt)
            check(tensors, EXPECTED)


def test_specs_resolve_symbols_and_norm_is_over_all() -> None:
    assert TensorSpec("a", ("K", 2, "d_t")).resolve({"K": 3, "d_t": 8}) == (3, 2, 8)
    assert norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}) == pytest.approx(5.0)
