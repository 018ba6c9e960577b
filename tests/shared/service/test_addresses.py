"""Which of several coordinators a caller asks next."""

from __future__ import annotations

import base64
import hashlib
import json
import string
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from promptfed.shared.service import addresses
from promptfed.shared.service.addresses import Addresses
from promptfed.shared.service.invitation import DAMAGED, Invitation, InvitationError, decode

A, B, C = "https://a.example", "https://b.example", "https://c.example"


def test_addresses_are_separated_by_commas_and_tried_in_turn() -> None:
    book = Addresses(f" {A}/, {B},{A}")
    assert book.all == [A, B]
    assert book.several
    assert book.current == A
    book.move_on()
    assert book.current == B
    book.move_on()
    assert book.current == A
    assert not Addresses(A).several


def test_who_was_silent_comes_last_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(addresses.time, "monotonic", lambda: now)
    book = Addresses(f"{A},{B},{C}")
    book.note_silent(A)
    book.note_silent(B)
    for _ in range(2):
        book.move_on()
        assert book.current == C
    now += addresses.GONE_SECONDS
    book.move_on()
    assert book.current == A


# Invitations come back as they were, or are refused in one line.


EXPIRES = datetime(2027, 1, 2, 3, 4, tzinfo=UTC)


INVITATION = Invitation(
    coordinator="https://coordinator.example:8443", federation="pets", token="ab" * 32, expires_at=EXPIRES,
    authority="0f" * 32,
)  # fmt: skip


ALPHABET = string.ascii_letters + string.digits + "-_"


def written(**changes: Any) -> str:
    """An invitation with a checksum over other fields, made here by the protocol's words."""
    fields = {**INVITATION.model_dump(mode="json"), **changes}
    body = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    fields["checksum"] = hashlib.sha256(body.encode()).hexdigest()[:16]
    return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")


def refusal(text: str) -> str:
    with pytest.raises(InvitationError) as refused:
        decode(text)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_an_invitation_comes_back_as_it_was() -> None:
    text = INVITATION.encoded()
    assert set(text) <= set(ALPHABET)
    assert decode(text) == INVITATION
    wrapped = "\n  ".join(text[at : at + 60] for at in range(0, len(text), 60))
    assert decode(f" {wrapped}\n") == INVITATION
    assert decode(f"promptfed join - --data folder:/images\n{text}\n") == INVITATION, "as `federation invite` prints it"
    assert decode(written()) == INVITATION
    assert decode(written(authority=None)).authority is None


def test_every_cut_and_every_other_character_is_refused() -> None:
    text = INVITATION.encoded()
    for length in range(1, len(text)):
        assert refusal(text[:length]) == DAMAGED
    for at, letter in enumerate(text):
        other = ALPHABET[(ALPHABET.index(letter) + 1) % len(ALPHABET)]
        assert refusal(text[:at] + other + text[at + 1 :]) == DAMAGED
    for wrong in (text + "A", text + "=", "ä" + text, "x" * 9000, "bm9uZQ", "W10", text[:10] + "!" + text[11:]):
        assert refusal(wrong) == DAMAGED
    assert "there is no invitation" in refusal(" \n")


def test_fields_of_the_wrong_kind_are_refused() -> None:
    for changes in (
        {"token": 7},
        {"expires_at": "soon"},
        {"authority": "0f"},
        {"more": 1},
        {"expires_at": "2027-01-02T03:04:00"},
    ):
        assert refusal(written(**changes)) == DAMAGED


def test_a_later_version_is_named() -> None:
    assert refusal(written(version=2, more="something")) == (
        "the invitation has version 2, this promptfed reads version 1: install the coordinator's version of promptfed"
    )


def test_it_expires() -> None:
    INVITATION.check_time(EXPIRES - timedelta(seconds=1))
    with pytest.raises(InvitationError, match=r"^the invitation expired at 2027-01-02 03:04\+00:00: ask the operator"):
        INVITATION.check_time(EXPIRES)
