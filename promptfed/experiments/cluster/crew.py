"""A crew: one process with one backbone that plays some of a federation's clients over HTTP.

This module does not know Ray. A crew gets everything from its `Assignment` and can be restarted from it anywhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
from pydantic import TypeAdapter

from promptfed.experiments.simulation.preparation import SimulationSetup, open_site, warm_all
from promptfed.experiments.simulation.run_folder import CLIENTS, RunFolder
from promptfed.experiments.simulation.workers import run_workers
from promptfed.runtime.processes import Site
from promptfed.shared.clip import FeatureCache
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.errors import BadInput
from promptfed.shared.files import write_whole
from promptfed.shared.methods.core.spec_backbone import open_backbone
from promptfed.shared.metrics.outcomes import Outcomes
from promptfed.shared.spec.spec import AllowedBackbones, FederationSpec

PATIENCE_SECONDS = 1800.0  # without an answer of the coordinator, which may be restarting
UNLIMITED = httpx.Limits(max_connections=None)  # each client waits for its task on one
OUTCOMES = "outcomes"
_READER = TypeAdapter(Outcomes)


@dataclass(frozen=True)
class Share:
    """The number of crews, and how each of them computes."""

    crews: int
    pool: int
    device: str
    allow_backbone: AllowedBackbones


@dataclass(frozen=True)
class Assignment:
    """The work of one crew. A restarted crew sees ``folder`` too; its key is the source of all clients' secrets.

    ``authority`` is the coordinator's certificate in PEM (None: plain HTTP on loopback).
    """

    spec: FederationSpec
    sites: tuple[Site, ...]
    federation: str
    url: str
    authority: str | None
    enrolment_token: str = field(repr=False)
    folder: RunFolder
    share: Share
    backbone_file: str | None


def shares(sites: tuple[Site, ...], crews: int) -> list[tuple[Site, ...]]:
    """The sites dealt out in turn: the numbers of clients of two crews differ by at most one."""
    return [sites[number::crews] for number in range(crews)]


def work(assignment: Assignment) -> list[Outcomes]:
    """Play the clients of ``assignment`` until their federation ends; return their last answers on their test sets.

    Raises:
        PromptfedError: data or backbone cannot be used, or a client failed.
    """
    return asyncio.run(_work(assignment))


async def _work(assignment: Assignment) -> list[Outcomes]:
    spec, share, folder = assignment.spec, assignment.share, assignment.folder
    shared = SharedSources()
    clients = tuple(open_site(site, shared) for site in assignment.sites)
    folder.expect_data((client.site.name, client.source, client.tests) for client in clients)
    file = None if assignment.backbone_file is None else Path(assignment.backbone_file)
    backbone = open_backbone(spec.backbone, allow_backbone=share.allow_backbone, device=share.device, file=file)
    kept = _Outcomes(folder.path / OUTCOMES, {site.name for site in assignment.sites})
    setup = SimulationSetup(
        spec,
        clients,
        folder.path / CLIENTS,
        share.pool,
        backbone,
        FeatureCache(folder.path / "features"),
        kept.write,
        secret=folder.secret,
        synced=folder.lasting,
        patience=PATIENCE_SECONDS,
    )
    await warm_all(setup)
    verify = True if assignment.authority is None else ssl.create_default_context(cadata=assignment.authority)
    async with (
        httpx.AsyncClient(base_url=assignment.url, verify=verify, limits=UNLIMITED, trust_env=False) as http,
        run_workers(setup, http, assignment.federation, assignment.enrolment_token) as workers,
    ):
        await workers.wait()
    return kept.read()


@dataclass(frozen=True)
class _Outcomes:
    """Clients' last answers on their test sets as files, since a crew may be restarted after its last evaluation.

    A file is named by a digest, since names of splits are not valid file names.
    """

    folder: Path
    names: set[str]

    def write(self, outcomes: Outcomes) -> None:
        """Keep the answers, which replace earlier ones of the same client and split."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = hashlib.sha256(f"{outcomes.client}\n{outcomes.split}".encode()).hexdigest()
        write_whole(self.folder / f"{name}.json", json.dumps(asdict(outcomes)).encode(), synced=False)

    def read(self) -> list[Outcomes]:
        """The kept outcomes of these clients."""
        kept = []
        for path in self.folder.glob("*.json"):
            try:
                kept.append(_READER.validate_json(path.read_bytes()))
            except (OSError, ValueError):
                raise BadInput(f"{path} cannot be read: remove it") from None
        return [outcomes for outcomes in kept if outcomes.client in self.names]
