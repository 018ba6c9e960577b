"""The operator's page behind a proxy that passes an answer on only once it is whole."""

from __future__ import annotations

from playwright.sync_api import expect

from promptfed.testing.clients import drive
from tests.support.coordinators import InThread
from tests.support.proxy import Proxy
from tests.web.conftest import PATIENCE, Visit

expect.set_options(timeout=PATIENCE)


def test_the_page_polls_where_the_stream_of_events_does_not_arrive(coordinator: InThread, visited: Visit) -> None:
    federation = coordinator.create(name="buffered", participation={"min_clients": 2, "deadline_seconds": 3600})
    clients = coordinator.enrol(federation, "a", "b")
    page = visited.page
    with Proxy(coordinator.url, lambda asked: "none") as proxy:
        page.goto(proxy.url)
        visited.sign_in()
        expect(page.get_by_role("heading", level=1)).to_have_text("buffered")
        expect(page.get_by_role("region", name="2 clients")).to_be_visible()
        # The stream ends with the federation only: what is shown before comes of polls.
        clients += coordinator.enrol(federation, "newcomer")
        expect(page.get_by_role("region", name="3 clients")).to_contain_text("newcomer")
        coordinator.post(f"{federation}/start")
        drive(clients)
        expect(page.get_by_role("region", name="Accuracy after round 2")).to_be_visible()
        page.goto("about:blank")
