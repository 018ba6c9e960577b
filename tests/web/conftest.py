"""A page of a coordinator of its own in Chromium, and what a visitor does there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browser import browser
from tests.support.coordinators import InThread, in_thread

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["browser"]

PATIENCE = 120_000  # ms; a busy machine is slow, a page that is wrong stays wrong
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[InThread]:
    with in_thread(tmp_path / "data") as server:
        yield server


@dataclass
class Visit:
    """A page, and everything in it that should not have happened."""

    page: Page
    coordinator: InThread
    wrong: list[str] = field(default_factory=list)

    @property
    def token(self) -> str:
        return self.coordinator.operator["Authorization"].split()[1]

    def open(self, path: str = "/") -> None:
        """Load the page."""
        self.page.goto(self.coordinator.url + path)

    def sign_in(self) -> None:
        """With the keyboard, as the form has it."""
        self.page.get_by_label("Operator token").fill(self.token)
        self.page.keyboard.press("Enter")

    def signed_in(self, path: str = "/") -> Page:
        """The page, loaded, with a token."""
        self.open(path)
        self.sign_in()
        return self.page

    def tab_to(self, name: str) -> None:
        """Go on with the Tab key until the button of this name has the focus, visibly."""
        wanted = self.page.get_by_role("button", name=name, exact=True)
        wanted.wait_for()
        for _ in range(40):
            if wanted.evaluate("element => element === document.activeElement"):
                assert wanted.evaluate("element => getComputedStyle(element).outlineStyle") == "solid"
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"the Tab key does not reach {name!r}")

    def violations(self) -> list[str]:
        """What the page's own policy has forbidden."""
        found: list[str] = self.page.evaluate("window.violations")
        return found


def visit(browser: Browser, coordinator: InThread, **options: Any) -> Visit:
    """A page of a browser that knows nothing of earlier ones."""
    context = browser.new_context(**({"reduced_motion": "reduce"} | options))
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.add_init_script(WATCH)
    made = Visit(page, coordinator)
    page.on("pageerror", lambda error: made.wrong.append(str(error)))
    page.on("console", lambda line: made.wrong.append(line.text) if "Content Security Policy" in line.text else None)
    return made


@pytest.fixture
def visited(browser: Browser, coordinator: InThread) -> Iterator[Visit]:
    """A page of the coordinator's; at the end nothing in it may have gone wrong."""
    made = visit(browser, coordinator)
    yield made
    assert made.wrong == []
    assert made.violations() == []
    made.page.context.close()
