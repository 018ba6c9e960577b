"""The operator's client: what it sends, how it reads answers of another version, and one mapping of refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from promptfed.sdk import operations
from promptfed.sdk.client import Answer, AsyncCoordinator, Coordinator
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.api_schemas import FederationPage, FederationView
from tests.support.coordinators import InThread, in_thread


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


def test_pages_are_read_to_the_end(server: InThread, api: Coordinator) -> None:
    for name in "abc":
        server.create(name=name)

    def page(after: str | None) -> Any:
        params = {"limit": 2, **({"after": after} if after else {})}
        return operations.Request("GET", operations.FEDERATIONS, FederationPage, {"params": params})

    pages = api.run(operations._pages(page))
    assert [view.name for page in pages for view in page.view.federations] == ["eyes", "a", "b", "c"]
    assert len(pages) == 2


def test_both_transports_refuse_alike(server: InThread, api: Coordinator, tmp_path: Path) -> None:
    async def asynchronous() -> None:
        async with httpx.AsyncClient(base_url=server.url) as http:
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
