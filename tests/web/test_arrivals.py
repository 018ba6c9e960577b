"""The page of an asynchronous federation: each state's changes, where they began, and how late they came."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.support.coordinators import InThread
from tests.web.conftest import PATIENCE, Visit

expect.set_options(timeout=PATIENCE)


def test_arrivals_have_the_state_that_they_began_with_and_their_staleness(
    coordinator: InThread, visited: Visit
) -> None:
    part = {"min_clients": 3, "deadline_seconds": 3600}
    federation = coordinator.create(
        name="async", rounds=3, participation=part, schedule={"kind": "buffered", "buffer": 2}
    )
    a, b, late = coordinator.enrol(federation, "a", "b", "late")
    coordinator.post(f"{federation}/start")
    for client in (a, b, late):
        assert client.answer(coordinator.task(client)).status_code == 201  # the evaluation before round 1
    early = coordinator.task(late)
    for client in (a, b):
        assert client.answer(coordinator.task(client)).status_code == 201
    coordinator.until(federation, round=2, phase="train")
    assert a.answer(coordinator.task(a)).status_code == 201
    assert late.answer(early).status_code == 201  # trained from state 0, and counts for state 2

    carried = {"carrying": coordinator.task(b)["task_id"], "progress": 0.42}
    b.http.get(f"{b.path}/task", params=carried, headers=b.headers).raise_for_status()

    page = visited.page
    page.goto(coordinator.url)
    visited.sign_in()
    expect(page.get_by_text("awaited, 42 % done")).to_be_visible()
    second = page.get_by_role("region", name="Changes of state 2")
    columns = second.get_by_role("columnheader")
    expect(columns).to_have_text(["client", "trained from state", "staleness", "weight", "arrived"])
    for name, cells in {"a": ["1", "0", "0.500"], "late": ["0", "1", "0.500"]}.items():
        row = second.get_by_role("row").filter(has=page.get_by_role("rowheader", name=name, exact=True))
        for place, text in enumerate(cells):
            expect(row.get_by_role("cell").nth(place)).to_have_text(text)
    expect(page.get_by_role("region", name="Changes of state 1").get_by_role("rowheader")).to_have_text(["a", "b"])
    expect(page.get_by_role("img", name="of state 2 the mean is 0.5")).to_be_visible()
    expect(page.get_by_text("Its change counts with its weight times 1/√(1 + τ).")).to_be_visible()
