"""Which of several coordinators a caller asks next."""

from __future__ import annotations

import pytest

from promptfed.shared.service import net
from promptfed.shared.service.net import AddressBook, origin_for

A, B, C = "https://a.example", "https://b.example", "https://c.example"


def test_addresses_are_separated_by_commas_and_tried_in_turn() -> None:
    book = AddressBook(f" {A}/, {B},{A}")
    assert book.all == [A, B]
    assert book.several
    assert book.current == A
    book.move_on()
    assert book.current == B
    book.move_on()
    assert book.current == A
    assert not AddressBook(A).several


def test_who_was_silent_comes_last_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(net.time, "monotonic", lambda: now)
    book = AddressBook(f"{A},{B},{C}")
    book.note_silent(A)
    book.note_silent(B)
    for _ in range(2):
        book.move_on()
        assert book.current == C
    now += net.GONE_SECONDS
    assert not book.is_silent(A)
    book.move_on()
    assert book.current == A


def test_told_addresses_replace_each_other_and_leave_the_given_ones() -> None:
    changes: list[list[str]] = []
    book = AddressBook(A)
    book.changed = changes.append
    book.read(f"{A}, {B}")
    book.read(f"{A}, {B}")
    assert book.all == [A, B]
    book.read(f"{A}, {C}")
    book.read(None)
    book.read("")
    assert book.all == [A, C]
    assert changes == [[A, B], [A, C]]


@pytest.mark.parametrize(
    ("given", "told", "used"),
    [
        (A, "http://b.example", None),
        (f"http://10.0.0.1,{A}", "http://b.example", None),
        ("http://10.0.0.1", "http://10.0.0.2:8080", "http://10.0.0.2:8080"),
        ("http://10.0.0.1", B, B),
        ("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:2"),
        ("http://127.0.0.1:1", "http://b.example", None),
        (A, "https://user@b.example", None),
        (A, "https://b.example:port", None),
        (A, "file:///etc/passwd", None),
        (A, "b.example", None),
        (A, "https://b.example/other/path?query", B),
        (A, f"https://{'b' * 300}.example", None),
    ],
)
def test_a_told_address_is_as_well_protected_as_the_given_ones(given: str, told: str, used: str | None) -> None:
    book = AddressBook(given)
    book.read(told)
    assert book.all == [*given.split(","), *([used] if used is not None else [])]
    assert used is None or origin_for(given, told) == used


def test_only_so_many_are_used_and_none_that_is_not_allowed() -> None:
    book = AddressBook(A)
    book.allowed = lambda origin: origin != B
    book.read(",".join([B, *(f"https://{number}.example" for number in range(1000))]))
    assert len(book.all) == net.MOST_ADDRESSES
    assert B not in book.all
