"""What the page is made of: served as they are, nothing else, and nothing from anywhere else."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from promptfed.shared.service.static_page import MEDIA_TYPES
from promptfed.testing.clients import drive
from tests.support.coordinators import InThread
from tests.web.conftest import PATIENCE, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

expect = pytest.importorskip("playwright.sync_api").expect
expect.set_options(timeout=PATIENCE)
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "coordinator" / "web"
OWN = [path for path in sorted(FOLDER.iterdir()) if not path.name.startswith("chart.")]


def test_every_event_is_told_in_words() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "coordinator").rglob("*.py"))
    kinds = set(re.findall(r'(?:emit\(\s*|EventRow\([^)]*kind=|^REFUSED = )"([a-z]+-[a-z-]+)"', sources, re.MULTILINE))
    told = set(re.findall(r'case "([a-z-]+)": return', (FOLDER / "federation.js").read_text()))
    assert {"federation-created", "enrolment-refused", "token-minted", "task-settled"} <= kinds
    assert told == kinds


def test_every_file_is_served_with_its_kind_and_a_strict_policy(coordinator: InThread) -> None:
    served = {f"/web/{path.name}": path for path in FOLDER.iterdir()} | {"/": FOLDER / "index.html"}
    for address, path in served.items():
        answer = coordinator.http.get(address)
        assert answer.status_code == 200, address
        assert answer.content == path.read_bytes()
        assert answer.headers["content-type"] == MEDIA_TYPES[path.suffix]
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"


def test_what_a_browser_has_is_not_sent_again(coordinator: InThread) -> None:
    first = coordinator.http.get("/")
    again = coordinator.http.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fapp.py", "%2e%2e", ".", "__init__.py", "a" * 100])
def test_nothing_else_is_served(coordinator: InThread, name: str) -> None:
    answer = coordinator.http.get(f"/web/{name}")
    assert answer.status_code == 404
    assert answer.json()["type"].endswith("not-found")


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_our_files_name_no_other_place_and_make_no_markup(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"https?://[^\s\"'<>)]+", text)) <= {"http://www.w3.org/2000/svg"}
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "localStorage",
        "style=",
    ):
        assert forbidden not in text
    assert len(text.splitlines()) < 500


def test_the_page_s_addresses_are_files_that_are_there() -> None:
    html = (FOLDER / "index.html").read_text()
    named = set(re.findall(r"(?:src|href)=\"/web/([^\"]+)\"", html))
    for path in FOLDER.glob("*.js"):
        named |= set(re.findall(r"from \"\./([^\"]+)\"", path.read_text()))
    assert named <= {path.name for path in FOLDER.iterdir()}
    assert not re.findall(r"<script(?![^>]*\ssrc=)[^>]*>|<style|\son[a-z]+=", html)


def test_the_charts_library_comes_with_its_licence_and_without_a_map() -> None:
    library = (FOLDER / "chart.umd.min.js").read_text()
    version = re.search(r"Chart\.js v([\d.]+)", library)
    assert version is not None
    assert "sourceMappingURL" not in library
    assert "MIT" in (FOLDER / "chart.LICENSE.txt").read_text()


def test_the_page_is_part_of_the_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {path for pattern in data["promptfed.coordinator"] for path in (ROOT / "coordinator").glob(pattern)}
    assert set(FOLDER.iterdir()) <= packed


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


@pytest.mark.extended
def test_titles_say_mean_average_precision(browser: Browser, coordinator: InThread) -> None:
    names = ["sun", "cloud", "rain"]
    made = {}
    for name, task in (("several", {"task": "multi_label", "class_names": names}), ("one", {"class_names": names})):
        made[name] = coordinator.create(name=name, rounds=1, **task)
        clients = coordinator.enrol(made[name], "a", "b", class_names=names)
        coordinator.post(f"{made[name]}/start")
        drive(clients)
    visited = visit(browser, coordinator, viewport={"width": 420, "height": 900})
    page = visited.page
    visited.open(f"/#/federations/{made['several']}")
    visited.sign_in()
    panel = page.get_by_role("region", name="Mean average precision", exact=True)
    expect(panel.get_by_role("region", name="Mean average precision after round 1")).to_be_visible()
    expect(panel.get_by_role("img", name="Mean average precision by round on test")).to_be_visible()
    expect(page.get_by_role("region", name="Result", exact=True)).to_contain_text("Mean average precision 50.0 %")
    expect(page.get_by_role("region", name="Accuracy", exact=True)).to_have_count(0)
    assert page.evaluate("document.documentElement.scrollWidth") == 420
    visited.open(f"/#/compare/{made['several']},{made['one']}")
    compared = page.get_by_role("region", name="Accuracy or Mean average precision", exact=True)
    other = page.get_by_role("region", name="Mean average precision or Accuracy", exact=True)
    expect(compared.or_(other)).to_be_visible()
    visited.open(f"/#/federations/{made['one']}")
    expect(page.get_by_role("region", name="Accuracy", exact=True)).to_be_visible()
