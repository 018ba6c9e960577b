"""A learning rate for a run file: tried in simulation, on training images that are held out, at the sites' own data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from promptfed.experiments.bench.entries import RawSpec
from promptfed.experiments.bench.sweep import Grid
from promptfed.experiments.protocols.setting import with_options
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.run_file import Run
from promptfed.runtime.services import Site
from promptfed.sdk.backbone import open_backbone, resolve
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.data.sharing import SharedSources
from promptfed.shared.spec.spec import merged


@dataclass(frozen=True)
class Tuned:
    """Accuracies (fractions, mean over trainers and seeds) on held-out images by rate, the template's, and the choice.

    ``at_edge``: the best rate is the smallest or the largest that was tried, so that a better one may lie beyond.
    """

    by_rate: dict[float, float]
    zero_shot: float | None
    chosen: float
    at_edge: bool


def held_out_sites(sites: Sequence[Site], share: float) -> list[Site]:
    """The trainers, each tested on a share of its own training images: no test image is looked at."""
    trainers = [site for site in sites if site.role == "trainer"]
    return [replace(site, data=with_options(site.data, {"validation": share}), tests={}) for site in trainers]


def tune(
    run: Run,
    grid: Grid,
    *,
    pool: int = 1,
    device: str = "cpu",
    allow_backbone: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Tuned:
    """The rate of ``grid`` with the highest accuracy on held-out training images; of equals the lowest.

    ``progress`` receives how many federations are done, how many there are, and which comes next.

    Raises:
        CommandError: the run cannot be simulated, or nothing can be told on held-out images.
    """
    sites, sources = held_out_sites(run.sites, grid.share), SharedSources()
    spec = resolve(run.spec)
    backbone = open_backbone(spec.backbone, allow_backbone=allow_backbone, device=device)
    jobs = [(rate, seed) for rate in grid.rates for seed in grid.seeds]
    found: dict[float, list[float]] = {}
    templates: list[float] = []
    with TemporaryDirectory(prefix="promptfed-tune-") as features:
        for done, (rate, seed) in enumerate(jobs):
            progress(done, len(jobs), f"rate {rate:g}, seed {seed}")
            try:
                result = simulate(
                    _with_rate(run.spec, rate, seed, spec.rounds),
                    sites,
                    pool=pool,
                    backbone=backbone,
                    features=Path(features),
                    sources=sources,
                )
            except CommandError as error:
                if not _has_diverged(error):
                    raise
                found.setdefault(rate, []).append(0.0)  # the coordinator refused what this rate made: it loses
                continue
            own = [row for row in result.final() if row.split == "test"]
            found.setdefault(rate, []).append(fmean(row.accuracy for row in own))
            templates += [row.zero_shot for row in own if row.zero_shot is not None]
    by_rate = {rate: fmean(values) for rate, values in found.items()}
    if len(set(by_rate.values())) == 1 and len(by_rate) > 1:
        raise CommandError("every rate has the same accuracy: the method trains nothing that shows", Exit.BAD_INPUT)
    best = max(by_rate, key=lambda rate: (by_rate[rate], -rate))
    edge = len(grid.rates) > 1 and best in (grid.rates[0], grid.rates[-1])
    return Tuned(by_rate, fmean(templates) if templates else None, best, edge)


def _has_diverged(error: CommandError) -> bool:
    """Whether the federation ended since a change was too long or the state grew without bound."""
    ended = error.exit is Exit.FEDERATION_ENDED_BADLY
    return ended and ("norm-too-large" in str(error) or "grown: " in str(error))


def _with_rate(spec: Mapping[str, Any], rate: float, seed: int, rounds: int) -> RawSpec:
    """The spec of ``rounds`` rounds at this rate and seed, evaluated at its start and its end."""
    return merged(dict(spec), {"training": {"learning_rate": rate}, "evaluation": {"every": rounds}, "seed": seed})
