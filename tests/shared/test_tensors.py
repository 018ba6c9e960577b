"""Tensors on the wire: what comes back is what went in, and what cannot be right is named."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from promptfed.shared.tensors import TensorError, TensorSpec, norm
from promptfed.shared.tensors.memory import in_parts
from promptfed.shared.tensors.torch_tensors import check, decode, decode_place, encode, state_hash

GOOD = {"context": torch.arange(6, dtype=torch.float32).reshape(2, 3), "bias": torch.zeros(0, 4)}
EXPECTED = {"context": ((2, 3), "float32")}
LETTERS = list("qwertyuiop")


def test_encode_and_decode_agree() -> None:
    body = encode(GOOD, {"task_id": "t", "metrics": {"loss": 0.5}})
    tensors, metadata = decode(body)
    assert metadata == {"task_id": "t", "metrics": {"loss": 0.5}}
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "context": [[0, 1, 2], [3, 4, 5]],
        "bias": [],
    }
    assert body == encode(dict(reversed(GOOD.items())), {"metrics": {"loss": 0.5}, "task_id": "t"})


def test_tensors_are_read_in_order_of_name(tmp_path: Path) -> None:
    """The noise of a protected task is drawn for them in order."""
    body = encode({name: torch.zeros(2) for name in LETTERS})
    (tmp_path / "body").write_bytes(body)
    for read, place in ((decode, body), (decode_place, tmp_path / "body")):
        assert list(read(place)[0]) == sorted(LETTERS)


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
        state_hash({"a": base}), state_hash({"b": base}), state_hash({"a": base.reshape(3, 2)}),
        state_hash({"a": base.long()}), state_hash({"a": base + 1e-6}), state_hash({}),
    }  # fmt: skip
    assert len(hashes) == 6
    assert state_hash({"a": base.T.contiguous().T}) == state_hash({"a": base})


WRONG = [
    ({}, "missing-tensor", "'context' is missing"),
    ({"context": torch.zeros(2, 3), "more": torch.zeros(1)}, "unknown-tensor", "'more'"),
    ({"context": torch.zeros(3, 2)}, "wrong-shape", r"\(3, 2\)"),
    ({"context": torch.zeros(2, 3, dtype=torch.float64)}, "wrong-dtype", "float64"),
    ({"context": torch.full((2, 3), float("nan"))}, "not-finite", "NaN"),
    ({"context": torch.full((2, 3), float("inf"))}, "not-finite", "infinity"),
]


@pytest.mark.parametrize(("tensors", "kind", "says"), WRONG)
def test_check_names_what_is_wrong(tensors: dict[str, torch.Tensor], kind: str, says: str) -> None:
    with pytest.raises(TensorError, match=says) as caught:
        check(tensors, EXPECTED)
    assert caught.value.kind == kind


FLOATS = dict.fromkeys(LETTERS, ((2,), "float32"))
ALL_WRONG: list[tuple[str, Any, Any, str]] = [
    ("unknown-tensor", torch.zeros(2), {}, "was not asked for; expected tensors: none"),
    ("missing-tensor", None, FLOATS, "is missing; expected tensors: e, i, o, p, q, r, t, u, w, y"),
    ("wrong-shape", torch.zeros(1), FLOATS, "has shape (1,); expected (2,)"),
    ("wrong-dtype", torch.zeros(2, dtype=torch.float64), FLOATS, "is float64; float32 was asked for"),
    ("not-finite", torch.full((2,), math.inf), FLOATS, "holds NaN or infinity"),
]


@pytest.mark.parametrize(("kind", "each", "expected", "says"), ALL_WRONG)
def test_of_several_wrong_tensors_the_first_by_name_is_named(kind: str, each: Any, expected: Any, says: str) -> None:
    with pytest.raises(TensorError, match=re.escape(f"tensor 'e' {says}") + "$") as caught:
        check({} if each is None else dict.fromkeys(LETTERS, each), expected)
    assert caught.value.kind == kind


AWKWARD = (0.0, -0.0, 1.0, -3.4e38, 3.4e38, 1e-45, float("nan"), float("inf"), -float("inf"))


@given(st.lists(st.sampled_from(AWKWARD), max_size=8), st.sampled_from([0, 1, (1 << 14) - 1, 1 << 14, (1 << 14) + 1]))
def test_the_norm_tells_what_a_look_at_each_entry_tells(values: list[float], before: int) -> None:
    tensor = torch.cat([torch.full((before,), 3.4e38), torch.tensor(values, dtype=torch.float32)])
    expected = {"context": ((len(tensor),), "float32"), "labels": ((2,), "int64")}
    tensors = {"context": tensor, "labels": torch.tensor([2**63 - 1, -(2**63)])}
    if bool(torch.isfinite(tensor).all()):
        size = check(tensors, expected)
        assert size == norm(tensors)
        assert math.isfinite(size)
        return
    with pytest.raises(TensorError, match="'context' holds NaN or infinity") as caught:
        check(tensors, expected)
    assert caught.value.kind == "not-finite"


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


NO_SAFETENSORS = [
    (b"", "not-safetensors"), (b"\x80\x04pickle..", "not-safetensors"), (encode(GOOD)[:-3], "not-safetensors"),
    (encode(GOOD) + b"tail", "not-safetensors"), (raw(b"not json"), "not-safetensors"),
    (raw([1, 2]), "not-safetensors"),
    (raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "not-safetensors"),
    (raw({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "not-safetensors"),
    (raw({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)), "not-safetensors"),
    (raw(b"[" * 5000 + b"]" * 5000), "not-safetensors"), (raw(b" " * 1_000_001), "header-too-large"),
    (raw(b" " * 1_000_000), "not-safetensors"),
    (raw({"__metadata__": {"promptfed": "{"}}), "bad-metadata"),
    (raw({"__metadata__": {"other": "{}"}}), "bad-metadata"),
    (raw({"__metadata__": {"promptfed": 3}}), "bad-metadata"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "kind"), NO_SAFETENSORS)
def test_decode_refuses_what_is_not_safetensors(body: bytes, kind: str, tmp_path: Path) -> None:
    with pytest.raises(TensorError) as caught:
        decode(body)
    assert caught.value.kind == kind
    assert from_file(body, tmp_path / "body") == kind


@pytest.mark.parametrize(("size", "words"), [(7, "shorter than its length field"), (8, "its header is cut off")])
def test_what_is_cut_off_is_said(size: int, words: str) -> None:
    with pytest.raises(TensorError, match=words):
        decode(encode(GOOD)[:size])


def told(tensors: dict[str, torch.Tensor], metadata: object) -> str:
    return repr(({name: (one.dtype, one.tolist()) for name, one in sorted(tensors.items())}, metadata))


def from_bytes(body: bytes) -> str:
    """What ``decode`` says: the kind of its refusal, or all that it found."""
    try:
        return told(*decode(body))
    except TensorError as error:
        return error.kind


def from_file(body: bytes, path: Path) -> str:
    """The same of ``decode_place``."""
    path.write_bytes(body)
    try:
        return told(*decode_place(path))
    except TensorError as error:
        return error.kind


@pytest.mark.parametrize("spaces", range(8))
def test_a_file_s_tensors_are_those_of_its_bytes_wherever_they_begin(spaces: int, tmp_path: Path) -> None:
    values = torch.linspace(-1, 1, 40_000).reshape(200, 200)
    header = {"context": {"dtype": "F32", "shape": [200, 200], "data_offsets": [0, 160_000]}}
    body = raw(json.dumps(header).encode() + b" " * spaces, values.numpy().tobytes())
    (tmp_path / "body").write_bytes(body)
    tensors, metadata = decode_place(tmp_path / "body")
    (tmp_path / "body").unlink()
    assert metadata is None
    assert torch.equal(tensors["context"], values)
    assert state_hash(tensors) == state_hash(decode(body)[0])
    assert norm(tensors) == pytest.approx(float(values.double().norm()), rel=1e-12)
    check(tensors, {"context": ((200, 200), "float32")})


@given(st.binary(max_size=200), st.integers(0, 200))
def test_decode_never_breaks_on_mutations(noise: bytes, position: int) -> None:
    body = encode(GOOD, {"task_id": "t"})
    for attempt in (noise, body[:position] + noise + body[position + len(noise) :]):
        with contextlib.suppress(TensorError):  # any other exception fails the test
            tensors, _ = decode(attempt)
            check(tensors, EXPECTED)
        with tempfile.TemporaryDirectory() as folder:
            assert from_file(attempt, Path(folder) / "body") == from_bytes(attempt)


@pytest.mark.parametrize(("room", "asked"), [(9, [5]), (2, [5, 2]), (1, [5, 2, 1]), (0, [5, 2, 1])])
def test_half_as_much_is_computed_at_once_until_it_fits(room: int, asked: list[int]) -> None:
    tried, told = list[int](), list[int]()

    def compute(at_once: int) -> int:
        tried.append(at_once)
        if at_once > room:
            raise torch.OutOfMemoryError("no room")
        return 10 * at_once

    with pytest.raises(TensorError, match="too large") if not room else contextlib.nullcontext():
        assert in_parts(compute, 5, told.append, TensorError("too-large", "it is too large")) == 10 * asked[-1]
    assert (tried, told) == (asked, asked[1:])


def test_specs_resolve_symbols_and_norm_is_over_all() -> None:
    assert TensorSpec("a", ("K", 2, "d_t")).resolve({"K": 3, "d_t": 8}) == (3, 2, 8)
    assert norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}) == pytest.approx(5.0)


def test_a_header_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    """Readers differ in which of the two they take."""
    one = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    other = b'{"dtype":"F32","shape":[1],"data_offsets":[4,8]}'
    inner = b'{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    for header in (b'{"a":' + one + b',"a":' + other + b"}", b'{"a":' + inner + b"}"):
        body = struct.pack("<Q", len(header)) + header + b"\0" * 8
        path = tmp_path / "body"
        path.write_bytes(body)
        for read in (lambda: decode(body), lambda: decode_place(path)):  # noqa: B023 (called at once)
            with pytest.raises(TensorError) as caught:
                read()
            assert caught.value.kind == "not-safetensors"
            assert "twice" in str(caught.value)
