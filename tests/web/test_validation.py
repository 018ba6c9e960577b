"""The forest plot of a validation in a real browser, wide and narrow, and its downloads."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from promptfed.export.validation_reports import checked_report
from promptfed.shared.metrics.disclosure import FLOOR
from promptfed.shared.metrics.site_figures import site_figures
from promptfed.testing.clients import ScriptedClient, drive, spec
from tests.support.answers import answered
from tests.support.coordinators import InThread
from tests.web.conftest import PATIENCE, visit

if TYPE_CHECKING:
    import httpx
    from playwright.sync_api import Browser

expect = pytest.importorskip("playwright.sync_api").expect
expect.set_options(timeout=PATIENCE)
LONG = "north" + "x" * 40
TABLES = {LONG: (80, 20, 30, 90), "south": (60, 9, 12, 70), "west": (44, 31, 25, 50)}


@dataclass
class Evaluator(ScriptedClient):
    """Answers with figures of an invented confusion matrix."""

    def evaluate(self, task: dict[str, Any], accuracy: float | None = None) -> httpx.Response:
        confusion = np.array(TABLES[self.name]).reshape(1, 2, 2).repeat(2, axis=0)
        figures = site_figures(answered(confusion, np.random.default_rng(3)), FLOOR)
        path = f"{self.path}/tasks/{task['task_id']}/evaluation"
        body = {"splits": {}, "figures": figures.model_dump(mode="json")}
        return self.http.put(path, json=body, headers=self.headers)


def validated(coordinator: InThread) -> str:
    federation = coordinator.create(name="first", rounds=1)
    trainers = coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    drive(trainers)
    raw = spec(name="checked", participation={"min_clients": 3})
    state = trainers[0].http.get(
        f"/v1/federations/{federation}/prompts", headers=coordinator.operator | {"Accept": "application/octet-stream"}
    )
    raw |= {"kind": "validation", "continues": state.headers["etag"].strip('"')}
    raw |= {"class_names": ["0", "1"]}
    again = coordinator.post("/v1/federations", raw, status=201)["id"]
    path = f"/v1/federations/{again}/initial-state"
    assert coordinator.http.put(path, content=state.content, headers=coordinator.operator).status_code == 200
    token = coordinator.token(again)
    sites = [Evaluator(coordinator.http, again, name) for name in TABLES]
    for site in sites:
        assert site.enrol(token, role="evaluator", class_names=["0", "1"]).status_code == 201
    coordinator.post(f"{again}/start")
    drive(list(sites))
    return again


@pytest.mark.parametrize("width", [1400, 420])
def test_the_forest_plot_shows_sites_and_means(
    browser: Browser, coordinator: InThread, tmp_path: Path, width: int
) -> None:
    federation = validated(coordinator)
    made = visit(browser, coordinator, viewport={"width": width, "height": 900})
    made.open(f"/#/federations/{federation}")
    made.sign_in()
    panel = made.page.get_by_role("region", name="Validation", exact=True)
    expect(panel).to_contain_text("3 sites tested the state sha256:")
    plots = panel.locator("table")
    expect(plots).to_have_count(3)  # accuracy, and the AUROC of two classes
    report = coordinator.get(f"{federation}/validation")["report"]
    accuracy = next(figure for figure in report["figures"] if figure["figure"] == "accuracy")
    for row, (name, told) in zip(plots.first.locator("tr").all(), accuracy["sites"].items(), strict=False):
        expect(row).to_contain_text(name)
        expect(row).to_contain_text(f"{100 * told['value']:.1f} [{100 * told['low']:.1f}, {100 * told['high']:.1f}]")
        track, interval = (row.locator(at).bounding_box() for at in (".track", ".interval"))
        assert track is not None
        assert interval is not None
        assert track["width"] > 100
        for end, share in ((interval["x"], "low"), (interval["x"] + interval["width"], "high")):
            assert end == pytest.approx(track["x"] + 1 + (track["width"] - 2) * told[share], abs=1.5)
    expect(plots.first.locator("tr.mean")).to_contain_text("mean, I²")
    assert made.page.evaluate("document.documentElement.scrollWidth") == width
    panel.get_by_label("Show").select_option("scanner 1: 0")
    expect(plots).to_have_count(4)
    expect(plots.first).to_contain_text("AUROC of 0")
    for button, file in (("Figures (CSV)", "checked.csv"), ("Signed report (JSON)", "checked.json")):
        with made.page.expect_download() as download:
            panel.get_by_role("button", name=button).click()
        assert download.value.suggested_filename == file
        download.value.save_as(tmp_path / file)
    assert {row["site"] for row in csv.DictReader((tmp_path / "checked.csv").open())} == {*TABLES, "(mean)"}
    key = coordinator.get("/v1/signing-key")["public_key"]
    assert json.loads((tmp_path / "checked.json").read_text())["report"] == report
    assert checked_report((tmp_path / "checked.json").read_bytes(), key).report.federation.name == "checked"
    assert (made.wrong, made.violations()) == ([], [])
    made.page.context.close()
