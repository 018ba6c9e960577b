"""JSON in pieces: what is made of many rows leaves as it is made, and holds up nobody else meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json

AT_ONCE = 200  # rows that one piece is made of: a millisecond or two, in which no other thread runs
FEW = 8  # a list that may hold long ones itself

T = TypeVar("T")


def batches(rows: Iterable[T]) -> Iterator[list[T]]:
    """``rows``, some at a time."""
    rest = iter(rows)
    while some := list(islice(rest, AT_ONCE)):
        yield some


def json_pieces(value: Any) -> Iterator[bytes]:
    """The JSON of a model, or of what one consists of."""
    if isinstance(value, BaseModel):
        yield from _members(_told(value))
    elif isinstance(value, dict) and len(value) > AT_ONCE:
        yield from listed((to_json(dict(some))[1:-1] for some in batches(value.items())), b"{", b"}")
    elif isinstance(value, list) and len(value) > AT_ONCE:
        yield from listed((to_json(some)[1:-1] for some in batches(value)), b"[", b"]")
    elif isinstance(value, list) and len(value) <= FEW and any(isinstance(item, BaseModel) for item in value):
        yield from separated(map(json_pieces, value), b"[", b"]")
    else:
        yield to_json(value)


def _told(model: BaseModel) -> Iterator[tuple[str, Any]]:
    """The fields of ``model`` but for those that it leaves out of its JSON."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if field.exclude_if is None or not field.exclude_if(value):
            yield name, value


def _members(members: Iterator[tuple[str, Any]]) -> Iterator[bytes]:
    def member(name: str, value: Any) -> Iterator[bytes]:
        yield to_json(name) + b":"
        yield from json_pieces(value)

    yield from separated((member(name, value) for name, value in members), b"{", b"}")


def separated(parts: Iterable[Iterator[bytes]], begin: bytes, end: bytes) -> Iterator[bytes]:
    """``parts`` with commas between and brackets around."""
    before = begin
    for part in parts:
        yield before
        yield from part
        before = b","
    yield end if before == b"," else begin + end


def listed(parts: Iterable[bytes], begin: bytes, end: bytes) -> Iterator[bytes]:
    """The same where each part is one piece."""
    return separated((iter((part,)) for part in parts), begin, end)
