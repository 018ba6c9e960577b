"""`promptfed demo`: a whole federation on this machine, up to a table of zero-shot against federated accuracy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.commands.launch import conduct, show_result, started_services, summary
from promptfed.cli.common import Json
from promptfed.runtime.processes import interrupt_on_sigterm
from promptfed.runtime.services import Site
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import new_folder
from promptfed.sdk.output import print_json, say
from promptfed.sdk.progress import Watcher
from promptfed.shared.data.demo import DEMOS, Demo
from promptfed.shared.spec.spec import FederationSpec, SpecError


@app.add(section="Try and simulate")
def demo(
    method: Annotated[
        str | None, typer.Option(help="a method of `promptfed methods`; default: what suits the data")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="rounds; default: what suits the data")] = None,
    data: Annotated[str, typer.Option(help="symbols, emoji, digits or dicom")] = "symbols",
    seed: Annotated[int, typer.Option(min=0, help="of all random draws")] = 0,
    keep: Annotated[Path | None, typer.Option(help="keep the services' folders and logs here")] = None,
    as_json: Json = False,
) -> None:
    """Run a whole federation on this machine without any download: a coordinator, three clients, an unseen domain."""
    interrupt_on_sigterm()
    started = time.monotonic()
    if data not in DEMOS:
        raise CommandError(f"there is no demo {data!r}: use {' or '.join(sorted(DEMOS))}", Exit.BAD_INPUT)
    method = method or DEMOS[data].method
    spec = demo_spec(DEMOS[data], method, rounds, seed)
    with new_folder(keep, "--keep") as folder, Watcher(spec.rounds, quiet=as_json) as watcher:
        sites = demo_sites(DEMOS[data], spec, folder / "scans")
        _draw_scans(DEMOS[data].scans, folder / "scans")
        if all(site.role == "trainer" for site in sites):
            watcher.say(f"{method} classifies with what each client trains: no unseen domain is shown")
        with started_services(None, 0, folder, keep is not None, watcher) as services:
            result = conduct(services, spec, sites, watcher)
    seconds = time.monotonic() - started
    if as_json:
        print_json(summary(result, seconds))
    else:
        show_result(result, seconds)
        others = {name: gain for name, gain in DEMOS[data].others.items() if name != method}
        if others and rounds is None:
            gains = " and ".join(f"--method {name} (about {gain:+d} points)" for name, gain in others.items())
            say(f"Try also {gains}.")


def demo_spec(demo: Demo, method: str, rounds: int | None, seed: int) -> FederationSpec:
    """The spec of a demo: the data's training settings, three clients, each asked every round.

    Raises:
        CommandError: there is no such method, or it cannot run so.
    """
    from promptfed.shared.methods import resolve_spec

    number = rounds or demo.rounds
    spec = {
        "name": f"demo-{method}".replace("_", "-"),
        "method": {"name": method},
        "rounds": number,
        "training": demo.training(method),
        "template": demo.template,
        "participation": {"min_clients": len(demo.clients), "draw": "public"},
        "aggregation": {"max_weight_share": 1.0},
        "evaluation": {"every": max(1, number // 5)},
        "seed": seed,
    }
    if demo.backbone:
        spec["backbone"] = demo.backbone
    if demo.class_names:
        spec["class_names"] = list(demo.class_names)
    try:
        return resolve_spec(spec)
    except SpecError as error:
        raise CommandError(str(error), Exit.REFUSED) from None


PATIENTS, IMAGES_EACH = 30, 6


def _draw_scans(sites: tuple[str, ...], folder: Path) -> None:
    """Draw DICOM files of invented patients for each of the ``sites``. Raises CommandError without pydicom."""
    if not sites:
        return
    try:
        from promptfed.shared.data.medical.phantoms import write_patients
    except ImportError:
        raise CommandError("DICOM files need pydicom: install promptfed[medical]", Exit.BAD_INPUT) from None
    for number, site in enumerate(sites):
        write_patients(folder / site, PATIENTS, IMAGES_EACH, number, site)


def demo_sites(demo: Demo, spec: FederationSpec, scans: Path = Path()) -> list[Site]:
    """The clients, and the unseen domain's evaluator if the method has a classifier for it."""
    from promptfed.shared.methods import method_for

    trainers = [Site(name, uri.format(scans=scans) if demo.scans else uri) for name, uri in demo.clients]
    referee, unseen = demo.unseen
    unseen = unseen.format(scans=scans) if demo.scans else unseen
    evaluators = [Site(referee, unseen, role="evaluator")] if method_for(spec).takes_evaluators else []
    return [*trainers, *evaluators]
