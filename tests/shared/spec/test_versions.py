"""Which versions of the protocol peers share, what is left out for older ones, and what newer ones may add."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from promptfed.shared.messages import EnrolResponse
from promptfed.shared.spec.spec_section import left_out, newest_needed
from promptfed.shared.spec.versions import NEWEST, OLDEST, OURS, NoCommonVersion, Versions, tolerant, versions_of


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    known: int = 0
    later: Annotated[str | None, left_out(since=2)] = None


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    inner: Inner = Inner()
    number: int = 0


@pytest.mark.parametrize(
    ("header", "versions"),
    [(None, (1, 1)), ("", (1, 1)), ("two", (1, 1)), ("1-2", (1, 2)), ("3-17", (3, 17)), ("1-2-3", (1, 1))],
)
def test_a_header_tells_the_versions_of_a_peer(header: str | None, versions: tuple[int, int]) -> None:
    assert versions_of(header) == Versions(*versions)


def test_the_own_header_is_read_as_it_was_written() -> None:
    assert versions_of(str(OURS)) == OURS


@pytest.mark.parametrize("peer", [Versions(OLDEST, OLDEST), OURS, Versions(NEWEST, NEWEST + 5)])
def test_ranges_that_overlap_have_a_common_version(peer: Versions) -> None:
    peer.expect_common("the client", "this coordinator")


def test_who_is_too_old_and_who_is_too_new_is_named() -> None:
    with pytest.raises(NoCommonVersion, match=r"update the client to promptfed 0\.1\.0 or later"):
        Versions(0, 0).expect_common("the client", "this coordinator")
    with pytest.raises(NoCommonVersion, match=f"update this coordinator to a release that speaks version {NEWEST + 1}"):
        Versions(NEWEST + 1, NEWEST + 2).expect_common("the client", "this coordinator")


def test_a_message_to_an_older_peer_leaves_out_what_it_does_not_know() -> None:
    message = EnrolResponse(client_id="c", federation_id="f", name="n", release="0.2.0")
    with Versions(1, 1).addressed():
        assert "release" not in message.model_dump()
    with Versions(1, NEWEST + 3).addressed():
        assert message.model_dump()["release"] == "0.2.0"
    assert message.model_dump()["release"] == "0.2.0"


def test_the_newest_field_in_use_decides_which_client_is_needed() -> None:
    assert newest_needed(Outer()) == (1, "")
    assert newest_needed(Outer(inner=Inner(later="x"))) == (2, "inner.later")


def test_unknown_keys_are_ignored_of_newer_peers_alone() -> None:
    given = {"number": 3, "added": 1, "inner": {"known": 2, "added": [{}]}}
    assert tolerant(given, Outer.model_validate, Versions(1, NEWEST + 1)) == Outer(number=3, inner=Inner(known=2))
    for peer in (OURS, Versions(1, 1)):
        with pytest.raises(ValidationError, match="extra_forbidden"):
            tolerant(given, Outer.model_validate, peer)
    with pytest.raises(ValidationError, match="int_parsing"):
        tolerant(given | {"number": "many"}, Outer.model_validate, Versions(1, NEWEST + 1))
