"""From an empty coordinator to a picture that the downloaded archive classifies, all of it on pages in a browser."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, expect

from promptfed.cli.predicting import model_of_export
from promptfed.client_service.serving.api import create_export_app
from promptfed.export.adapted_model import predictor_of
from tests.support import exports
from tests.support.client_processes import served
from tests.support.coordinators import InThread
from tests.support.own_images import SHAPES, picture, write_folder
from tests.support.waiting import PATIENCE
from tests.web.conftest import PATIENCE as MILLISECONDS
from tests.web.conftest import Visit

expect.set_options(timeout=MILLISECONDS)

SITES = ("filled", "outline")


def invited_and_joined(page: Page, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Create the invitations that are proposed; each site joins by the one line that the page shows."""
    page.get_by_role("button", name="Create 2 invitations").click()
    clients = []
    for site in SITES:
        invitation = page.get_by_label(f"Invitation for {site}, shown only now").input_value()
        line = [sys.executable, "-m", "promptfed", "join", invitation, "--yes", "--data", f"folder:{folder / site}"]
        with (folder / f"{site}.log").open("w") as log:
            line += ["--state-dir", str(folder / f"{site}-state")]
            clients.append(subprocess.Popen(line, stdout=log, stderr=log))
    return clients


def started_and_finished(page: Page, clients: list[subprocess.Popen[bytes]]) -> None:
    start = page.get_by_role("button", name="Start", exact=True)
    try:
        expect(start).to_be_enabled()
        start.click()
        page.get_by_role("button", name="Download the result", exact=True).wait_for()
        assert [client.wait(PATIENCE) for client in clients] == [0, 0]
    finally:
        for client in clients:
            client.kill()


def test_from_an_empty_coordinator_to_a_classified_picture(
    coordinator: InThread, visited: Visit, tmp_path: Path
) -> None:
    """An operator needs six fields, here seven, and four clicks until it runs, each site one line, a user a picture.

    In between, a researcher creates another method's with the same settings; results side by side: `test_operating`.
    """
    for seed, site in enumerate(SITES):
        write_folder(tmp_path / site, dict.fromkeys(SHAPES[:3], 6), domain=site, seed=seed)
    page = visited.page
    page.set_viewport_size({"width": 1280, "height": 900})
    visited.open()
    visited.sign_in()
    page.get_by_role("link", name="New federation").click()
    expect(page.get_by_text("Proposed: the most accurate")).to_be_visible()
    page.get_by_label("Name", exact=True).fill("shapes")
    page.get_by_label("What is to be told apart").fill(", ".join(sorted(SHAPES[:3])))
    page.get_by_label("How many sites").fill("2")
    page.get_by_label("Rounds", exact=True).fill("2")
    page.get_by_label("Backbone", exact=True).select_option("promptfed-tiny embedded")  # that of the pictures' kind
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("shapes")
    expect(page.get_by_role("button", name="Start", exact=True)).to_be_disabled()
    for number, site in enumerate(SITES, 1):
        page.get_by_label(f"Name of site {number}").fill(site)
    clients = invited_and_joined(page, tmp_path)
    started_and_finished(page, clients)
    assert {client["name"] for client in coordinator.get("shapes/clients")["clients"]} == set(SITES)
    expect(page.get_by_role("region", name="Result", exact=True)).to_contain_text("Gain of 2 sites")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download the result", exact=True).click()
    archive = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(archive)

    page.get_by_role("link", name="New with these settings").click()
    expect(page.get_by_label("Name", exact=True)).to_have_value("shapes-2")
    page.get_by_label("Method").select_option("promptfl")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("shapes-2")
    assert visited.violations() == visited.wrong == []

    image = tmp_path / "picture.png"
    picture("circle", 1).save(image)
    model, names = model_of_export(archive)
    predictor = predictor_of(model.serve(exports.backbone(), names))
    with served(
        create_export_app(
            {"name": "promptfl", "federation": "shapes", "stage": "serving", "round": 2}, predictor, None, "127.0.0.1"
        )
    ) as url:
        page.goto(url)
        page.locator("#ask").wait_for(state="visible")
        page.locator("#file").set_input_files(image)
        expect(page.locator(".picture .verdict")).to_have_text(re.compile("|".join(SHAPES[:3])))
