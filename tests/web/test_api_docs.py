"""``/docs`` works where nothing but the coordinator can be reached."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httpx

from tests.support.coordinators import InThread
from tests.web.conftest import visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_the_page_and_its_files_come_from_the_coordinator(coordinator: InThread) -> None:
    def get(path: str) -> httpx.Response:
        return httpx.get(coordinator.url + path)

    page = get("/docs")
    assert page.status_code == 200
    assert "://" not in page.text
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(named) == 2
    for address in named:
        answer = get(address)
        assert answer.status_code == 200
        assert len(answer.content) > 100_000
    assert get("/docs/files/nothing.js").status_code == 404
    assert get("/docs/files/..%2fcore.py").status_code == 404
    assert not any(path.startswith("/docs") for path in coordinator.http.get("/openapi.json").json()["paths"])


def test_a_browser_shows_the_routes_and_asks_nobody_else(browser: Browser, coordinator: InThread) -> None:
    seen = visit(browser, coordinator)
    asked: list[str] = []
    seen.page.on("request", lambda request: asked.append(request.url))
    seen.open("/docs")
    seen.page.get_by_text("/v1/federations", exact=True).first.wait_for()
    assert all(url.startswith((coordinator.url, "data:")) for url in asked), asked
    assert seen.wrong == []
    assert seen.violations() == []
