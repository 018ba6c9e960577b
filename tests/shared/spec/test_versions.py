"""Which version of the protocol a peer tells, and what it is told if that is another one."""

from __future__ import annotations

import pytest

from promptfed.shared.spec.section import VERSION, OtherVersion, expect_ours


@pytest.mark.parametrize("told", [None, str(VERSION)])
def test_the_own_version_is_taken_and_silence_is_not_judged(told: str | None) -> None:
    expect_ours(told, "the client", "this coordinator")


@pytest.mark.parametrize("told", ["", "1-2", "1-3", str(VERSION - 1), "x", "1-2-3", f" {VERSION}"])
def test_an_older_peer_is_to_be_updated(told: str) -> None:
    with pytest.raises(OtherVersion, match=r"update the client$"):
        expect_ours(told, "the client", "this coordinator")


@pytest.mark.parametrize("told", [str(VERSION + 1), f"1-{VERSION + 1}"])
def test_a_newer_peer_is_ahead_of_this_side(told: str) -> None:
    with pytest.raises(OtherVersion, match=rf"speaks version {VERSION + 1} .*: update this coordinator$"):
        expect_ours(told, "the client", "this coordinator")
