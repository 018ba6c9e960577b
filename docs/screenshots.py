"""The pictures of both pages in docs/images, drawn by a headless Chromium of federations that really ran.

``python docs/screenshots.py`` (`make screenshots`) runs two small federations on embedded data and takes the pictures;
``--folder PATH`` keeps what they left, and the next call with it only takes the pictures.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

from promptfed.cli.commands.demo import demo_sites, demo_spec
from promptfed.cli.commands.launch import conduct
from promptfed.runtime.processes import Processes
from promptfed.runtime.services import LocalFederation
from promptfed.sdk import operations
from promptfed.sdk.progress import Watcher
from promptfed.shared.data.demo import DEMOS
from promptfed.shared.data.registry import open_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

IMAGES = Path(__file__).parent / "images"
WIDTHS = {1400: 1500, 420: 1500}  # and heights: the upper part of the page
METHODS = {"styles": "promptfl", "styles-personal": "fedpgp"}
COLOURS = 256  # a picture of flat colours needs no more, and has a third of the bytes
PATIENCE = 120_000


def main() -> None:
    """Run what has not run yet, and take the pictures."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, help="keep services' folders here")
    options.add_argument("--images", type=Path, default=IMAGES, help="where the pictures go")
    given = options.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="promptfed-screenshots-"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "coordinator.url").unlink(missing_ok=True)
    try:
        with Processes(folder) as processes, LocalFederation(processes, folder) as local, _chromium() as browser:
            if not local.api.run(operations.list_federations())[0].view.federations:
                _run_all(local)
            _operators_page(browser, local, given.images)
            _clients_page(browser, local, given.images)
    finally:
        if given.folder is None:
            shutil.rmtree(folder)


def _run_all(local: LocalFederation) -> None:
    """One federation for each method; the clients of each have a folder of their own."""
    demo, folder = DEMOS["symbols"], local.folder
    for name, method in METHODS.items():
        spec = demo_spec(demo, method, None, seed=0).model_copy(update={"name": name})
        local.folder = folder / name
        local.folder.mkdir()
        with Watcher(spec.rounds) as watcher:
            conduct(local, spec, demo_sites(demo, spec), watcher)
    local.folder = folder


@contextmanager
def _chromium() -> Iterator[Browser]:
    path = next(found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name)))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def _operators_page(browser: Browser, local: LocalFederation, images: Path) -> None:
    assert local.operator_token is not None
    for width, height in WIDTHS.items():
        page = _page(browser, width, height)
        page.goto(f"{local.api.url}/#/federations/styles")
        page.get_by_label("Operator token").fill(local.operator_token.read_text().strip())
        page.keyboard.press("Enter")
        page.get_by_role("img", name="Accuracy by round").wait_for()
        page.wait_for_timeout(500)  # charts are drawn a moment later
        _save(page, images / f"operator-{width}.png")
        page.context.close()


def _clients_page(browser: Browser, local: LocalFederation, images: Path) -> None:
    name, uri = DEMOS["symbols"].clients[1]
    picture = io.BytesIO()
    open_source(uri).test.image(40).resize((224, 224), Image.Resampling.NEAREST).save(picture, "PNG")
    url = _serve(local, name, uri, picture.getvalue())
    for width in WIDTHS:
        page = _page(browser, width, 1300)
        page.goto(url)
        page.locator("#ask").wait_for(state="visible")
        page.set_input_files("#file", {"name": "drawing.png", "mimeType": "image/png", "buffer": picture.getvalue()})
        page.locator("#answer").wait_for(state="visible")
        _save(page, images / f"client-{width}.png")
        page.context.close()


def _serve(local: LocalFederation, name: str, uri: str, picture: bytes) -> str:
    """A client of a federation that has ended goes on serving predictions; its page's address, once it answers."""
    folder = local.folder / "styles"
    state = folder / f"client-{name}"
    place = state / "api.url"
    place.unlink(missing_ok=True)
    options = {
        "coordinator": local.api.url,
        "federation": "styles",
        "enrolment-token-file": str(folder / "enrolment.token"),
        "state-dir": str(state),
        "device": "cpu",
        "name": name,
        "data": uri,
    }
    arguments = ["-m", "promptfed.client_service", "--serve", "--yes"]
    local.processes.start("page", [*arguments, *(f"--{key}={value}" for key, value in options.items())])
    kind = {"Content-Type": "application/octet-stream"}
    end = time.monotonic() + PATIENCE / 1000
    while time.monotonic() < end:
        local.processes.watch()
        if place.exists():
            url = place.read_text().strip()
            if httpx.post(f"{url}/v1/predict", content=picture, headers=kind, timeout=60).is_success:
                return url
        time.sleep(0.2)
    raise SystemExit(f"the client does not answer: see {local.folder / 'page.log'}")


def _page(browser: Browser, width: int, height: int) -> Page:
    size = {"width": width, "height": height}
    context = browser.new_context(viewport=size, reduced_motion="reduce", color_scheme="light")
    context.set_default_timeout(PATIENCE)
    return context.new_page()


def _save(page: Page, path: Path) -> None:
    """What a window of this size shows; few colours make a small file."""
    body = page.screenshot()
    with Image.open(io.BytesIO(body)) as picture:
        picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, "PNG", optimize=True)
    print(path, path.stat().st_size, "bytes", Image.open(path).size)


if __name__ == "__main__":
    main()
