"""The operator's client: what it sends, how it reads answers of another version, and one mapping of refusals."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import promptfed
from promptfed.cli.main import app
from promptfed.sdk import operations
from promptfed.sdk.client import CA_VARIABLE, PLAIN_VARIABLE, Answer, AsyncCoordinator, CommandError, Coordinator, Exit
from promptfed.sdk.progress import Snapshot
from promptfed.sdk.result import FederationList, FederationSummary
from promptfed.shared.api.api_schemas import FederationView
from tests.support.coordinators import InThread, in_thread
from tests.support.waiting import PATIENCE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    with in_thread(tmp_path_factory.mktemp("coordinator") / "data") as running:
        running.create(name="eyes")
        yield running


@pytest.fixture
def api(server: InThread) -> Iterator[Coordinator]:
    with Coordinator(server.url, server.operator["Authorization"].split()[1]) as coordinator:
        yield coordinator


def answer(raw: Any) -> Answer[FederationView]:
    return Answer(FederationView, "http://coordinator/", {}, json.dumps(raw).encode())


def test_keys_of_a_later_version_are_passed_over_and_kept_for_programs(api: Coordinator) -> None:
    raw = api.send(operations.get_federation("eyes")).json
    raw["spec"]["aggregation"]["later"] = 1
    raw["later"] = 2
    later = answer(raw)
    assert (later.view.name, later.view.spec.rounds) == ("eyes", raw["spec"]["rounds"])
    assert later.json["later"] == 2


def test_what_is_no_answer_of_this_version_is_said_in_one_line(api: Coordinator) -> None:
    raw = api.send(operations.get_federation("eyes")).json
    with pytest.raises(CommandError, match=r"understand .* \(spec.aggregation.rule: .*use the coordinator's version"):
        _ = answer(raw | {"spec": raw["spec"] | {"aggregation": {"rule": "newest"}}}).view
    with pytest.raises(CommandError, match="answers no JSON: is that a coordinator's address"):
        _ = Answer(FederationView, "http://elsewhere/", {}, b"<html>").view


def test_who_waits_follows_a_federation_of_another_version(api: Coordinator) -> None:
    raw = api.send(operations.get_federation("eyes")).json
    del raw["state_hash"], raw["created_at"], raw["asked"]
    raw["spec"] |= {"name": "No Name!", "rounds": 10**7, "training": raw["spec"]["training"] | {"optimizer": "lion"}}
    raw |= {"state": "finished", "stage": {"kind": "newest"}, "backbone": raw["backbone"] | {"shape": {"odd": 1}}}
    summary = Answer(FederationSummary, "http://coordinator/", {}, json.dumps(raw).encode()).view
    snapshot = Snapshot.of(summary)
    assert (snapshot.over, snapshot.rounds, snapshot.describe()) == (True, 10**7, "finished")
    page = json.dumps({"federations": [raw], "next": None}).encode()
    (listed,) = Answer(FederationList, "http://coordinator/", {}, page).view.federations
    assert listed == summary


def test_what_is_created_is_what_was_written(api: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator fills in what was left open by its own defaults, which may be others than this command's."""
    bodies: list[Any] = []
    send = Coordinator.send

    def listening(self: Coordinator, request: Any) -> Any:
        if request.verb == "POST" and request.path == operations.FEDERATIONS:
            bodies.append(request.options["json"])
        return send(self, request)

    monkeypatch.setattr(Coordinator, "send", listening)
    written = {"method": {"name": "fedpgp", "m": 4}, "rounds": 3, "class_names": ["sun", "anchor"]}
    (tmp_path / "spec.json").write_text(json.dumps({"name": "by-command", **written}))
    (tmp_path / "token").write_text(api._http.headers["Authorization"].split()[1])
    options = ["--coordinator", api.url, "--token-file", str(tmp_path / "token")]
    done = CliRunner().invoke(app, ["federation", "create", str(tmp_path / "spec.json"), *options])
    assert done.exit_code == Exit.OK, done.output
    with promptfed.connect(api.url, token_file=tmp_path / "token") as coordinator:
        coordinator.create(name="by-library", **written)
    for body, name in zip(bodies, ("by-command", "by-library"), strict=True):
        backbone = body.pop("backbone")
        assert backbone["fingerprint"].startswith("sha256:")
        assert body == {"name": name, **written}


def test_pages_are_read_to_the_end(server: InThread, api: Coordinator) -> None:
    for name in "abc":
        server.create(name=name)

    pages = api.run(operations._pages(operations.FEDERATIONS, FederationList, limit=2))
    names = [view.name for page in pages for view in page.view.federations]
    assert (names[0], names[-3:]) == ("eyes", ["a", "b", "c"])
    assert len(pages) == -(-len(names) // 2)


def test_both_transports_refuse_alike(server: InThread, api: Coordinator, tmp_path: Path) -> None:
    async def asynchronous() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http:
            token = server.operator["Authorization"].split()[1]
            await AsyncCoordinator(http, token).run(operations.take("nothing"))

    texts = []
    for call in (lambda: api.run(operations.take("nothing")), lambda: asyncio.run(asynchronous())):
        with pytest.raises(CommandError) as refusal:
            call()
        assert refusal.value.exit == Exit.REFUSED
        texts.append(str(refusal.value))
    assert texts[0] == texts[1]
    with Coordinator(server.url, "0" * 64) as stranger, pytest.raises(CommandError, match="operator token") as refusal:
        stranger.send(operations.get_federation("eyes"))
    assert refusal.value.exit == Exit.NOT_ALLOWED


def test_the_operator_s_token_goes_to_other_machines_encrypted_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(PLAIN_VARIABLE, "")
    monkeypatch.setenv(CA_VARIABLE, "")
    for url in ("http://coordinator.example.org", "http://10.0.0.7:8080", "http://127.0.0.1.example.org"):
        with pytest.raises(CommandError, match="would carry the operator token unencrypted"):
            Coordinator(url, "token")
        found = CliRunner().invoke(
            app, ["federation", "list", "--coordinator", url], env={"PROMPTFED_OPERATOR_TOKEN": "t"}
        )
        assert found.exit_code == Exit.BAD_INPUT
    for url in ("https://coordinator.example.org", "http://localhost:1", "http://[::1]:1", "http://127.0.0.1:1"):
        Coordinator(url, "token").close()
    monkeypatch.setenv(PLAIN_VARIABLE, "1")
    Coordinator("http://coordinator.example.org", "token").close()
    monkeypatch.setenv(CA_VARIABLE, str(tmp_path / "none.pem"))
    with pytest.raises(CommandError, match=r"--ca-file .* cannot be used"):
        Coordinator("https://coordinator.example.org", "token")


def test_the_options_of_the_connection_stand_before_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(PLAIN_VARIABLE, "")
    monkeypatch.setenv(CA_VARIABLE, "")
    environment = {"PROMPTFED_OPERATOR_TOKEN": "t"}
    line = ["--ca-file", str(tmp_path / "none.pem"), "federation", "list", "--coordinator", "https://127.0.0.1:9"]
    found = CliRunner().invoke(app, line, env=environment)
    assert found.exit_code == Exit.BAD_INPUT
    asked: list[object] = []

    def not_found(host: object, *_: object, **__: object) -> None:  # in no time, and whoever answers for names here
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", not_found)
    line = ["--allow-plain-http", "federation", "list", "--coordinator", "http://coordinator.invalid:9"]
    assert CliRunner().invoke(app, line, env=environment).exit_code == Exit.UNREACHABLE
    assert set(asked) == {"coordinator.invalid"}
