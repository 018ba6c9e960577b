"""What the page has beyond watching: curves of training, settings, comparison, forms, tokens, downloads, deletion."""

from __future__ import annotations

import csv
import io
import json
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import expect

from promptfed.export.reading import read_export
from promptfed.export.verification import verify_export
from promptfed.shared.service.invitation import decode as decode_invitation
from promptfed.shared.tensors.torch_tensors import decode, state_hash
from promptfed.testing.clients import FINGERPRINT, SHAPE, ScriptedClient, drive
from tests.support.coordinators import InThread
from tests.web.conftest import PATIENCE, Visit

expect.set_options(timeout=PATIENCE)

if TYPE_CHECKING:
    from playwright.sync_api import Download, Page


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


def downloaded(page: Page, button: str) -> Download:
    with page.expect_download() as waiting:
        page.get_by_role("button", name=button, exact=True).click()
    return waiting.value


def test_training_times_and_settings_are_shown(coordinator: InThread, visited: Visit) -> None:
    finished(coordinator, "styles", training={"learning_rate": 0.25})
    page = visited.page
    visited.open()
    visited.sign_in()
    expect(
        page.get_by_role("img", name="Training loss by round; in round 2 the clients' mean is 0.500")
    ).to_be_visible()
    times = page.get_by_role("region", name="Time", exact=True)
    expect(times).to_contain_text("Elapsed")
    expect(times).to_contain_text("Ended")
    expect(times.get_by_role("row")).to_have_count(3)  # the head, a and b
    expect(times.get_by_role("img", name="Seconds by round; round 2 took")).to_be_visible()

    settings = page.get_by_role("region", name="Settings", exact=True)
    settings.get_by_text("settings, ").click()
    rows = settings.get_by_role("row")
    expect(rows.nth(1).locator("b")).to_have_count(1)  # what differs comes first
    paths = rows.evaluate_all(
        "rows => rows.slice(1).map(row => [row.cells[0].firstChild.textContent, !!row.querySelector('b')])"
    )
    changed = [path for path, differs in paths if differs]
    assert [path for path, _ in paths][: len(changed)] == changed
    assert {"training.learning_rate", "rounds", "method.m", "participation.min_clients", "seed"} <= set(changed)
    assert "training.epochs" not in changed
    assert len(paths) > 40
    settings.get_by_label("Search").fill("learning")
    expect(settings.get_by_role("status")).to_have_text("2 settings")
    row = settings.get_by_role("row", name="training.learning_rate")
    expect(row).to_contain_text("0.25")
    expect(row).to_contain_text("0.1")  # what a sweep found for this method on this backbone


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
    second = finished(coordinator, "fast", training={"learning_rate": 0.25, "epochs": 1})
    for name in ("eyes", "skin"):
        coordinator.create(name=name)
    page = visited.page
    visited.open()
    visited.sign_in()
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
    expect(figures.get_by_role("row", name="accuracy (gain)")).to_contain_text("50.0 % (+25.0)50.0 % (+25.0)")
    differing = page.get_by_role("region", name="Settings that differ").get_by_role("row")
    expect(differing).to_have_count(2)
    expect(differing.nth(1)).to_have_text("training.learning_rate0.10.25")


def test_a_federation_is_made_from_form_and_its_errors_stand_by_fields(coordinator: InThread, visited: Visit) -> None:
    page = visited.page
    visited.open("/#/new")
    visited.sign_in()
    rate = page.get_by_label("learning rate", exact=True)
    expect(rate).to_have_attribute("placeholder", "0.1")  # what a sweep found for the embedded backbone
    page.get_by_text("Backbone", exact=True).click()
    page.get_by_label("model", exact=True).fill("ViT-B-16")
    page.get_by_label("model", exact=True).blur()
    expect(rate).to_have_attribute("placeholder", "0.002")
    page.get_by_label("model", exact=True).fill("")
    page.get_by_label("Method", exact=True).select_option("promptfl_prox")
    expect(page.get_by_label("mu", exact=True)).to_be_visible()  # the method's own option
    page.get_by_label("name", exact=True).fill("from the form")
    page.locator("#spec-rounds").fill("-1")
    page.get_by_label("epochs", exact=True).fill("two")
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("alert").first).to_have_text("3 fields need another value.")
    expect(page.get_by_label("name", exact=True)).to_be_focused()
    for label in ("name", "rounds", "epochs"):
        expect(page.get_by_label(label, exact=True).first).to_have_attribute("aria-invalid", "true")
    expect(page.locator("[id='wrong-rounds']")).to_contain_text("greater than or equal to 0")
    wrong = page.locator("[id='wrong-name']")
    expect(wrong).to_contain_text("letters, digits and . _ - without spaces")
    page.get_by_label("name", exact=True).fill("formed")  # An error goes with its cause, and the other ones stay.
    expect(wrong).to_be_empty()
    expect(page.get_by_label("name", exact=True)).not_to_have_attribute("aria-invalid", "true")
    expect(page.get_by_text("fields need another value")).to_have_count(0)
    expect(page.locator("[id='wrong-rounds']")).to_contain_text("greater than or equal to 0")
    page.locator("#spec-rounds").fill("3")
    page.get_by_label("epochs", exact=True).fill("2")
    page.get_by_label("mu", exact=True).fill("0.5")
    page.get_by_label("schedule", exact=True).select_option("cosine")
    page.get_by_role("button", name="Only check").click()
    expect(page.get_by_text("The spec is good; nothing was created.")).to_be_visible()
    coordinator.get("formed", status=404)
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("formed")
    spec = coordinator.get("formed")["spec"]
    assert (spec["method"]["name"], spec["method"]["mu"], spec["rounds"]) == ("promptfl_prox", 0.5, 3)
    assert (spec["training"]["epochs"], spec["training"]["schedule"]) == (2, "cosine")


def test_tokens_withdrawal_and_deletion(coordinator: InThread, visited: Visit) -> None:
    federation = coordinator.create(name="styles", participation={"min_clients": 2})
    coordinator.enrol(federation, "a", "b")
    page = visited.page
    visited.open()
    visited.sign_in()
    page.get_by_text("Invite clients, and list or revoke").click()
    page.get_by_label("Clients that may join with it").fill("2")
    page.locator("#token-name").fill("ward-3")
    page.get_by_label("Role").select_option("trainer")
    page.get_by_role("button", name="Create an invitation").click()
    shown = page.get_by_label("The invitation for the data owner, shown only now")
    expect(shown).to_be_focused()
    expect(page.get_by_text("promptfed join - --data folder:/path/to/images")).to_be_visible()
    invitation = decode_invitation(shown.input_value())
    assert (invitation.coordinator, invitation.federation) == (coordinator.url, "styles")
    assert page.get_by_label("Its token alone").input_value() == invitation.token
    joined = coordinator.client("styles", "c").enrol(invitation.token)
    assert joined.status_code == 201, joined.text
    tokens = page.get_by_role("region", name="Invitations")
    expect(tokens.get_by_role("row", name="ward-3")).to_contain_text("trainer1 of 2")
    page.get_by_role("button", name="Revoke ward-3").click()
    page.get_by_role("button", name="Revoke it").click()
    expect(page.get_by_role("row", name="ward-3")).to_have_count(0)

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
    expect(page.locator("#announcer")).to_have_text("The updates of b are deleted")

    visited.tab_to("Delete")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    coordinator.get("styles")
    visited.tab_to("Delete")
    page.keyboard.press("Enter")
    visited.tab_to("Delete it for good")
    page.keyboard.press("Enter")
    expect(page.locator("#announcer")).to_have_text("styles is deleted")
    expect(page.get_by_role("navigation")).to_contain_text("None yet.")
    coordinator.get("styles", status=404)


def test_all_can_be_taken_away_and_the_export_is_one(coordinator: InThread, visited: Visit, tmp_path: Path) -> None:
    shape = {"fingerprint": FINGERPRINT, "shape": SHAPE}
    finished(coordinator, "styles", class_names=["circle", "square", "star"], backbone=shape)
    page = visited.page
    visited.open()
    visited.sign_in()
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
    assert "| a | test | 25.0 % | 50.0 % |" in card

    archive, folder = downloaded(page, "Export"), tmp_path / "export"
    with zipfile.ZipFile(archive.path()) as packed:
        assert packed.testzip() is None
        packed.extractall(folder)
    model, names = read_export(folder)
    assert (model.round, names) == (2, ("circle", "square", "star"))
    assert model.missing() is None
    key = coordinator.get("/v1/signing-key")["public_key"]
    assert verify_export(folder, key).card.federation.name == "styles"
    assert {path.name for path in folder.iterdir()} == {"prompts.safetensors", "card.json", "card.json.sig", "card.md"}


def test_a_viewer_is_told_so_and_stays_signed_in(coordinator: InThread, visited: Visit) -> None:
    coordinator.create(name="styles")
    minted = coordinator.post("/v1/operators", {"name": "watcher", "role": "viewer"}, status=201)
    page = visited.page
    visited.open()
    page.get_by_label("Operator token").fill(minted["token"])
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel it for good").click()
    expect(page.get_by_role("alert")).to_contain_text("this call takes the role operator")
    coordinator.enrol("styles", "a")  # the page looks again, and what was refused stays told
    expect(page.get_by_role("region", name="1 client")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("this call takes the role operator")
    expect(page.get_by_role("heading", level=1)).to_have_text("styles")
    assert coordinator.get("styles")["state"] == "enrolling"


def test_a_refusal_goes_when_its_cause_is_gone(coordinator: InThread, visited: Visit) -> None:
    federation = coordinator.create(name="styles", participation={"min_clients": 2})
    coordinator.enrol(federation, "a")
    page = visited.page
    visited.open("/#/federations/styles")
    visited.sign_in()
    page.get_by_role("button", name="Start", exact=True).click()
    refusal = page.get_by_role("alert").filter(has_text="2")
    expect(refusal).to_be_visible()
    page.wait_for_timeout(5000)  # The page looks again meanwhile, and nothing has changed.
    expect(refusal).to_be_visible()
    coordinator.enrol(federation, "b")
    expect(page.get_by_role("row", name="b trainer")).to_be_visible()
    expect(refusal).to_have_count(0)
