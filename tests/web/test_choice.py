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
    chosen = page.get_by_role("region", name="Clients of round 1, train")
    expect(chosen.get_by_role("cell", name="no answer yet")).to_have_count(2)
    for client in clients:
        assert client.answer(coordinator.task(client)).status_code == 201
    for name in ("a", "b"):
        row = chosen.get_by_role("row").filter(has=page.get_by_role("rowheader", name=name, exact=True))
        expect(row).to_have_text(f"{name}its turn: asked last in round -counted")


def test_without_a_choice_there_are_no_reasons_to_show(coordinator: InThread, visited: Visit) -> None:
    federation = coordinator.create(name="drawn", participation={"min_clients": 2, "deadline_seconds": 3600})
    clients = coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    for client in clients:
        client.answer(coordinator.task(client))
    coordinator.until(federation, round=1, phase="train")
    visited.page.goto(coordinator.url)
    visited.sign_in()
    expect(visited.page.locator(".phase")).to_have_text("Round 1, train: 0 of 2 answered")
    expect(visited.page.get_by_role("heading", name="Who was chosen, and why")).to_be_hidden()
