"""Which address is asked, and what an answer is that is no success."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from promptfed.shared.calls import asked, one_line, read_answer
from promptfed.shared.service.addresses import Addresses
from promptfed.shared.service.digests import CONTENT, WHOLE, Damaged, field_of

PROBLEM = b'{"type": "urn:x/%s", "title": "t", "status": 400, "detail": "a\\nb"}'


@pytest.mark.parametrize(
    ("error", "following"),
    [(httpx.ConnectError("x"), "b"), (httpx.ReadTimeout("x"), "b"), (httpx.ReadError("x"), "a"), (KeyError("x"), "a")],
)
def test_behind_an_address_that_fails_the_next_comes_first(error: Exception, following: str) -> None:
    """And one that was silent is not asked again at once."""
    addresses = Addresses("a,b")
    with pytest.raises(type(error)), asked(addresses, (httpx.TransportError,)) as address:
        assert address == "a"
        raise error
    passing = isinstance(error, httpx.TransportError)
    assert (addresses.current, addresses.failed) == (("b", "a") if passing else ("a", "a,b"))
    with pytest.raises(httpx.ReadError), asked(addresses, (httpx.ReadError,)):
        raise httpx.ReadError("x")
    assert addresses.current == (following if passing else "b")


@pytest.mark.parametrize(("status", "content", "digest", "expected"), [
    (200, b"{}", b"{}", (True, None)), (200, b"{}", None, (False, None)),
    (200, b"{}", b"[]", "do not have their digest"), (404, PROBLEM % b"gone", None, (False, "gone")),
    (404, b"{}", None, (False, None)), (400, PROBLEM % b"digest-mismatch", None, "as something else: a b"),
    (400, PROBLEM % b"incomplete-body", None, "as something else: a b"),
    (200, PROBLEM % b"digest-mismatch", None, (False, None)),
])  # fmt: skip
def test_an_answer_is_proven_refused_or_damaged(
    status: int, content: bytes, digest: bytes | None, expected: Any
) -> None:
    response = httpx.Response(status, headers={CONTENT: field_of(digest)} if digest is not None else {})
    if isinstance(expected, str):
        with pytest.raises(Damaged, match=expected):
            read_answer(response, content)
        return
    proven, problem = read_answer(response, content)
    assert (proven, problem and problem.kind) == expected


def test_a_part_is_not_judged_by_the_digest_of_the_whole() -> None:
    of_the_whole = {WHOLE: field_of(b"the whole")}
    assert read_answer(httpx.Response(206, headers=of_the_whole), b"the") == (False, None)
    assert read_answer(httpx.Response(200, headers=of_the_whole), b"the whole") == (True, None)
    with pytest.raises(Damaged, match="the 3 bytes that arrived do not have their digest"):
        read_answer(httpx.Response(200, headers=of_the_whole), b"the")


def test_a_line_has_no_control_and_an_end() -> None:
    assert one_line("a\x1b[1m\n\n b") == "a [1m b"
    assert one_line("x" * 9, 4) == "xxxx"
    assert one_line(" " * 11 + "abc", 3) == "a", "four times as much is looked at"
