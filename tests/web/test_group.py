"""The page of one of several coordinators: it shows what others carry out, and goes on when its own is gone."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from promptfed.shared.service.net import TOLD
from tests.coordinator.conftest import object_server, object_store, postgres
from tests.support.coordinators import ForkedCoordinator
from tests.support.object_store import ObjectStoreServer
from tests.support.postgres import PostgresServer
from tests.support.resending import ResendingApi
from tests.support.several import OPERATOR, AnyOf
from tests.support.takeovers import Group
from tests.support.waiting import wait_for
from tests.web.conftest import PATIENCE, Visit, visit

expect.set_options(timeout=PATIENCE)

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["object_server", "object_store", "postgres"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LONGEST_WAIT = 15_000  # ms


def told(process: ForkedCoordinator) -> list[str]:
    """The addresses that a coordinator tells operators of; its page may call these."""
    return process.http.get("/v1/federations", headers=OPERATOR).headers[TOLD].split(", ")


@pytest.fixture
def group(
    tmp_path: Path, postgres: PostgresServer, object_store: str, object_server: ObjectStoreServer
) -> Iterator[Group]:
    made = Group(tmp_path, postgres.schema(), object_store, dict(object_server.environment))
    for process in made.processes.values():
        wait_for("the others' addresses", lambda process=process: len(told(process)) == len(made.urls))
    yield made
    made.close()


@pytest.fixture
def api(group: Group) -> Iterator[ResendingApi]:
    asker = AnyOf(group.urls)
    yield ResendingApi(asker, OPERATOR)
    asker.close()


def opened(browser: Browser, url: str) -> Visit:
    made = visit(browser, SimpleNamespace(url=url, operator=OPERATOR))
    made.open()
    made.sign_in()
    return made


def test_what_another_one_carries_out_is_shown_and_steered(browser: Browser, group: Group, api: ResendingApi) -> None:
    api.create(name="styles")
    visited = opened(browser, group.urls[2])
    expect(visited.page.locator("#link")).to_have_text(f"live from {group.urls[0]}")
    expect(visited.page.get_by_role("heading", name="styles")).to_be_visible()
    visited.page.get_by_role("button", name="Cancel", exact=True).click()
    visited.page.get_by_role("dialog").get_by_role("button", name="Cancel it for good").click()
    expect(visited.page.locator("#link")).to_have_text("cancelled")
    assert api.get("styles")["state"] == "cancelled"
    assert visited.wrong == visited.violations() == []
    visited.page.context.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_it_goes_on_without_its_own(browser: Browser, group: Group, api: ResendingApi, number: int) -> None:
    federation = api.create(name="styles")
    visited = opened(browser, group.urls[0])
    link = visited.page.locator("#link")
    expect(link).to_have_text("live")
    group.processes[group.urls[0]].signal(number)
    begun = time.monotonic()
    expect(link).to_contain_text("live from", timeout=LONGEST_WAIT)
    print(f"the page is live again after {time.monotonic() - begun:.1f} s")
    api.enrol(federation, "north")
    visited.page.get_by_role("tab", name="Clients").click()
    expect(visited.page.get_by_role("region", name="Clients")).to_contain_text("north")
    assert visited.wrong == visited.violations() == []
    visited.page.context.close()
