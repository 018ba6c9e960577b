"""The way back: a withdrawal holds here first, then there, and says what it could not do."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.connection import BadAnswer, Refused
from promptfed.client_service.http.coordinator_client import CoordinatorClient
from promptfed.client_service.joining import consent
from promptfed.client_service.joining.checks import Check
from promptfed.client_service.privacy.agreement import FILE, WITHDRAWN
from promptfed.client_service.settings import Settings, make_settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.state.site_log import read
from promptfed.shared.service.addresses import Addresses

SECRET = "ab" * 32
WHO = {"name": "a", "role": "trainer", "secret": SECRET, "federation_id": "fed-1", "client_id": "c-1"}
UNTOLD = "the coordinator could not be told"


def settings_of(folder: Path, **given: Any) -> Settings:
    where = {"coordinator": "http://127.0.0.1:9", "federation": "pets", "data": "none", "state_dir": folder}
    return make_settings(**where, withdraw=True, **given)


@pytest.mark.parametrize(("identity", "answer", "exit", "said"), [
    (WHO, None, Exit.OK, "waits for this client no longer"), (None, None, Exit.OK, "knows of no such client"),
    (WHO | {"client_id": None}, None, Exit.OK, "knows of no such client"),
    (WHO | {"federation_id": None}, None, Exit.OK, "knows of no such client"),
    *[(WHO, Refused(status, "x", "why"), Exit.OK, "takes part no longer: why") for status in (401, 403, 409, 410)],
    *[(WHO, Refused(status, "x", "why"), Exit.UNREACHABLE, UNTOLD) for status in (307, 400, 402, 404, 411, 422)],
    (WHO, BadAnswer("why"), Exit.UNREACHABLE, UNTOLD), (WHO, ClientError(Exit.UNREACHABLE, "why"), 7, UNTOLD),
])  # fmt: skip
def test_who_withdraws_is_out_here_and_the_coordinator_is_told(
    identity: dict[str, Any] | None, answer: Exception | None, exit: Any, said: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    told: list[tuple[str, ...]] = []

    async def withdraw(coordinator: CoordinatorClient) -> None:
        told.append((coordinator.federation, coordinator.token, coordinator.base_url))
        assert coordinator.give_up_after == consent.ANSWER_SECONDS
        if answer is not None:
            raise answer

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(CoordinatorClient, "withdraw", withdraw)
    settings = settings_of(tmp_path)
    with pytest.raises(ClientError, match="holds no consent to withdraw") as end:
        consent.withdraw(settings)
    assert (end.value.exit, told) == (Exit.STATE, [])
    (tmp_path / FILE).write_text("{}")
    if identity is not None:
        (tmp_path / "identity.json").write_text(json.dumps(identity))
    assert consent.withdraw(settings) == (Exit.UNREACHABLE if exit == 7 else exit)
    assert said in caplog.text
    assert told == ([("fed-1", SECRET, settings.coordinator)] if identity == WHO else [])
    assert (tmp_path / WITHDRAWN).stat().st_mode & 0o777 == 0o600
    assert [line["delete_private"] for line in read(tmp_path) if line["what"] == "withdrawn"] == [False]
    assert (tmp_path / FILE).exists()


def test_what_is_private_is_deleted_once_the_running_client_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running, slept = PrivateState(tmp_path), list[float]()
    (tmp_path / FILE).write_text("{}")
    (tmp_path / "committed.safetensors").write_bytes(b"private")
    clock = SimpleNamespace(monotonic=lambda: 5.0, sleep=slept.append)
    monkeypatch.setattr(consent, "time", clock)
    monkeypatch.setattr(consent, "END_SECONDS", -1.0)
    settings = settings_of(tmp_path, delete_private=True, feature_cache=tmp_path / "features")
    with pytest.raises(ClientError, match="a client still runs on") as end:
        consent.withdraw(settings)
    assert (end.value.exit, (tmp_path / WITHDRAWN).exists(), slept) == (Exit.STATE, True, [])
    monkeypatch.setattr(consent, "END_SECONDS", 0.0)  # just now
    clock.sleep = lambda seconds: slept.append(seconds) or running.close()
    assert consent.withdraw(settings) == Exit.OK
    assert slept == [0.2]
    assert not (tmp_path / "committed.safetensors").exists()
    assert "other clients may share that folder" in caplog.text
    PrivateState(tmp_path).close()  # it was closed


def test_known_addresses_that_the_policy_allows_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Addresses] = []
    (tmp_path / "identity.json").write_text(json.dumps(WHO))
    known = ["http://127.0.0.1:9", "http://127.0.0.1:8", "https://elsewhere.example"]
    (tmp_path / "coordinators.json").write_text(json.dumps(known))
    (tmp_path / "policy.yaml").write_text(f"version: 1\nallow: {{coordinators: {known[:2]}}}\n")
    for policy, found in ((None, known), (tmp_path / "policy.yaml", known[:2])):

        async def call(coordinator: CoordinatorClient) -> None:
            asked.append(coordinator.addresses)

        settings = settings_of(tmp_path) if policy is None else settings_of(tmp_path, policy=policy)
        assert asyncio.run(consent.call_enrolled(settings, call))
        assert asked[-1].all == found


def test_the_question_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal, terms = consent.Terminal("text", ask=False), SimpleNamespace(digest="0f")
    shown = SimpleNamespace(changes=(), lines=lambda: ["offer\u200b"], terms=terms)

    async def answered(stream: Any) -> str:
        return " Yes\n"

    monkeypatch.setattr(consent, "line_of", answered)
    terminal._ask = True
    assert asyncio.run(terminal.consent([Check("disk", "warn", "full", "mend it")], cast(Any, shown)))
    assert capsys.readouterr().err == "warn  disk          full: mend it\n\noffer\\u200b\n\nJoin? [y/N] "
    for agree, changes, joins in ((None, (), True), (None, ("x",), False), ("0f", ("x",), True), ("0e", (), False)):
        shown.changes = changes
        said = consent.Terminal("text", ask=False, agree=agree).consent([], cast(Any, shown))
        assert asyncio.run(said) is joins, "where a digest is given it decides alone"
