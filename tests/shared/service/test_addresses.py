"""Which of several coordinators a caller asks next."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
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
    now = 0.0  # a machine that has just begun to count
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


NONE = "is not an address: write"


@pytest.mark.parametrize(("text", "kept", "refused"), [
    (f" {A}/, {B},{A}", f"{A},{B}", ""), ("http://h:8443/base/", "http://h:8443/base", ""),
    ("https://[::1]:9", "https://[::1]:9", ""), ("", "", NONE), (" , ", "", NONE), (f"{A},ftp://x", "", NONE),
    ("https://", "", NONE), ("https://h:0", "", NONE), ("https://h:65536", "", NONE), ("https://[::1", "", NONE),
    ("https://a b", "", NONE), ("https://a\u202eb", "", NONE), ("h:80", "", NONE),
    *((f"{A},{one}", "", "must hold scheme, host, port and path only: credentials go into files")
      for one in ("https://me@h", "https://@h", "https://h/?token=1", "https://h/#part")),
])  # fmt: skip
def test_an_address_has_a_scheme_a_host_and_no_secret(text: str, kept: str, refused: str) -> None:
    if refused:
        with pytest.raises(ValueError, match=refused):
            addresses.check_addresses(text)
    else:
        assert addresses.check_addresses(text) == kept


def test_what_a_service_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = ["localhost", "127.0.0.1", "127.9.8.7", "::1", "0.0.0.0", "::", "10.0.0.1", "example.org", ""]
    assert [host for host in inside if addresses.is_loopback(host)] == inside[:4]
    with addresses.bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        assert port > 0
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        assert addresses.url_of(listening, "127.0.0.1") == f"http://127.0.0.1:{port}"
        assert addresses.url_of(listening, "::1", "https") == f"https://[::1]:{port}"
    made: list[Any] = []

    class Taken:
        def __init__(self, *kind: int) -> None:
            made.append(kind)

        def setsockopt(self, *given: int) -> None:
            """Takes anything."""

        def bind(self, place: tuple[str, int]) -> None:
            made.append(place)
            raise OSError("taken")

        def close(self) -> None:
            made.append("closed")

    monkeypatch.setattr(addresses.socket, "socket", Taken)
    for host, family in (("::1", socket.AF_INET6), ("127.0.0.1", socket.AF_INET)):
        made.clear()
        with pytest.raises(OSError, match="taken"):
            addresses.bind(host, 7)
        assert made == [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP), (host, 7), "closed"]


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
