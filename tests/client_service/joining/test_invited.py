"""Whom a client trusts that was invited: each way in which the coordinator may answer, without a connection."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining import invited
from promptfed.client_service.settings import make_settings
from promptfed.shared.service.digests import CONTENT, Damaged, field_of
from promptfed.shared.service.invitation import Invitation
from promptfed.shared.service.net import certificate_hash

UNTRUSTED = httpx.ConnectError("certificate verify failed")
UNTRUSTED.__cause__ = ssl.SSLCertVerificationError("self-signed")
PEM = ssl.DER_cert_to_PEM_cert(b"a certificate")
OTHER = ssl.DER_cert_to_PEM_cert(b"another")
GONE = httpx.ConnectError("refused")
PROVEN = certificate_hash(PEM)


@pytest.mark.parametrize(("authority", "kept", "answers", "trusts"), [
    (None, None, [], None), (PROVEN, PEM, [], "kept"), (PROVEN, None, ["anything"], None),
    (PROVEN, OTHER, ["anything"], None), (PROVEN, None, [GONE], Exit.UNREACHABLE),
    (PROVEN, None, [UNTRUSTED, GONE], Exit.UNREACHABLE), (PROVEN, None, [UNTRUSTED, PEM], "kept"),
    (PROVEN, OTHER, [UNTRUSTED, PEM + OTHER], "kept"), (PROVEN, None, [UNTRUSTED, OTHER + PEM], Exit.NOT_ALLOWED),
    (PROVEN, None, [UNTRUSTED, "no certificate"], Exit.NOT_ALLOWED),
])  # fmt: skip
def test_the_certificate_that_the_invitation_names_is_trusted(
    authority: str | None,
    kept: str | None,
    answers: list[Any],
    trusts: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = make_settings(coordinator="https://c", federation="pets", data="none", state_dir=tmp_path)
    file, asked = tmp_path / invited.AUTHORITY, list[bool]()
    if kept is not None:
        file.write_text(kept)

    def ask(settings: Any, verify: ssl.SSLContext) -> str:
        asked.append(verify.verify_mode == ssl.CERT_REQUIRED and verify.check_hostname)
        answer = answers[len(asked) - 1]
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(invited, "_ask", ask)
    invitation: Any = SimpleNamespace(authority=authority)
    if isinstance(trusts, Exit):
        with pytest.raises(ClientError) as end:
            invited._authority(invitation, settings)
        assert (end.value.exit, file.exists()) == (trusts, kept is not None)
    else:
        assert invited._authority(invitation, settings) == (file if trusts else None)
        assert trusts is None or file.read_text() == PEM
    assert asked == [True, False][: len(answers)], (
        "what is not trusted yet is asked last, and for the certificate alone"
    )


def test_damaged_answers_are_asked_for_again_for_some_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = [0.0], list[float]()
    given = {"coordinator": "https://c", "federation": "pets", "data": "none", "state_dir": tmp_path}
    settings = make_settings(**given, give_up_after=9)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += 3

    answers: list[Any] = [Damaged("half"), httpx.DecodingError("gzip"), Damaged("half"), "whole"]

    def asked(settings: Any, verify: Any) -> str:
        answer = answers[len(slept)]
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(invited, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(invited, "_asked", asked)
    context = ssl.create_default_context()
    assert invited._ask(settings, context) == "whole", "after just so long it is asked once more"
    assert slept == [invited.AGAIN_SECONDS] * 3
    slept.clear()
    answers[:] = [Damaged("half")] * 9
    with pytest.raises(ClientError, match=r"that can be used \(half\): ") as end:
        invited._ask(settings, context)
    assert (end.value.exit, len(slept)) == (Exit.UNREACHABLE, 4)
    with pytest.raises(ClientError) as end:
        monkeypatch.undo()
        invited._asked(settings.model_copy(update={"proxy": "ftp://p"}), context)
    assert end.value.exit is Exit.USAGE


@pytest.mark.parametrize(("parts", "read"), [(1, 1), (2, 2), (3, 3), (9, 3)])
def test_no_more_is_read_than_the_part_that_is_too_much(
    parts: int, read: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(coordinator="https://c", federation="pets", data="none", state_dir=tmp_path)
    part, digests, asked = (
        b"x" * (invited.MOST_BYTES // 2),
        [b"x" * (invited.MOST_BYTES // 2) * read, b"y"],
        list[str](),
    )

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(200, headers={CONTENT: field_of(digests.pop(0))}, content=iter([part] * parts))

    monkeypatch.setattr(invited, "http_options", lambda *_: {"transport": httpx.MockTransport(answer)})
    assert invited._asked(settings, ssl.create_default_context()) == part.decode() * read
    with pytest.raises(Damaged):
        invited._asked(settings, ssl.create_default_context())
    assert asked == ["https://c/v1/authority"] * 2


def test_a_state_folder_that_cannot_be_made_ends_the_client(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    about = {"federation": "pets", "token": "ab" * 32, "expires_at": datetime.now(UTC) + timedelta(hours=1)}
    text = Invitation(coordinator="https://c", **about).encoded()
    with pytest.raises(ClientError, match="cannot be used: ") as end:
        invited.accept(text, {"data": "none", "state_dir": tmp_path / "file" / "below"})
    assert end.value.exit is Exit.STATE
    with pytest.raises(ClientError) as end:
        invited.accept(text[:-9], {"data": "none", "state_dir": tmp_path})
    assert end.value.exit is Exit.NOT_ALLOWED


@pytest.mark.parametrize("known", ["the proxy refuses", None])
def test_why_nobody_answers_is_explained_where_it_is_known(known: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invited, "explained", lambda error, address: known)
    told = invited._unreachable("https://c", httpx.ConnectError("refused"))
    assert (told.exit, str(told)) == (Exit.UNREACHABLE, known or "no answer from the coordinator at https://c: refused")
