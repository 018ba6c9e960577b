"""The page says why each client was chosen."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.support.coordinators import InThread
from tests.web.conftest import PATIENCE, Visit

expect.set_options(timeout=PATIENCE)


def test_the_reasons_are_beside_the_clients_and_in_the_activity(coordinator: InThread, visited: Visit) -> None:
    part = {"min_clients": 2, "deadline_seconds": 3600, "choice": "round_robin"}
    federation = coordinator.create(name="chosen", participation=part)
    clients = coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    for client in clients:
        client.answer(coordinator.task(client))
    coordinator.until(federation, round=1, phase="train")
    page = visited.page
    page.goto(coordinator.url)
    visited.sign_in()
    expect(page.get_by_role("list", name="Clients asked")).to_contain_text("its turn: asked last in round -")
    expect(page.locator("body")).to_contain_text("a (its turn: asked last in round -)")
