"""JSON in pieces: long answers are sent while they are made, and do not block other threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json

AT_ONCE = 200  # rows of one piece, which take a millisecond or two in which no other thread runs
FEW = 8  # items of a list whose items may be long themselves

T = TypeVar("T")


def batches(rows: Iterable[T]) -> Iterator[list[T]]:
    """``rows`` in lists of at most ``AT_ONCE``."""
    rest = iter(rows)
    while some := list(islice(rest, AT_ONCE)):
        yield some


def json_pieces(value: Any) -> Iterator[bytes]:
    """The JSON of a model, or of a part of one."""
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
    """The fields of ``model`` that its JSON includes."""
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
    """``parts`` separated by commas, between ``begin`` and ``end``."""
    before = begin
    for part in parts:
        yield before
        yield from part
        before = b","
    yield end if before == b"," else begin + end


def listed(parts: Iterable[bytes], begin: bytes, end: bytes) -> Iterator[bytes]:
    """The same for parts of one piece each."""
    return separated((iter((part,)) for part in parts), begin, end)
