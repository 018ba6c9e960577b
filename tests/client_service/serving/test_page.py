"""The upload page in a real browser: bars, domains, errors as text, the token in memory, and a strict policy."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import expect

from promptfed.client_service.monitor import Monitor, Stage, Status
from promptfed.client_service.serving.api import create_app
from promptfed.client_service.serving.page import PAGE
from promptfed.client_service.serving.prediction import BadImage, Predictor
from tests.support.browser import browser
from tests.support.client_processes import served

__all__ = ["browser"]

TIMEOUT = 120_000  # ms; a busy machine is slow, a page that is wrong stays wrong
HOSTILE = "<img src=x onerror=alert(1)>"


class Canned(Predictor):
    """Answers every image that is no text with the same classes."""

    def predict(self, content: bytes) -> dict[str, Any]:
        if not content.startswith(b"\x89PNG"):
            raise BadImage("the body cannot be read as an image: send the bytes of a PNG")
        names = [HOSTILE, *(f"class {number}" for number in range(1, 11))]
        shares = [0.5, *[0.05] * 10]
        return {
            "method": "fast_pt", "round": 3, "class_name": names[0],
            "classes": [{"name": n, "probability": p, "zero_shot": 0.25} for n, p in zip(names, shares, strict=True)],
            "domains": [{"name": "sketch", "share": 0.75}, {"name": "neon", "share": 0.25}],
        }  # fmt: skip


@contextmanager
def served_page(token: str | None, round: int | None = 3, stage: Stage = "training") -> Iterator[str]:
    """The API of a client on a free port of loopback."""
    monitor = Monitor(Status("hospital-a", "trainer", "pets", "http://127.0.0.1:1", stage, round=round))
    with served(create_app(monitor, Canned(), token, "127.0.0.1")) as url:
        yield url


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of a narrow phone whose console stays empty, but for requests that were refused on purpose."""
    opened = browser.new_page(viewport={"width": 360, "height": 740})
    opened.set_default_timeout(TIMEOUT)
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    yield opened
    opened.close()
    refused = (
        "Failed to load resource: the server responded with a status of",
        "Failed to load resource: net::ERR_FAILED",
    )
    assert [text for text in said if not text.startswith(refused)] == []


def ready(page: Any) -> None:
    """Wait until the page asks for an image: nobody can choose one before."""
    page.locator("#ask").wait_for(state="visible")


# What the page says of the image meanwhile, and whether it calls itself busy.
HINTS = """() => {
  const [hint, ask] = ["hint", "ask"].map((id) => document.getElementById(id));
  window.hints = [];
  new MutationObserver(() => hints.push([hint.textContent, ask.ariaBusy])).observe(hint, { childList: true });
}"""


def image(folder: Path) -> Path:
    path = folder / "image.png"
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "PNG")
    path.write_bytes(file.getvalue())
    return path


def test_an_image_becomes_bars_and_domains(page: Any, tmp_path: Path) -> None:
    with served_page(None) as url:
        answer = page.goto(url)
        assert answer.headers["content-security-policy"] == PAGE.headers["Content-Security-Policy"]
        page.get_by_text("hospital-a in the federation pets, in round 3").wait_for()
        page.evaluate(HINTS)
        page.set_input_files("#file", image(tmp_path))
        page.locator(".verdict").filter(has_text=HOSTILE).wait_for()
        page.locator("#ask[aria-busy=false]").filter(has_text="image.png").wait_for()
        assert page.evaluate("hints") == [["Looking at image.png…", "true"], ["image.png", "false"]]
        assert page.locator(".classes img").count() == 0  # a class name is text
        expect(page.locator(".classes li")).to_have_count(8, timeout=TIMEOUT)
        assert page.locator(".classes .bar.adapted .value").first.inner_text() == "50.0 %"
        assert page.locator(".classes .bar.zero-shot .value").first.inner_text() == "25.0 %"
        first = page.locator(".classes").aria_snapshot().splitlines()[1]
        assert "learned prompts 50.0 % zero-shot 25.0 %" in first  # what the colours say is read out too
        widths = [page.locator(".classes .fill").nth(place).bounding_box()["width"] for place in (0, 1)]
        assert widths[0] == pytest.approx(2 * widths[1], rel=0.02)
        assert page.locator(".domains").inner_text().split() == ["sketch", "75.0", "%", "neon", "25.0", "%"]
        page.get_by_role("button", name="Show all 11 classes").press("Enter")
        expect(page.locator(".classes li")).to_have_count(11, timeout=TIMEOUT)
        page.locator(".picture img").wait_for(state="visible")  # the policy lets the chosen image be shown
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_client_started_anew_after_the_end_says_that_it_has_ended(page: Any) -> None:
    with served_page(None, round=None, stage="ended") as url:
        page.goto(url)
        page.get_by_text("hospital-a in the federation pets, which has ended.").wait_for()


def test_what_is_no_image_is_an_error_and_the_next_image_an_answer(page: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.png").write_text("no image")
    with served_page(None) as url:
        page.goto(url)
        ready(page)
        page.set_input_files("#file", [tmp_path / "notes.png", image(tmp_path)])  # several at once, each with its own
        expect(page.locator(".picture")).to_have_count(2, timeout=TIMEOUT)
        first, second = page.locator(".picture").nth(0), page.locator(".picture").nth(1)
        first.get_by_role("alert").filter(has_text="It cannot be read as an image. Choose a PNG").wait_for()
        second.locator(".verdict").wait_for()
        expect(first.locator(".verdict")).to_have_count(0, timeout=TIMEOUT)
        page.set_input_files("#file", image(tmp_path))
        page.locator(".verdict").wait_for(state="visible")
        expect(page.get_by_role("alert")).to_have_count(0, timeout=TIMEOUT)


def test_the_token_is_asked_for_and_kept_in_memory_alone(page: Any, tmp_path: Path) -> None:
    with served_page("open sesame") as url:
        page.goto(url)
        page.fill("#token", "wrong")
        page.press("#token", "Enter")
        page.get_by_role("alert").filter(has_text="not the token").wait_for()
        page.fill("#token", "open sesame")
        page.press("#token", "Enter")
        ready(page)
        page.set_input_files("#file", image(tmp_path))
        page.locator(".verdict").wait_for(state="visible")
        kept = "JSON.stringify([localStorage.length, sessionStorage.length, document.cookie, location.href])"
        assert page.evaluate(kept) == f'[0,0,"","{url}/"]'
        page.reload()
        page.locator("#token").wait_for(state="visible")


def test_a_service_that_is_gone_is_not_a_wrong_token(page: Any) -> None:
    with served_page("open sesame") as url:
        page.goto(url)
        page.fill("#token", "open sesam\u00e9")  # no header can carry it
        page.press("#token", "Enter")
        page.get_by_role("alert").filter(has_text="no special characters").wait_for()
        page.route("**/status", lambda route: route.abort())
        page.fill("#token", "open sesame")
        page.press("#token", "Enter")
        page.get_by_role("alert").filter(has_text="is it still running?").wait_for()


def test_no_script_of_elsewhere_or_within_the_page_runs(browser: Any) -> None:
    page = browser.new_page()
    with served_page(None) as url:
        page.goto(url)
        added = page.evaluate(
            "() => { const made = document.createElement('script'); try { made.textContent = 'window.ran = 1' }"
            " catch (error) { return error.name } document.body.append(made); return window.ran ?? 'blocked' }"
        )
        assert added == "TypeError"
        assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'blocked')") == "blocked"
    page.close()
