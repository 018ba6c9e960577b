"""Titles of a federation with several labels per image name what is measured, in a real browser, wide and narrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from promptfed.testing.clients import drive
from tests.support.coordinators import InThread
from tests.web.conftest import PATIENCE, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

expect = pytest.importorskip("playwright.sync_api").expect
expect.set_options(timeout=PATIENCE)


@pytest.mark.extended
@pytest.mark.parametrize("width", [1400, 420])
def test_titles_say_mean_average_precision(browser: Browser, coordinator: InThread, width: int) -> None:
    names = ["sun", "cloud", "rain"]
    made = {}
    for name, task in (("several", {"task": "multi_label", "class_names": names}), ("one", {"class_names": names})):
        made[name] = coordinator.create(name=name, rounds=1, **task)
        clients = coordinator.enrol(made[name], "a", "b", class_names=names)
        coordinator.post(f"{made[name]}/start")
        drive(clients)
    visited = visit(browser, coordinator, viewport={"width": width, "height": 900})
    page = visited.page
    visited.open(f"/#/federations/{made['several']}")
    visited.sign_in()
    panel = page.get_by_role("region", name="Mean average precision", exact=True)
    expect(panel.get_by_role("region", name="Mean average precision after round 1")).to_be_visible()
    expect(panel.get_by_role("img", name="Mean average precision by round on test")).to_be_visible()
    expect(page.locator(".status")).to_contain_text("Clients' mean average precision")
    expect(page.get_by_role("region", name="Accuracy", exact=True)).to_have_count(0)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    visited.open(f"/#/compare/{made['several']},{made['one']}")
    compared = page.get_by_role("region", name="Accuracy or Mean average precision", exact=True)
    other = page.get_by_role("region", name="Mean average precision or Accuracy", exact=True)
    expect(compared.or_(other)).to_be_visible()
    visited.open(f"/#/federations/{made['one']}")
    expect(page.get_by_role("region", name="Accuracy", exact=True)).to_be_visible()
