"""Prepares a simulation: checks the spec and the sites, and computes the image features of all clients at once.

Features are computed for all clients together in whole batches; each client alone would leave most batches half empty.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from promptfed.client_service.exits import ClientError
from promptfed.client_service.training.data import check_scales, in_domain
from promptfed.client_service.training.kernels import use_precision
from promptfed.experiments.simulation.processes import Processes, SimulatedClient, fill, images_of
from promptfed.runtime.processes import Site
from promptfed.runtime.run_file import check_trainers, completed, with_own_classes
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.clip.caches import CacheCost
from promptfed.shared.data import DataError
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.errors import BadInput
from promptfed.shared.methods import method_for, resolve_spec
from promptfed.shared.methods.core.spec_backbone import described, open_backbone, spelt
from promptfed.shared.metrics.outcomes import Record
from promptfed.shared.spec.spec import AllowedBackbones, BackboneSpec, FederationSpec

log = logging.getLogger("promptfed.simulation")

NO_DEADLINE = 30 * 86400.0  # seconds: the longest that a spec may give
PATIENCE_SECONDS = 20.0  # of a client whose coordinator answers nothing but errors


@dataclass(frozen=True)
class SimulationSetup:
    """The clients that this process plays, and what they share: ``pool`` of them compute at once, in ``processes``.

    ``record`` receives each client's answers on a test set. If another process may continue, ``secret`` gives each
    client the same secret again, ``synced`` state survives the end of the machine, and ``patience`` is
    `Settings.give_up_after`.
    """

    spec: FederationSpec
    clients: tuple[SimulatedClient, ...]
    folder: Path
    pool: int
    backbone: Backbone
    features: FeatureCache
    record: Record
    processes: Processes | None = None
    secret: Callable[[str], str] | None = None
    synced: bool = False
    patience: float = PATIENCE_SECONDS

    @property
    def threads(self) -> int:
        """Torch threads of each client that computes."""
        return self.spec.training.threads


def prepare(
    raw: FederationSpec | Mapping[str, Any],
    sites: Sequence[Site],
    pool: int | None,
    backbone: Backbone | None,
    allow_backbone: AllowedBackbones,
    device: str = "cpu",
) -> tuple[FederationSpec, bytes | None, Backbone]:
    """The resolved spec as it is simulated, the initial state if only a backbone can make it, and the backbone.

    Raises:
        PromptfedError: the spec, the sites or the backbone cannot be used.
    """
    expect_usable(sites, pool)
    if not isinstance(raw, FederationSpec):
        raw = resolve_spec(completed(raw if backbone is None else {"backbone": spelt(backbone), **raw}, sites)[0])
    spec = simulated_spec(raw, sites)
    if backbone is None:
        backbone = open_backbone(spec.backbone, allow_backbone=allow_backbone, device=device)
    else:
        expect_backbone(spec.backbone, backbone)
    return *described(spec, backbone), backbone


def expect_usable(sites: Sequence[Site], pool: int | None) -> None:
    """Raise PromptfedError if two sites have the same name, or the pool is empty."""
    names = [site.name for site in sites]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise BadInput(f"two clients are called {twice[0]!r}: give each a name of its own")
    if pool is not None and pool < 1:
        raise BadInput(f"a pool of {pool} clients cannot compute: give at least 1")


def simulated_spec(spec: FederationSpec, sites: Sequence[Site]) -> FederationSpec:
    """The spec as a simulation runs it.

    Clients take turns, so a deadline would measure the queue. Two settings only protect from strangers and are switched
    off unless the spec names them: clients are drawn by the spec's seed, and weights have no upper bound. Published
    results are computed like this. Where a partition deals out the classes, each client has its own.

    Raises:
        PromptfedError: there are too few trainers.
    """
    check_trainers(sites, spec.participation.min_clients if spec.rounds else 0)
    spec = with_own_classes(spec, sites)
    changes: dict[str, Any] = {"deadline_seconds": NO_DEADLINE}
    if "draw" not in spec.participation.model_fields_set:
        changes["draw"] = "public"
    aggregation = spec.aggregation
    if aggregation.max_weight_share is None:
        aggregation = aggregation.model_copy(update={"max_weight_share": 1.0})
    participation = spec.participation.model_copy(update=changes)
    return spec.model_copy(update={"participation": participation, "aggregation": aggregation, "start": "manual"})


def expect_backbone(spec: BackboneSpec, backbone: Backbone) -> None:
    """Raise PromptfedError if ``spec`` names another backbone than the given one."""
    named = (spec.model, None if spec.pretrained == "random" else spec.pretrained, spec.precision)
    loaded = (backbone.model_name, backbone.pretrained, backbone.precision)
    if named != loaded:
        text = f"the spec names the backbone {' '.join(map(str, named))}, but {' '.join(map(str, loaded))} is handed in"
        raise BadInput(f"{text}: give the one that the spec names")


def open_site(site: Site, sources: SharedSources) -> SimulatedClient:
    """The client of ``site``.

    Raises:
        PromptfedError: its data cannot be used.
    """
    try:
        tests = {name: sources.open(uri, "tests") for name, uri in site.tests.items()}
        source = in_domain(sources.open(site.data, site.role), site.name, site.domain)
        check_scales(source, tests)
        return SimulatedClient(site, source, tests)
    except (ClientError, DataError) as error:
        raise BadInput(f"client {site.name}: {error}") from None


def _tell_cost(cost: CacheCost) -> None:
    if not cost.images:
        return
    text = f"the patch features of {cost.images:,} images take {cost.bytes / 1e6:,.1f} MB in {cost.folder}"
    if not cost.fits:
        raise OSError(errno.ENOSPC, f"{text}; {cost.free / 1e6:,.1f} MB are free there: give a folder with room")
    log.info("%s", text)


def _warm(setup: SimulationSetup, patches: bool, stopped: Callable[[], bool]) -> None:
    """Compute all features, and read them into memory. Their bits depend on the number of threads."""
    torch.set_num_threads(setup.threads)
    use_precision(setup.backbone.device, setup.spec.training.tf32)
    images, cache = images_of(setup.clients), setup.features
    if patches:
        _tell_cost(cache.patches.cost(setup.backbone, [images]))
    if setup.processes is not None:
        setup.processes.fill(len(images), patches, stopped)
    fill(cache, setup.backbone, images, range(len(images)), stopped, patches)


async def warm_all(setup: SimulationSetup) -> None:
    """Compute the features of all images that clients will use, if the method allows to keep them.

    Raises:
        PromptfedError: an image cannot be read.
    """
    needs = method_for(setup.spec).needs
    if not needs.cached_features:
        return
    stop = threading.Event()
    job = asyncio.create_task(asyncio.to_thread(_warm, setup, needs.patch_tokens, stop.is_set))
    try:
        await asyncio.shield(job)
    finally:
        stop.set()
        await asyncio.wait({job})
