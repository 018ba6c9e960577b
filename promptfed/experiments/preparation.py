"""What a simulation needs, checked before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from promptfed.runtime.run_file import check_trainers
from promptfed.runtime.services import Site
from promptfed.sdk.client import CommandError
from promptfed.sdk.exit_codes import Exit
from promptfed.sdk.progress import Snapshot
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import DataError, Source, Split
from promptfed.shared.data.sharing import SharedSources
from promptfed.shared.methods import resolve_spec
from promptfed.shared.spec import SpecError

NO_DEADLINE = 30 * 86400.0  # seconds: the longest that a spec may give

Progress = Callable[[Snapshot], None]


@dataclass(frozen=True)
class Client:
    """A site with its images at hand."""

    site: Site
    source: Source
    tests: dict[str, Source]

    def splits(self) -> list[Split]:
        """What it computes features of."""
        trained = [self.source.train] if self.site.role == "trainer" else []
        return [*trained, self.source.test, *(other.test for other in self.tests.values())]


@dataclass(frozen=True)
class Plan:
    """All that a simulation needs, checked before anything is started."""

    spec: dict[str, Any]
    initial_state: bytes | None
    threads: int
    clients: tuple[Client, ...]
    folder: Path
    pool: int
    backbone: Backbone
    features: FeatureCache
    progress: Progress


def checked(spec: dict[str, Any], sites: Sequence[Site], pool: int) -> tuple[dict[str, Any], int]:
    """The spec as it will run, and its number of torch threads.

    Raises:
        CommandError: the spec, the names of the sites, their number or the pool's is wrong.
    """
    names = [site.name for site in sites]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise CommandError(f"two clients are called {twice[0]!r}: give each a name of its own", Exit.BAD_INPUT)
    if pool < 1:
        raise CommandError(f"a pool of {pool} clients cannot compute: give at least 1", Exit.BAD_INPUT)
    try:
        resolved = resolve_spec(spec)
    except SpecError as error:
        raise CommandError(str(error), Exit.BAD_INPUT) from None
    check_trainers(sites, resolved.participation.min_clients)
    participation = dict(spec.get("participation", {})) | {"deadline_seconds": NO_DEADLINE}
    return spec | {"participation": participation, "start": "manual"}, resolved.training.threads


def expected_backbone(raw: dict[str, Any], backbone: Backbone | None) -> Backbone | None:
    """``backbone`` if it is given.

    Raises:
        CommandError: the spec names another.
    """
    if backbone is None:
        return None
    spec = resolve_spec(raw).backbone
    weights = None if spec.pretrained == "random" else spec.pretrained
    wanted, found = (
        (spec.model, weights, spec.precision),
        (backbone.model_name, backbone.pretrained, backbone.precision),
    )
    if wanted != found:
        text = f"the spec names the backbone {' '.join(map(str, wanted))}, but {' '.join(map(str, found))} is handed in"
        raise CommandError(f"{text}: give the one that the spec names", Exit.BAD_INPUT)
    return backbone


def open_site(site: Site, sources: SharedSources) -> Client:
    """The client of ``site``.

    Raises:
        CommandError: its data cannot be used.
    """
    try:
        tests = {name: sources.open(uri) for name, uri in site.tests.items()}
        return Client(site, sources.open(site.data), tests)
    except DataError as error:
        raise CommandError(f"client {site.name}: {error}", Exit.BAD_INPUT) from None
