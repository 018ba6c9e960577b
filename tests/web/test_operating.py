"""The operator's page in a real browser: from the first question to the result, live, by keyboard, names as text."""

from __future__ import annotations

import csv
import io
import json
import re
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from playwright.sync_api import Error, expect
from sqlalchemy import select, update

from promptfed.coordinator.store.tables import BlobRow, UpdateRow
from promptfed.export.reading import read_export
from promptfed.export.verification import verify_export
from promptfed.shared.methods import METHODS
from promptfed.shared.privacy.accounting import training_event
from promptfed.shared.service.invitation import decode as decode_invitation
from promptfed.shared.spec.spec import FederationSpec
from promptfed.shared.tensors.torch_tensors import decode, state_hash
from promptfed.testing.clients import FINGERPRINT, SHAPE, ScriptedClient, bearer, drive, secret_of, trained, update_body
from tests.support.coordinators import InThread
from tests.support.open_phases import open_first_phase
from tests.support.secure_clients import SecureClient
from tests.web.conftest import PATIENCE, Visit, visit

expect.set_options(timeout=PATIENCE)
ROOT = Path(__file__).parents[2]


if TYPE_CHECKING:
    from playwright.sync_api import Browser, Download, Page, Route


def finished(coordinator: InThread, name: str, **changes: object) -> str:
    """A federation of three clients that has come to its end; its id."""
    patient = {"min_clients": 2, "deadline_seconds": 3600}
    federation = coordinator.create(name=name, participation=patient, **changes)
    clients: list[ScriptedClient] = coordinator.enrol(federation, "a", "b")
    clients += coordinator.enrol(federation, "referee", role="evaluator", num_samples=0)
    coordinator.post(f"{federation}/start")
    drive(clients)
    coordinator.until(federation, state="finished")
    return federation


def tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def downloaded(page: Page, button: str) -> Download:
    with page.expect_download() as waiting:
        page.get_by_role("button", name=button, exact=True).click()
    return waiting.value


def test_training_times_and_settings_are_shown(coordinator: InThread, visited: Visit) -> None:
    finished(coordinator, "styles", training={"learning_rate": 0.25})
    page = visited.signed_in()
    expect(
        page.get_by_role("img", name="Training loss by round; in round 2 the clients' mean is 0.500")
    ).to_be_visible()
    tab(page, "Traffic")
    expect(page.get_by_role("img", name="Bytes by round; round 2:")).to_be_visible()
    times = page.get_by_role("region", name="Time", exact=True)
    expect(times).to_contain_text("Elapsed")
    expect(times).to_contain_text("Ended")
    expect(times.get_by_role("row")).to_have_count(3)  # the head, a and b
    expect(times.get_by_role("img", name="Seconds by round; round 2 took")).to_be_visible()

    tab(page, "Settings")
    settings = page.get_by_role("region", name="Settings", exact=True)
    rows = settings.get_by_role("row")
    expect(rows.nth(1).locator("b")).to_have_count(1)  # what differs comes first
    paths = rows.evaluate_all(
        "rows => rows.slice(1).map(row => [row.cells[0].firstChild.textContent, !!row.querySelector('b')])"
    )
    changed = [name for name, differs in paths if differs]
    assert [name for name, _ in paths][: len(changed)] == changed
    wanted = {"Learning rate", "Rounds", "Learned vectors", "Sites that must have joined", "Seed of random numbers"}
    assert wanted <= set(changed)
    assert "Passes over the images in a round" not in changed
    assert len(paths) > 40
    assert not [name for name, _ in paths if re.search(r"[a-z][._][a-z]", name)]  # words, and no keys of the schema
    settings.get_by_label("Search").fill("learning_rate")  # whoever knows the key finds it all the same
    expect(settings.get_by_role("status")).to_have_text("2 settings")
    row = settings.get_by_role("row", name="Learning rate").first
    expect(row).to_contain_text("0.25")
    expect(row).to_contain_text("0.02")  # what a sweep found for this method on this backbone


LEFT = """async ([view, reports]) => {
  const { secondsLeft } = await import("/web/times.js");
  return secondsLeft(view, reports);
}"""


def test_what_is_left_follows_from_the_newest_rounds(coordinator: InThread, visited: Visit) -> None:
    visited.open()
    view = {"state": "running", "spec": {"rounds": 10}}
    future = "2999-01-01T00:00:00Z"  # ended "later than now": nothing of the rest has passed
    lengths = [60.0, 50.0, *[10.0] * 5]
    reports = [{"round": round, "ended_at": future, "seconds": seconds} for round, seconds in enumerate(lengths)]
    assert visited.page.evaluate(LEFT, [view, reports]) == 4 * 10
    past = [report | {"ended_at": "2000-01-01T00:00:00Z"} for report in reports]
    assert visited.page.evaluate(LEFT, [view, past]) == 3 * 10  # the open round is late; three more are to come
    assert visited.page.evaluate(LEFT, [view, reports[:1]]) is None  # the first evaluation is no round
    assert visited.page.evaluate(LEFT, [view | {"state": "paused"}, reports]) is None


DRAWN = """async (clients) => {
  const { drawn } = await import("/web/series.js");
  return Object.fromEntries(drawn(clients, new Map()).map((one) => [one.label, one.data]));
}"""


def test_many_clients_are_drawn_as_mean_lowest_and_highest(coordinator: InThread, visited: Visit) -> None:
    visited.open()
    clients = [
        {"name": str(at), "role": "trainer", "label": str(at), "points": [{"x": 2, "y": at}, {"x": 1, "y": 2 * at}]}
        for at in range(9)
    ]
    found = visited.page.evaluate(DRAWN, [one | {"zero": []} for one in clients])
    assert found["mean of clients"] == [{"x": 1, "y": 8}, {"x": 2, "y": 4}]
    assert found["lowest"] == [{"x": 1, "y": 0}, {"x": 2, "y": 0}]
    assert found["highest"] == [{"x": 1, "y": 16}, {"x": 2, "y": 8}]


def test_federations_are_found_and_laid_side_by_side(coordinator: InThread, visited: Visit) -> None:
    first = finished(coordinator, "slow")
    # What a spec leaves out has the method's default, as what it writes out may have: that is no difference.
    # The same backbone with and without its fingerprint is none either.
    pinned = {"fingerprint": FINGERPRINT, "shape": SHAPE}
    second = finished(coordinator, "fast", training={"learning_rate": 0.25, "epochs": 5}, backbone=pinned)
    for name in ("eyes", "skin"):
        coordinator.create(name=name)
    page = visited.signed_in()
    listed = page.get_by_role("navigation", name="Federations").get_by_role("listitem")
    expect(listed).to_have_count(4)
    page.get_by_label("Search federations").fill("fast promptfl")
    expect(listed).to_have_count(1)
    page.get_by_label("Search federations").fill("")
    page.get_by_label("State", exact=True).select_option("enrolling")
    expect(listed).to_have_count(2)
    page.get_by_label("State", exact=True).select_option("")

    page.get_by_role("link", name="fast").click()
    page.get_by_role("group", name="Steer this federation").get_by_role("link", name="Compare").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare federations")
    expect(page.get_by_role("checkbox", name="fast")).to_be_checked()
    page.get_by_role("checkbox", name="slow").press("Space")
    expect(page).to_have_url(re.compile(f"#/compare/{second},{first}$"))
    expect(page.get_by_role("img", name="Mean accuracy by round; last: slow 50.0 %")).to_be_visible()
    expect(page.get_by_role("img", name="Mean training loss by round; last: slow 0.500, fast 0.500")).to_be_visible()
    figures = page.get_by_role("region", name="Figures of the federations")
    expect(figures.get_by_role("row", name="accuracy, gain")).to_contain_text(
        re.compile(r"(50\.0 %\+25\.0 ± \d+\.\d){2}")
    )
    differing = page.get_by_role("region", name="Settings that differ").get_by_role("row")
    expect(differing).to_have_count(2)
    expect(differing.nth(1)).to_have_text("Learning rate0.020.25")


def test_seven_questions_fit_on_one_screen_and_each_error_stands_at_its_field(
    browser: Browser, coordinator: InThread
) -> None:
    visited = visit(browser, coordinator, viewport={"width": 1280, "height": 900})
    page = visited.signed_in()
    expect(page.get_by_role("heading", level=1)).to_have_text("Train one model at many sites")
    page.get_by_role("link", name="New federation").click()
    expect(page.get_by_text("Proposed: the most accurate")).to_be_visible()
    for name in ("Name", "What is to be told apart", "How many sites", "Rounds", "Backbone", "Method"):
        expect(page.get_by_label(name, exact=True)).to_be_visible()
    assert page.get_by_role("radiogroup").count() == 2  # goal and privacy
    create = page.get_by_role("button", name="Create", exact=True)
    assert create.bounding_box()["y"] + create.bounding_box()["height"] <= 900
    assert page.evaluate("document.documentElement.scrollHeight") <= 900

    method = page.get_by_label("Method", exact=True)
    expect(method).to_have_value("promptfl")  # no class is named yet
    page.get_by_label("What is to be told apart").fill("circle, square, star")
    page.get_by_label("What is to be told apart").blur()
    expect(method).to_have_value("fedtaskres")
    page.get_by_text("Classes that come later").click()
    expect(method).to_have_value("fedlora")
    expect(page.get_by_text("+2.2 points on classes that nobody trained, 82.3 kB a site and round")).to_be_visible()
    method.select_option("promptfl_prox")
    expect(page.get_by_text("Your choice, +1.1 points")).to_be_visible()

    page.locator("summary").filter(has_text="All settings").click()
    expect(page.get_by_text("None is changed.")).to_be_visible()
    search = page.get_by_label("Search by name")
    search.fill("rate")
    rate = page.get_by_label("Learning rate", exact=True)
    expect(rate).to_have_attribute("placeholder", "0.003")  # what a sweep found for the backbone of photographs
    page.get_by_label("Backbone", exact=True).select_option(label="CLIP ViT-B/16 of OpenAI")
    expect(rate).to_have_attribute("placeholder", "0.002")
    page.get_by_label("Backbone", exact=True).select_option("promptfed-tiny embedded")
    search.fill("passes")
    epochs = page.get_by_label("Passes over the images in a round")
    epochs.fill("two")
    page.get_by_label("Name", exact=True).fill("two words")
    page.get_by_label("Rounds", exact=True).fill("-1")
    create.click()
    expect(page.get_by_role("alert").filter(has_text="fields")).to_have_text("3 fields need another value.")
    expect(page.get_by_label("Name", exact=True)).to_be_focused()
    for field in (page.get_by_label("Name", exact=True), page.get_by_label("Rounds", exact=True), epochs):
        expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.locator("[id='wrong-rounds']")).to_contain_text("greater than or equal to 0")
    wrong = page.locator("[id='wrong-name']")
    expect(wrong).to_contain_text("letters, digits and . _ - without spaces")
    page.get_by_label("Name", exact=True).fill("formed")  # An error goes with its cause, and the other ones stay.
    expect(wrong).to_be_empty()
    expect(page.get_by_label("Name", exact=True)).not_to_have_attribute("aria-invalid", "true")
    expect(page.get_by_text("fields need another value")).to_have_count(0)
    expect(page.locator("[id='wrong-rounds']")).to_contain_text("greater than or equal to 0")
    page.get_by_label("Rounds", exact=True).fill("3")
    epochs.fill("2")
    search.fill("weight μ")
    page.get_by_label("Weight μ of").fill("0.5")
    page.get_by_text("Secure sums:").click()
    page.get_by_role("button", name="Only check").click()
    expect(page.get_by_text("These settings are good; nothing was created.")).to_be_visible()
    coordinator.get("formed", status=404)
    create.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("formed")
    spec = coordinator.get("formed")["spec"]
    assert (spec["method"]["name"], spec["method"]["mu"], spec["rounds"]) == ("promptfl_prox", 0.5, 3)
    assert (spec["training"]["epochs"], spec["participation"]["min_clients"]) == (2, 3)
    assert spec["secure_aggregation"]["minimum"] == 3
    assert spec["class_names"] == ["circle", "square", "star"]
    expect(page.get_by_label("Name of site 3")).to_have_value("site-3")
    assert (visited.wrong, visited.violations()) == ([], [])
    page.context.close()


RUN = """\
# Three sites, one of them unseen.
name: pasted
method: {name: promptfl, "m": 4}
training:
  learning_rate: 0.5  # high
clients:
  - {name: "ward-{index}", count: 2, data: "folder:/images?client={index}"}
  - name: referee
    role: evaluator
    data: symbols:sketch
"""


def test_a_run_file_becomes_a_federation_and_its_clients_invitations(coordinator: InThread, visited: Visit) -> None:
    page = visited.signed_in()
    text = page.get_by_label("Run file, in YAML or JSON")
    for wrong, told in (
        ("name: eyes\nrounds: 3: 4", "line 2: a colon is not allowed here"),
        (RUN.replace('m": 4', 'm": -4').replace("rate: 0.5", "rate: 0"), "Learned vectors: "),
        (json.dumps({"name": "two words", "method": {"name": "promptfl"}}), "Name of the federation: "),
    ):
        text.fill(wrong)
        page.get_by_role("button", name="Create from it").click()
        expect(page.locator("#wrong-run")).to_contain_text(told)
        expect(text).to_have_attribute("aria-invalid", "true")
    text.fill(RUN)
    page.get_by_role("button", name="Create from it").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("pasted")
    spec = coordinator.get("pasted")["spec"]
    assert (spec["method"]["m"], spec["training"]["learning_rate"]) == (4, 0.5)
    assert spec["participation"]["min_clients"] == 2
    names = [page.get_by_label(f"Name of site {number}").input_value() for number in (1, 2, 3)]
    assert names == ["ward-0", "ward-1", "referee"]
    expect(page.get_by_label("Role of site 3")).to_have_value("evaluator")


MEASURED = """async () => (await import("/web/goals.js")).MEASURED"""


def test_gains_and_bytes_of_methods_are_those_of_the_documents(coordinator: InThread, visited: Visit) -> None:
    visited.open()
    text = (ROOT / "docs/guides/compare-methods.md").read_text()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("| `")]
    number = {"-": None}
    wanted = {
        row[0].strip("`"): [*(number.get(cell) if cell in number else float(cell) for cell in row[2:5]), row[7], row[1]]
        for row in rows
        if len(row) == 9
    }
    found = visited.page.evaluate(MEASURED)
    assert found.pop("zero_shot")[:4] == wanted.pop("zero_shot")[:4]
    assert found == wanted


def test_start_waits_for_its_sites_and_for_one_set_of_class_names(coordinator: InThread, visited: Visit) -> None:
    federation = coordinator.create(name="styles", participation={"min_clients": 2})
    coordinator.enrol(federation, "a", class_names=["cat", "dog"])
    page = visited.signed_in()
    start = page.get_by_role("button", name="Start", exact=True)
    expect(start).to_be_disabled()
    expect(start).to_have_accessible_description("It can start once 2 sites that train have joined; 1 has so far.")
    coordinator.enrol(federation, "b", class_names=["cat", "hound"])
    expect(start).to_have_accessible_description(re.compile("class names differ beside 1 that all have .*'hound'"))
    expect(start).to_be_disabled()
    [b] = [one for one in coordinator.get(f"{federation}/clients")["clients"] if one["name"] == "b"]
    assert coordinator.http.delete(
        f"/v1/federations/{federation}/clients/{b['client_id']}", headers=coordinator.operator
    ).is_success
    coordinator.enrol(federation, "c", class_names=["dog", "cat"])
    expect(start).to_be_enabled()


def test_a_result_is_continued_with_its_settings_sites_and_state(coordinator: InThread, visited: Visit) -> None:
    finished(coordinator, "styles", class_names=["circle", "square", "star"], training={"learning_rate": 0.25})
    page = visited.signed_in()
    page.get_by_role("link", name="Continue from it").click()
    expect(page.get_by_label("Name", exact=True)).to_have_value("styles-2")
    expect(page.get_by_label("Method", exact=True)).to_be_disabled()
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("styles-2")
    before, after = coordinator.get("styles"), coordinator.get("styles-2")
    assert after["spec"]["continues"] == before["state_hash"]
    assert after["spec"]["training"] == before["spec"]["training"]
    assert page.get_by_label("Name of site 3").input_value() == "referee"
    coordinator.enrol(after["id"], "a", "b")
    page.get_by_role("button", name="Start", exact=True).click()  # the state was supplied
    expect(page.locator(".status .badge")).to_have_text("running")


def test_tokens_withdrawal_and_deletion(coordinator: InThread, visited: Visit) -> None:
    federation = coordinator.create(name="styles", participation={"min_clients": 2})
    coordinator.enrol(federation, "a", "b")
    page = visited.signed_in()
    page.get_by_role("button", name="Add a site").click()
    page.get_by_label("Name of site 1").fill("ward-3")
    page.get_by_label("Role of site 1").select_option("trainer")
    page.get_by_role("button", name="Add a site").click()
    page.get_by_label("Name of site 2").fill("ward-4")
    page.get_by_text("several sites with one invitation").click()
    page.get_by_label("Sites that may join with each").fill("2")
    page.get_by_role("button", name="Create 2 invitations").click()
    shown = page.get_by_label("Invitation for ward-3, shown only now")
    expect(shown).to_be_focused()
    expect(page.get_by_text("promptfed join - --data folder:/path/to/images")).to_be_visible()
    invitation = decode_invitation(shown.input_value())
    assert (invitation.coordinator, invitation.federation) == (coordinator.url, "styles")
    assert page.get_by_label("Token of ward-3").input_value() == invitation.token
    joined = coordinator.client("styles", "c").enrol(invitation.token)
    assert joined.status_code == 201, joined.text
    tokens = page.get_by_role("region", name="Invited sites")
    expect(tokens.get_by_role("row", name="ward-3")).to_contain_text("trainsjoined: c1 of 2 sites joined with it")
    expect(tokens.get_by_role("row", name="ward-4")).to_contain_text("has not joined yet")
    page.get_by_role("button", name="Revoke ward-3").click()
    page.get_by_role("button", name="Revoke it").click()
    expect(page.get_by_role("row", name="ward-3")).to_have_count(0)
    page.reload()  # nothing shows an invitation again
    expect(page.get_by_role("row", name="ward-4")).to_be_visible()
    expect(page.get_by_text("shown only now")).to_have_count(0)
    expect(page.get_by_text("An invitation is shown only once.")).to_be_visible()
    page.get_by_role("button", name="Make ward-4 anew").click()
    again = decode_invitation(page.get_by_label("Invitation for ward-4, shown only now").input_value())
    assert coordinator.client("styles", "d").enrol(again.token).status_code == 201
    expect(page.get_by_role("row", name="ward-4")).to_contain_text("joined: d")
    expect(page.get_by_role("button", name="Make ward-4 anew")).to_have_count(0)

    tab(page, "Clients")
    page.get_by_text("Take a client out").click()
    page.get_by_label("Client", exact=True).select_option("b")
    page.get_by_role("button", name="Withdraw", exact=True).click()
    page.get_by_role("button", name="Keep it").click()
    assert coordinator.get("styles")["clients"]["withdrawn"] == 0
    page.get_by_role("button", name="Withdraw", exact=True).click()
    page.get_by_role("button", name="Withdraw it for good").click()
    expect(page.get_by_role("row", name="b trainer")).to_contain_text("withdrawn")
    page.get_by_role("button", name="Delete its updates").click()
    page.get_by_role("button", name="Delete them for good").click()
    expect(page.locator("#announcer")).to_have_text("b has its updates deleted")

    coordinator.post(f"{federation}/cancel")
    visited.tab_to("Delete")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    coordinator.get("styles")
    visited.tab_to("Delete")
    page.keyboard.press("Enter")
    visited.tab_to("Delete it for good")
    page.keyboard.press("Enter")
    expect(page.locator("#announcer")).to_have_text("styles is deleted")
    expect(page.get_by_role("heading", level=1)).to_have_text("Train one model at many sites")
    coordinator.get("styles", status=404)


FIRST = "Download the result"


def test_all_can_be_taken_away_and_the_export_is_one(coordinator: InThread, visited: Visit, tmp_path: Path) -> None:
    shape = {"fingerprint": FINGERPRINT, "shape": SHAPE}
    finished(coordinator, "styles", class_names=["circle", "square", "star"], backbone=shape)
    page = visited.signed_in()
    numbers = downloaded(page, "Numbers (CSV)")
    assert numbers.suggested_filename == "styles-metrics.csv"
    rows = list(csv.DictReader(io.StringIO(Path(numbers.path()).read_text())))
    assert {row["round"] for row in rows} >= {"1", "2"}
    reports = json.loads(Path(downloaded(page, "Reports (JSON)").path()).read_text())
    assert [report["round"] for report in reports] == [0, 1, 2]
    prompts = downloaded(page, "Prompts")
    assert prompts.suggested_filename == "styles-round-2.safetensors"
    assert state_hash(decode(Path(prompts.path()).read_bytes())[0]) == coordinator.get("styles")["state_hash"]
    card = Path(downloaded(page, "Card").path()).read_text()
    assert card.startswith("# styles: promptfl after round 2 of 2\n")
    assert "| a | trainer | test | 25.0 % | 50.0 % [" in card

    assert page.get_by_role("group", name="Steer this federation").get_by_role("button").first.inner_text() == FIRST
    archive, folder = downloaded(page, FIRST), tmp_path / "export"
    with zipfile.ZipFile(archive.path()) as packed:
        assert packed.testzip() is None
        packed.extractall(folder)
    model, names = read_export(folder)
    assert (model.round, names) == (2, ("circle", "square", "star"))
    assert model.missing() is None
    key = coordinator.get("/v1/signing-key")["public_key"]
    verified = verify_export(folder, key)
    assert (verified.card.federation.name, verified.remarks) == ("styles", ()), "the text was compared"
    assert {path.name for path in folder.iterdir()} == {"prompts.safetensors", "card.json", "card.json.sig", "card.md"}
    assert "promptfed export" in (folder / "card.md").read_text(), "where class weights come from"
    expect(page.get_by_role("region", name="Result")).to_contain_text("promptfed export styles makes class weights")


def test_whether_all_sites_are_invited_follows_from_the_sites(coordinator: InThread, visited: Visit) -> None:
    coordinator.create(name="styles", participation={"min_clients": 2})
    page = visited.signed_in()
    page.get_by_role("button", name="Leave out site-2").click()
    page.get_by_label("Name of site 1").fill("ward")
    address = page.get_by_label("Address at which the sites reach this coordinator")
    expect(address).to_be_visible()  # of this machine alone, as the page's own is
    address.fill("https://hospital.example:8443")
    page.get_by_role("button", name="Create 1 invitation").click()
    made = decode_invitation(page.get_by_label("Invitation for ward, shown only now").input_value())
    assert made.coordinator == "https://hospital.example:8443"
    expect(page.get_by_text("1 more site must be invited before it can start.")).to_be_visible()
    page.get_by_role("button", name="Add a site").click()
    page.get_by_role("button", name="Create 1 invitation").click()
    expect(page.get_by_text("Every site of the plan is invited.")).to_be_visible()
    page.get_by_role("button", name="Revoke ward").click()
    page.get_by_role("button", name="Revoke it").click()
    expect(page.get_by_label("Name of site 1")).to_have_value("ward")  # it can be invited again
    page.get_by_role("button", name="Create 1 invitation").click()
    expect(page.get_by_text("Every site of the plan is invited.")).to_be_visible()


def test_a_click_shows_that_it_is_worked_on_and_times_go_on(coordinator: InThread, visited: Visit) -> None:
    federation = coordinator.create(name="styles", participation={"min_clients": 2})
    coordinator.enrol(federation, "a", "b")
    page = visited.page
    waiting: list[Route] = []
    page.route("**/start", lambda route: waiting.append(route))
    visited.signed_in()
    page.get_by_role("button", name="Start", exact=True).click()
    busy = page.locator(".status .acts[aria-busy=true]")
    expect(busy).to_be_visible()
    waiting[0].continue_()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(busy).to_have_count(0)
    coordinator.post(f"{federation}/cancel")
    expect(page.locator(".status .badge")).to_have_text("cancelled")  # nothing is asked for from here on
    tab(page, "Clients")
    seen = page.get_by_role("row", name="a trainer").locator("time[data-since]")
    before = seen.inner_text()
    page.wait_for_function("before => document.querySelector('time[data-since]').textContent !== before", arg=before)


def test_sites_follow_the_number_of_sites(coordinator: InThread, visited: Visit) -> None:
    federation = finished(coordinator, "styles")
    page = visited.page
    for number, names in (("3", ["a", "b", "site-1", "referee"]), ("1", ["a", "referee"])):
        visited.open(f"/#/new/{federation}")
        if number == "3":
            visited.sign_in()
        else:
            page.reload()
        expect(page.get_by_label("Name", exact=True)).to_have_value("styles-2")
        page.get_by_label("Name", exact=True).fill(f"again-{number}")
        page.get_by_label("How many sites").fill(number)
        page.get_by_role("button", name="Create", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(f"again-{number}")
        sites = page.get_by_role("list", name="Sites to invite").get_by_role("textbox")
        expect(sites).to_have_count(len(names))
        assert [sites.nth(at).input_value() for at in range(len(names))] == names


def test_a_viewer_sees_what_operators_may_do(coordinator: InThread, visited: Visit) -> None:
    federation = finished(coordinator, "styles")
    coordinator.create(name="next")
    minted = coordinator.post("/v1/operators", {"name": "watcher", "role": "viewer"}, status=201)
    page = visited.page
    visited.open("/#/federations/next")
    page.get_by_label("Operator token").fill(minted["token"])
    page.keyboard.press("Enter")
    for name in ("Start", "Cancel", "Add a site", "Create 2 invitations"):
        expect(page.get_by_role("button", name=name, exact=True)).to_be_disabled()
    page.goto(f"{coordinator.url}/#/new")
    expect(page.get_by_role("button", name="Create", exact=True)).to_be_disabled()
    page.goto(f"{coordinator.url}/#/federations/{federation}")
    expect(page.get_by_role("button", name="Download the result", exact=True)).to_be_enabled()
    expect(page.get_by_role("button", name="Delete", exact=True)).to_be_disabled()


def described(schema: dict[str, Any], prefix: str, known: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Path and description of each setting of a schema, with its sections opened."""
    for name, given in schema.get("properties", {}).items():
        one = {**known[given["$ref"].rpartition("/")[2]], **given} if "$ref" in given else given
        choices = [
            known[part["$ref"].rpartition("/")[2]] if "$ref" in part else part for part in one.get("anyOf", [one])
        ]
        sections = [part for part in choices if part.get("properties")]
        if sections and name != "method":
            yield from described(sections[0], f"{prefix}{name}.", known)
        else:
            yield prefix + name, one.get("description", "")


def test_no_setting_is_shown_under_a_code_name(coordinator: InThread, visited: Visit) -> None:
    schemas = [
        (FederationSpec.model_json_schema(), ""),
        *((METHODS[name].Hyper.model_json_schema(), "method.") for name in METHODS),
    ]
    settings = [pair for schema, prefix in schemas for pair in described(schema, prefix, schema.get("$defs", {}))]
    visited.open()
    ask = "all => import('/web/words.js').then((words) => all.map(([path, about]) => words.nameOf(path, about)))"
    names = visited.page.evaluate(ask, settings)
    for (path, about), name in zip(settings, names, strict=True):
        key = path.rpartition(".")[2].replace("_", " ")
        assert not about or name.lower() != key or len(key) > 5, (path, name)
        assert re.match(r"[A-Zα-ωμ]", name), (path, name)
        assert len(name) > 3, (path, name)


def test_a_role_that_has_changed_is_told_and_the_session_stays(coordinator: InThread, visited: Visit) -> None:
    coordinator.create(name="styles")
    minted = coordinator.post("/v1/operators", {"name": "watcher", "role": "viewer"}, status=201)
    page = visited.page
    visited.open()
    page.route("**/federations?limit=1", lambda route: route.fulfill(json={"federations": [], "next": None}))
    page.get_by_label("Operator token").fill(minted["token"])
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel it for good").click()
    expect(page.get_by_role("alert")).to_contain_text("this call takes the role operator")
    coordinator.enrol("styles", "a")  # the page looks again, and what was refused stays told
    expect(page.locator(".status .what")).to_contain_text("1 trainer")
    expect(page.get_by_role("alert")).to_contain_text("this call takes the role operator")
    expect(page.get_by_role("heading", level=1)).to_have_text("styles")
    assert coordinator.get("styles")["state"] == "enrolling"


def test_a_refusal_goes_when_its_cause_is_gone(coordinator: InThread, visited: Visit) -> None:
    federation = coordinator.create(name="styles")
    coordinator.enrol(federation, "a", "b")
    page = visited.page
    problem = {"type": "cannot-start", "title": "no", "status": 409, "detail": "the backbone is too small"}
    page.route("**/start", lambda route: route.fulfill(status=409, json=problem))
    visited.signed_in("/#/federations/styles")
    page.get_by_role("button", name="Start", exact=True).click()
    refusal = page.locator(".status").get_by_role("alert").filter(has_text="the backbone is too small")
    expect(refusal).to_be_visible()
    page.wait_for_timeout(5000)  # The page looks again meanwhile, and nothing has changed.
    expect(refusal).to_be_visible()
    coordinator.enrol(federation, "c")
    expect(page.locator(".status .what")).to_contain_text("3 trainers")
    expect(refusal).to_have_count(0)


HTML = "<img src=x onerror=alert(1)>"


def enrolled(coordinator: InThread, *names: str, name: str = "styles") -> tuple[str, list[ScriptedClient]]:
    """A federation with these trainers and an evaluator of an unseen domain."""
    # No deadline passes while a busy machine is slow.
    federation = coordinator.create(name=name, participation={"min_clients": 2, "deadline_seconds": 3600})
    domain = {"name": "neon", "description": "a neon sign of a {}"}
    clients = coordinator.enrol(federation, *names, domain=domain, device=HTML)
    unseen = {"name": "sketch", "description": "a sketch of a {}"}
    clients += coordinator.enrol(federation, "referee", role="evaluator", num_samples=0, domain=unseen)
    return federation, clients


def test_a_federation_is_watched_and_steered_from_its_start_to_its_end(coordinator: InThread, visited: Visit) -> None:
    federation, clients = enrolled(coordinator, "a", "b")
    page = visited.page
    visited.open()
    page.get_by_label("Operator token").fill("0" * 64)
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("This token is not known here.")
    visited.sign_in()
    expect(page.get_by_role("heading", level=1)).to_have_text("styles")
    badge = page.locator(".status .badge")
    expect(badge).to_have_text("enrolling")

    visited.tab_to("Start")
    page.keyboard.press("Enter")
    expect(badge).to_have_text("running")
    roll = page.locator(".roll")
    expect(roll.locator("[data-state=awaited]")).to_have_count(3)
    expect(page.locator(".left")).to_contain_text("awaited until")
    for client in clients:
        assert client.evaluate(coordinator.task(client), 0.375).status_code == 201
    task = coordinator.task(clients[0])
    expect(page.locator(".phase")).to_have_text("Round 1, train: 0 of 2 answered")

    tensors = trained(clients[0].payload(task), "a", task)
    assert clients[0].send(task, update_body(tensors | {HTML: torch.ones(1)}, task)).status_code == 422
    assert clients[0].answer(task).status_code == 201
    expect(page.locator(".phase")).to_have_text("Round 1, train: 1 of 2 answered")
    expect(roll.locator("[data-state=answered] b")).to_have_text("a")
    expect(page.locator(".troubles")).to_contain_text("refused: unknown-tensor")
    expect(page.locator(".troubles")).to_contain_text(HTML)

    visited.tab_to("Pause")
    page.keyboard.press("Enter")
    expect(badge).to_have_text("paused")
    assert coordinator.get(federation)["state"] == "paused"
    visited.tab_to("Resume")
    page.keyboard.press("Space")
    expect(badge).to_have_text("running")
    drive(clients)
    expect(badge).to_have_text("finished")
    expect(page.locator("#link")).to_have_text("finished")
    expect(page.get_by_role("button", name="Pause")).to_have_count(0)
    results = page.get_by_role("region", name="Accuracy after round 2")
    expect(results.get_by_role("row", name="a neon")).to_contain_text(
        "neon · 20 images25.0 %50.0 %29.9–70.1+25.0 ± 28.0"
    )
    expect(page.get_by_role("region", name="Result", exact=True)).to_contain_text("Gain of 2 sites+25.0 ± 19.8")
    expect(results).to_contain_text("sketch (unseen)")
    assert visited.token not in page.url
    assert page.evaluate("JSON.stringify([localStorage, document.cookie])") == '[{},""]'


def test_what_looks_wrong_is_listed_once_it_has_ended(coordinator: InThread, visited: Visit) -> None:
    federation, clients = enrolled(coordinator, "a", "b")
    for client in clients:
        client.accuracy = 0.1  # the template's is 0.25
    coordinator.post(f"{federation}/start")
    page = visited.signed_in()
    expect(page.locator(".status .badge")).to_have_text("running")
    remarks = page.get_by_role("list", name="Remarks")
    expect(remarks).to_be_hidden()
    drive(clients)
    expect(remarks.get_by_role("listitem").last).to_contain_text("Below zero-shot by 15.0 points")
    expect(remarks.locator("code")).to_have_text("promptfed tune RUN.yaml --methods auto")


def test_what_is_not_there_cannot_be_steered(coordinator: InThread, visited: Visit) -> None:
    enrolled(coordinator, "a", "b")
    page = visited.signed_in("/#/federations/absent")
    expect(page.get_by_role("alert")).to_have_text("there is no federation 'absent' here: check its name")
    expect(page.get_by_role("group", name="Steer this federation").get_by_role("button")).to_have_count(0)


def test_names_are_text_whoever_chose_them(coordinator: InThread, visited: Visit) -> None:
    """The coordinator refuses such names at enrolment; the page does not rely on it."""
    enrolled(coordinator, "a", "b")
    page = visited.page

    def renamed(route: Route) -> None:
        answer = route.fetch()
        body = answer.text().replace('"a"', json.dumps(HTML)).replace('"neon"', '"<b>neon</b>"')
        route.fulfill(response=answer, body=body)

    page.route("**/clients?*", renamed)
    visited.signed_in()
    tab(page, "Clients")
    row = page.get_by_role("region", name="3 clients").get_by_role("row").nth(1)
    expect(row).to_contain_text(HTML)
    expect(row).to_contain_text("<b>neon</b>")
    assert page.locator("#main img, #main b b").count() == 0
    page.unroute_all(behavior="ignoreErrors")  # the page asks every few seconds, also while it is closed


def test_reloading_keeps_the_token_for_the_tab_and_signing_out_forgets_it(
    coordinator: InThread, visited: Visit
) -> None:
    enrolled(coordinator, "a", "b")
    page = visited.signed_in()
    expect(page.get_by_role("heading", level=1)).to_have_text("styles")
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("styles")
    assert page.evaluate("localStorage.length") == 0
    with page.context.new_page() as other:
        other.goto(page.url)
        expect(other.get_by_role("heading", level=1)).to_have_text("Sign in")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
    assert page.evaluate("sessionStorage.length") == 0
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
    expect(page.get_by_text("styles")).to_have_count(0)


def test_the_link_to_the_content_stays_in_the_federation(coordinator: InThread, visited: Visit) -> None:
    enrolled(coordinator, "a", "b")
    page = visited.signed_in()
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_have_text("styles")
    address = page.url
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    expect(heading).to_have_text("styles")
    assert page.url == address


def test_what_does_not_answer_is_not_called_live(coordinator: InThread, visited: Visit) -> None:
    enrolled(coordinator, "a", "b")
    page = visited.page
    page.route("**/events?*", lambda route: route.abort())
    visited.open()
    page.evaluate(
        "window.said = []; const link = document.getElementById('link');"
        "new MutationObserver(() => window.said.push(link.textContent)).observe(link, {childList: true})"
    )
    visited.sign_in()
    expect(page.locator("#link")).to_have_text("reconnecting…")
    assert set(page.evaluate("window.said")) == {"reconnecting…"}
    page.unroute("**/events?*")
    expect(page.locator("#link")).to_have_text("live")


def test_the_policy_forbids_markup_made_of_text_and_tests_would_see_it(browser: Browser, coordinator: InThread) -> None:
    made = visit(browser, coordinator)
    made.open()
    with pytest.raises(Error, match="TrustedHTML"):
        made.page.evaluate("document.body.innerHTML = '<b>x</b>'")
    made.page.evaluate("document.body.setAttribute('style', 'color: red')")
    # Both are told a moment later, by events.
    made.page.wait_for_function("window.violations.length >= 2")
    assert set(made.violations()) == {"require-trusted-types-for", "style-src-attr"}
    end = time.monotonic() + PATIENCE / 1000
    while not made.wrong:
        assert time.monotonic() < end, "the console says nothing"
        made.page.wait_for_timeout(50)
    made.page.context.close()


def test_what_is_damaged_and_whose_change_is_far_off_is_said(coordinator: InThread, visited: Visit) -> None:
    """A federation that waits for damaged bytes says which; a change ten times its round's median is pointed out."""
    federation = coordinator.create(
        name="styles", rounds=2, participation={"min_clients": 3, "deadline_seconds": 3600},
        admission={"max_update_norm": 1e6},
    )  # fmt: skip
    clients = coordinator.enrol(federation, "a", "b", "c")
    coordinator.post(f"{federation}/start")
    tasks = coordinator.training(clients)
    coordinator.post(f"{federation}/pause")
    for client, task, step in zip(clients, tasks, (1.0, 1.25, 50.0), strict=True):
        body = update_body({"context": client.payload(task)["context"] + step}, task)
        client.sent[task["task_id"]] = body
        assert client.send(task, body).status_code == 201
    with coordinator.registry.database.write() as session:
        [digest] = session.scalars(select(UpdateRow.sha256).where(UpdateRow.task_id == tasks[0]["task_id"]))
        [whole] = session.scalars(select(BlobRow.content).where(BlobRow.digest == digest))
        session.execute(update(BlobRow).where(BlobRow.digest == digest).values(content=b"else"))
    coordinator.registry.blobs.admitted.forget([digest])  # as after a restart
    page = visited.signed_in()
    visited.tab_to("Resume")
    page.keyboard.press("Enter")
    reason = page.locator(".status .reason")
    expect(reason).to_contain_text(f"damaged: {digest} has changed")
    expect(page.locator(".status .badge")).to_have_text("paused")
    with coordinator.registry.database.write() as session:
        session.execute(update(BlobRow).where(BlobRow.digest == digest).values(content=whole))
    visited.tab_to("Resume")
    page.keyboard.press("Enter")
    expect(page.locator(".status .badge")).to_have_text("running")
    expect(reason).to_be_hidden()
    trouble = page.locator(".troubles")
    expect(trouble).to_contain_text("far off in round 1")
    expect(trouble).to_contain_text("c")
    expect(trouble).to_contain_text("its change is 40")
    expect(trouble).to_contain_text("times as long as the round's median")


def test_of_secure_sums_the_steps_are_shown_and_what_nobody_sees_is_said(coordinator: InThread, visited: Visit) -> None:
    federation = coordinator.create(
        name="sums", rounds=1, participation={"min_clients": 3, "deadline_seconds": 3600}, secure_aggregation={}
    )
    token = coordinator.token(federation)
    clients = [SecureClient(coordinator.http, federation, name) for name in "abc"]
    for client in clients:
        assert client.enrol(token).status_code == 201
        client.withheld = True
    coordinator.post(f"{federation}/start")
    end = time.monotonic() + 300
    while coordinator.get(federation)["state"] == "running" and time.monotonic() < end:
        for client in clients:
            if (response := client.task()).status_code == 200:
                assert client.answer(response.json()).status_code in (200, 201)
    page = visited.signed_in()
    page.get_by_text("finished").first.wait_for()
    tab(page, "Privacy")
    panel = page.get_by_role("region", name="Secure aggregation", exact=True)
    expect(panel).to_contain_text("Attempt 1: the sum of 3 clients, weight 3; the mean change has the norm")
    expect(panel).to_contain_text("Norms, directions and verdicts of single clients are unknown")
    tab(page, "Overview")
    expect(page.get_by_role("region", name="Training", exact=True)).to_contain_text(
        "clients send no number that they measured"
    )
    expect(page.get_by_role("region", name="Accuracy", exact=True)).to_contain_text(
        "Withheld: 3 sites keep their accuracies"
    )


@pytest.mark.slow
def test_of_a_protected_federation_privacy_panel_tells_what_was_spent(coordinator: InThread, visited: Visit) -> None:
    privacy = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}
    _, (a, _), (task, other) = open_first_phase(coordinator, name="guarded", training={"epochs": 1}, privacy=privacy)
    spent = {"epsilon": 3.5, "delta": 1e-3, "noise": "seeded", "events": [training_event(10, 32, 1, 1.0).as_json()]}
    update = update_body(trained(a.payload(task), "a", task), task, metrics={}, privacy=spent)
    assert a.send(task, update).status_code == 201
    refusal = {"type": "privacy-budget-exhausted", "detail": "no"}
    url = f"{a.path}/tasks/{other['task_id']}/failure"
    assert a.http.post(url, json=refusal, headers=bearer(secret_of("b"))).status_code == 200
    visited.signed_in()
    tab(visited.page, "Privacy")
    panel = visited.page.get_by_role("region", name="Privacy", exact=True)
    expect(panel).to_contain_text("one record is protected; clip 0.3; noise 1 times the clip")
    expect(panel).to_contain_text("noise from a seed, which protects nothing: a")
    expect(panel).to_contain_text("1 task refused: privacy-budget-exhausted")
    rows = panel.get_by_role("region", name="What clients have spent").locator("tbody tr")
    expect(rows.first).to_contain_text("3.14")  # as the coordinator computes it
    expect(rows.first).to_contain_text("3.5")  # what the ledger holds
    expect(rows.first).to_contain_text("seeded: no guarantee")
