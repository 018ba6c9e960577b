"""Every state of both pages, wide and narrow, light and dark: nothing is cut, no error, no finding of axe-core.

With ``PROMPTFED_PICTURES=FOLDER`` a picture of each state is kept there (`make pictures`). `make axe` fetches axe-core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select, update

from promptfed.coordinator.store.tables import BlobRow, UpdateRow
from promptfed.shared.privacy.accounting import training_event
from promptfed.testing.clients import drive, trained, update_body
from tests.client_service.serving.test_page import image, served_page
from tests.support.coordinators import InThread
from tests.support.secure_clients import SecureClient
from tests.web.conftest import Visit, visit

expect = pytest.importorskip("playwright.sync_api").expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PATIENT = {"min_clients": 2, "deadline_seconds": 3600}
CUT_OFF = """() => [...document.querySelectorAll("body *")].filter((element) => {
  const { right, width } = element.getBoundingClientRect();
  if (width === 0 || right <= window.innerWidth + 1) return false;
  for (let at = element; at; at = at.parentElement) {
    if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(at).overflowX)) return false;
  }
  return true;
}).map((element) => element.outerHTML.slice(0, 100))"""
AXE = Path(__file__).parents[2] / "build" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
PICTURES = os.environ.get("PROMPTFED_PICTURES")
FINDINGS = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
  .filter(({ impact }) => ["serious", "critical"].includes(impact))
  .map(({ id, nodes }) => `${id}: ${nodes.map((one) => one.html.slice(0, 120)).join(" | ")}`)"""
SETTLED = """() => new Promise((settled) => {
  let timer = setTimeout(settled, 150);
  const changed = () => { clearTimeout(timer); timer = setTimeout(settled, 150); };
  new MutationObserver(changed).observe(document, {subtree: true, childList: true, attributes: true});
  setTimeout(settled, 2000);
})"""
"""Charts and figures come a moment later: nothing has changed for 0.15 s."""
DRAWN = "() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
NARROW = {"width": 420, "height": 900}
REFUSED = "Failed to load resource: the server responded with a status of"


def make_enrolling(server: InThread) -> None:
    """One site has joined, and another one could not."""
    federation = server.create(name="enrolling", participation={"min_clients": 4})
    server.enrol(federation, "hospital-a", domain={"name": "neon", "description": "a neon sign of a {}"})
    client, token = server.client(federation, "hospital-b"), server.token(federation, name="hospital-b", uses=1)
    assert client.enrol(token, num_samples=0).status_code == 422


def make_ready(server: InThread) -> None:
    server.enrol(server.create(name="ready", participation=PATIENT), "hospital-a", "hospital-b")


def make_running(server: InThread) -> None:
    """One site has answered, one was refused, and one is awaited."""
    federation = server.create(name="running", rounds=4, participation=PATIENT)
    a, b, _ = server.enrol(federation, "hospital-a", "hospital-b", "a-site-with-a-name-as-long-as-names-may-be-in-here")
    server.post(f"{federation}/start")
    for client in (a, b, _):
        assert client.answer(server.task(client)).status_code == 201
    assert a.answer(server.task(a)).status_code == 201
    task = server.task(b)
    tensors = trained(b.payload(task), b.name, task)
    assert b.send(task, update_body(tensors | {"else": tensors["context"]}, task)).status_code == 422


def make_paused(server: InThread) -> None:
    """It waits for an update whose kept bytes were damaged."""
    federation = server.create(name="paused", participation=PATIENT)
    clients = server.enrol(federation, "a", "b")
    server.post(f"{federation}/start")
    tasks = server.training(clients)
    server.post(f"{federation}/pause")
    for client, task in zip(clients, tasks, strict=True):
        assert client.answer(task).status_code == 201
    with server.registry.database.write() as session:
        [digest] = session.scalars(select(UpdateRow.sha256).where(UpdateRow.task_id == tasks[0]["task_id"]))
        session.execute(update(BlobRow).where(BlobRow.digest == digest).values(content=b"else"))
    server.registry.blobs.admitted.forget([digest])  # as after a restart
    server.post(f"{federation}/resume")
    server.until(federation, state="paused")


def make_finished(server: InThread) -> None:
    """Two that can be compared: one with an unseen domain, one below zero-shot, which has remarks."""
    for name, changes, accuracy in (
        ("finished", {"rounds": 6}, 0.5),
        ("below", {"training": {"learning_rate": 0.25}}, 0.1),
    ):
        federation = server.create(
            name=name, participation=PATIENT, class_names=["circle", "square", "star"], **changes
        )
        clients = server.enrol(federation, "a", "b", domain={"name": "neon", "description": "a neon sign of a {}"})
        sketch = {"name": "sketch", "description": "a sketch of a {}"}
        clients += server.enrol(federation, "referee", role="evaluator", num_samples=0, domain=sketch)
        for client in clients:
            client.accuracy = accuracy
        server.post(f"{federation}/start")
        drive(clients)


def make_cancelled(server: InThread) -> None:
    server.post(f"{server.create(name='cancelled')}/cancel")


def make_failed(server: InThread) -> None:
    """Every update holds NaN."""
    federation = server.create(name="failed", participation=PATIENT)
    clients = server.enrol(federation, "a", "b")
    server.post(f"{federation}/start")
    for _ in range(3):
        for client, task in zip(clients, server.training(clients), strict=True):
            client.fail(task)
        if server.get(federation)["state"] != "running":
            break


def make_protected(server: InThread) -> None:
    noise = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}
    federation = server.create(name="protected", participation=PATIENT, training={"epochs": 1}, privacy=noise)
    clients = server.enrol(federation, "a", "b")
    server.post(f"{federation}/start")
    (a, _), (task, _) = clients, server.training(clients)
    spent = {"epsilon": 3.5, "delta": 1e-3, "noise": "seeded", "events": [training_event(10, 32, 1, 1.0).as_json()]}
    assert (
        a.send(task, update_body(trained(a.payload(task), "a", task), task, metrics={}, privacy=spent)).status_code
        == 201
    )


def make_secure(server: InThread) -> None:
    federation = server.create(
        name="secure", rounds=1, participation={"min_clients": 3, "deadline_seconds": 3600}, secure_aggregation={}
    )
    token = server.token(federation)
    clients = [SecureClient(server.http, federation, name) for name in "abc"]
    for client in clients:
        assert client.enrol(token).status_code == 201
    server.post(f"{federation}/start")
    while server.get(federation)["state"] == "running":
        for client in clients:
            if (response := client.task()).status_code == 200:
                client.answer(response.json())


def make_several(server: InThread) -> None:
    names = ["sun", "cloud", "rain"]
    federation = server.create(name="several", rounds=1, task="multi_label", class_names=names)
    clients = server.enrol(federation, "a", "b", class_names=names)
    server.post(f"{federation}/start")
    drive(clients)


MADE: tuple[Callable[[InThread], Any], ...] = (
    make_enrolling, make_ready, make_running, make_paused, make_finished, make_cancelled, make_failed,
    make_protected, make_secure, make_several,
)  # fmt: skip


def shown(page: Page, name: str) -> None:
    """Open the federation of this name."""
    page.evaluate(f"location.hash = '#/federations/{name}'")
    expect(page.get_by_role("heading", level=1)).to_have_text(name)


def federations(page: Page, server: InThread) -> Iterator[str]:
    """Each federation, with its primary action, and each of its tabs; none of them says that there is nothing."""
    for view in server.get("/v1/federations")["federations"]:
        shown(page, view["name"])
        primary = page.locator(".primary:not([disabled])").filter(visible=True)
        expect(primary).to_have_text(PRIMARY.get(view["name"], PRIMARY[view["state"]]))
        yield view["name"]
        if view["name"] in ("running", "finished", "protected", "secure"):
            tabs = page.get_by_role("tab").all_inner_texts()
            for tab in tabs[1:]:
                page.get_by_role("tab", name=tab, exact=True).click()
                page.get_by_role("tabpanel", name=tab).locator(".panel").filter(visible=True).first.wait_for()
                yield f"{view['name']}-{tab.lower()}"


PRIMARY = {
    "enrolling": "Create 2 invitations", "running": "Pause", "paused": "Resume", "finished": "Download the result",
    "cancelled": "New with these settings", "failed": "Resume", "ready": "Start",
}  # fmt: skip


def dialogs(page: Page, server: InThread) -> Iterator[str]:
    """What opens on a click: an invitation, questions, folded panels."""
    shown(page, "enrolling")
    expect(page.get_by_role("button", name="Start", exact=True)).to_be_disabled()
    page.get_by_text("It can start once 4 sites that train have joined; 1 has so far.").wait_for()
    refused = page.get_by_role("region", name="Invited sites").get_by_role("row", name="hospital-b")
    expect(refused).to_contain_text("hospital-b cannot join: a trainer needs at least one training sample")
    page.get_by_role("button", name="Create 2 invitations").click()
    page.get_by_label("Invitation for site-1, shown only now").wait_for()
    yield "enrolling-invitation"
    page.get_by_role("button", name="Cancel").click()
    yield "enrolling-cancel"
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Clients").click()
    page.get_by_text("Take a client out").click()
    page.get_by_role("button", name="Withdraw", exact=True).click()
    yield "enrolling-withdraw"
    page.keyboard.press("Escape")


def forms(page: Page, server: InThread) -> Iterator[str]:
    page.evaluate("location.hash = '#/new'")
    page.get_by_text("Proposed:").wait_for()
    yield "new"
    page.get_by_label("Name", exact=True).fill("two words")
    page.get_by_label("Rounds", exact=True).fill("-1")
    page.get_by_role("button", name="Create", exact=True).click()
    page.get_by_text("2 fields need another value.").wait_for()
    yield "new-errors"
    page.locator("summary").filter(has_text="All settings").click()
    page.get_by_role("button", name="Show all").click()
    yield "new-opened"
    page.evaluate(f"location.hash = '#/continue/{server.get('finished')['id']}'")
    expect(page.get_by_role("heading", level=1)).to_have_text("Continue from finished")
    yield "continue"
    page.evaluate(f"location.hash = '#/compare/{','.join(server.get(name)['id'] for name in ('finished', 'below'))}'")
    page.get_by_role("img", name="Mean accuracy by round").wait_for()
    yield "compare"
    page.evaluate("location.hash = '#/federations/absent'")
    page.get_by_role("alert").filter(has_text="no federation 'absent'").wait_for()
    expect(page.get_by_role("heading", name="Accuracy")).to_be_hidden()  # nothing but the error
    yield "absent"
    page.evaluate("location.hash = '#/'")
    page.get_by_role("heading", name="Choose a federation").wait_for()
    yield "list"
    page.get_by_label("Run file, in YAML or JSON").fill("rounds: [")
    page.get_by_role("button", name="Create from it").click()
    page.get_by_text("the file ends within a list").wait_for()
    yield "list-run-file-refused"
    page.get_by_label("Search federations").fill("no such one")
    page.get_by_text("No federation is like that.").wait_for()
    yield "list-empty"


def signing_in(made: Visit) -> Iterator[str]:
    made.open()
    made.page.get_by_label("Operator token").wait_for()
    yield "sign-in"
    made.page.get_by_label("Operator token").fill("0" * 64)
    made.page.keyboard.press("Enter")
    made.page.get_by_role("alert").filter(has_text="not known here").wait_for()
    yield "sign-in-refused"
    made.sign_in()
    made.page.get_by_role("navigation", name="Federations").wait_for()
    yield "signed-in"


def checked(page: Page, name: str) -> None:
    """Refuse what is wider than the window and what axe-core finds, light and dark, and keep a picture of each.

    At each of the widths: the last one is that of a telephone, at which it goes on.
    """
    for width in (1400, 900, NARROW["width"]):
        page.set_viewport_size(NARROW | {"width": width})
        page.evaluate(SETTLED if width == 1400 else DRAWN)
        page.evaluate("window.scrollTo(0, 0)")
        for scheme in ("light", "dark") if AXE.is_file() or PICTURES else ():
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            if PICTURES:
                dark = "-dark" if scheme == "dark" else ""
                page.screenshot(path=Path(PICTURES) / f"{name}-{width}{dark}.png", full_page=True)
            # Nothing that it looks for depends on both: each width is seen by it once, and each scheme.
            if AXE.is_file() and (width, scheme) in ((1400, "light"), (NARROW["width"], "dark")):
                if not page.evaluate("'axe' in window"):
                    page.evaluate(AXE.read_text(encoding="utf-8"))
                assert page.evaluate(FINDINGS) == [], (name, width, scheme)
        page.emulate_media(color_scheme="light", reduced_motion="reduce")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
        assert page.evaluate(CUT_OFF) == [], (name, width)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    """A coordinator with a federation in each state."""
    made = InThread(tmp_path_factory.mktemp("states") / "data")
    for make in MADE:
        make(made)
    yield made
    made.stop()


def test_an_empty_coordinator_says_what_it_is_for(browser: Browser, coordinator: InThread) -> None:
    made = visit(browser, coordinator, viewport=NARROW)
    made.open()
    made.sign_in()
    expect(made.page.get_by_role("heading", level=1)).to_have_text("Train one model at many sites")
    expect(made.page.locator(".primary")).to_have_text("New federation")
    expect(made.page.get_by_label("Run file, in YAML or JSON")).to_be_visible()
    checked(made.page, "operator-start")
    assert (made.wrong, made.violations()) == ([], [])
    made.page.context.close()


def test_the_operators_page_fits_in_every_state(browser: Browser, server: InThread) -> None:
    made = visit(browser, server, viewport=NARROW)
    said: list[str] = []
    made.page.on("console", lambda line: said.append(line.text) if line.type in ("error", "warning") else None)
    for name in signing_in(made):
        checked(made.page, f"operator-{name}")
    for states in (federations, dialogs, forms):
        for name in states(made.page, server):
            checked(made.page, f"operator-{name}")
    assert (made.wrong, made.violations()) == ([], [])
    assert [text for text in said if not text.startswith(REFUSED)] == []
    made.page.context.close()


def test_the_clients_page_fits_in_every_state(browser: Browser, tmp_path: Path) -> None:
    page = browser.new_page(viewport=NARROW)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    with served_page("secret") as url:
        page.goto(url)
        page.get_by_label("Token of this service").wait_for()
        checked(page, "client-sign-in")
        page.get_by_label("Token of this service").fill("other")
        page.keyboard.press("Enter")
        page.get_by_text("This is not the token of this service.").wait_for()
        checked(page, "client-sign-in-refused")
        page.get_by_label("Token of this service").fill("secret")
        page.keyboard.press("Enter")
        page.locator("#ask").wait_for(state="visible")
        checked(page, "client")
        page.set_input_files("#file", image(tmp_path))
        page.locator(".verdict").wait_for()
        checked(page, "client-answer")
        page.set_input_files("#file", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"no image"})
        page.get_by_text("cannot be read as an image").wait_for()
        checked(page, "client-no-image")
    page.set_input_files("#file", image(tmp_path))
    page.get_by_text("does not answer").wait_for()
    checked(page, "client-gone")
    with served_page(None, round=None, stage="ended") as url:
        page.goto(url)
        page.get_by_text("which has ended").wait_for()
        checked(page, "client-ended")
    assert wrong == []
    page.close()
