"""`promptfed.run`: a whole federation in this process, from a notebook or a program."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from promptfed.experiments.bench.entries import RawSpec
from promptfed.experiments.simulation.simulation import simulate
from promptfed.library.result import Result
from promptfed.runtime.processes import Site
from promptfed.sdk.backbone import open_backbone, resolve
from promptfed.sdk.client import CommandError, Exit
from promptfed.sdk.progress import Snapshot
from promptfed.shared.clip import Backbone
from promptfed.shared.data import Source
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.methods import METHODS
from promptfed.shared.methods.core.interface import Method
from promptfed.shared.spec.spec import AllowedBackbones

Data = Mapping[str, str | Source] | Sequence[str | Source]
Methodlike = str | RawSpec | type[Method] | Method


def run(
    method: Methodlike,
    data: Data,
    *,
    unseen: Data = (),
    tests: Mapping[str, str | Source] | None = None,
    domains: Mapping[str, str] | None = None,
    backbone: Backbone | None = None,
    backbone_file: Path | str | None = None,
    folder: Path | str | None = None,
    pool: int = 1,
    device: str = "cpu",
    allow_backbone: AllowedBackbones = False,
    progress: bool | None = None,
    **spec: Any,
) -> Result:
    """Run a federation to its end in this process: the same coordinator and the same clients as over a network.

    Args:
        method: a name; a name with hyperparameters, as in ``{"name": "fedpgp", "b": 4}``; or your own
            subclass of `promptfed.shared.methods.core.interface.Method`, or an object of it, which this process
            knows by its name from then on.
        data: training data of each client, by its name or in order: data URIs such as ``"symbols:neon"`` or
            ``"folder:/data/pets"``, or `promptfed.shared.data.Source` objects.
        unseen: data of clients that only evaluate, such as a domain that nobody trains on.
        tests: further test sets of every training client, by name.
        domains: words for a client's images, by the client's name, as in ``{"neon": "a neon sign of a {}"}``.
        backbone: the loaded frozen model (`load_backbone`); default: the spec's, loaded here.
        backbone_file: a file of the backbone's weights, or a folder with one, instead of a download.
        folder: a new folder for the state of coordinator and clients; default: a temporary one.
        pool: clients that compute at once.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        allow_backbone: names of a model or checkpoint outside open_clip's registry that may be loaded; True: any.
        progress: whether to show progress; default: in a terminal and in a notebook.
        **spec: further keys of a run file: ``rounds``, ``class_names``, ``training``, ``seed``, ...

    Raises:
        CommandError: the spec, data or backbone cannot be used, or the federation did not finish.
    """
    sources, named = SharedSources(), _named(method)
    sites = _described(_all_sites(sources, data, unseen, tests or {}), domains or {})
    resolved = resolve({"name": str(named.get("name", "run")).replace("_", "-")} | spec | {"method": named})
    file = Path(backbone_file) if backbone_file is not None else None
    model = backbone or open_backbone(resolved.backbone, allow_backbone=allow_backbone, device=device, file=file)
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules if progress is None else progress
    options: dict[str, Any] = {"pool": pool, "backbone": model, "sources": sources}
    options |= {"folder": Path(folder) if folder is not None else None}
    with tqdm(total=resolved.rounds, unit="round", disable=not watched) as bar:

        def show(snapshot: Snapshot) -> None:
            bar.set_postfix_str(snapshot.describe(), refresh=False)
            done = snapshot.rounds if snapshot.state == "finished" else max(0, snapshot.round - 1)
            bar.update(done - bar.n)
            bar.refresh()

        result = simulate(resolved, sites, progress=show, **options)
        bar.update(resolved.rounds - bar.n)  # the last ones may be too quick to be told of
    return Result(result, model, allow_backbone)


def _named(method: Methodlike) -> RawSpec:
    """The method as a spec names it; a class or object of the caller's is registered."""
    if isinstance(method, str):
        return {"name": method}
    if isinstance(method, dict):
        return method
    kind = type(method) if isinstance(method, Method) else method
    try:
        METHODS.use(kind)
    except ValueError as error:
        raise CommandError(f"this method cannot be used: {error}", Exit.BAD_INPUT) from None
    return {"name": kind.name} | (method.hyper.model_dump() if isinstance(method, Method) else {})


def _all_sites(sources: SharedSources, data: Data, unseen: Data, tests: Mapping[str, str | Source]) -> list[Site]:
    further = {name: _uri(sources, f"test-{name}", source) for name, source in tests.items()}
    trainers = [Site(name, uri, "trainer", further) for name, uri in _sites(sources, data, "client")]
    return trainers + [Site(name, uri, "evaluator") for name, uri in _sites(sources, unseen, "unseen")]


def _described(sites: list[Site], domains: Mapping[str, str]) -> list[Site]:
    unknown = sorted(set(domains) - {site.name for site in sites})
    if unknown:
        text = f"domains describe {unknown[0]!r}, which is no client: they are {', '.join(site.name for site in sites)}"
        raise CommandError(text, Exit.BAD_INPUT)
    return [replace(site, domain=domains.get(site.name)) for site in sites]


def _sites(sources: SharedSources, data: Data, kind: str) -> list[tuple[str, str]]:
    named = data.items() if isinstance(data, Mapping) else ((f"{kind}-{k}", source) for k, source in enumerate(data))
    return [(name, _uri(sources, name, source)) for name, source in named]


def _uri(sources: SharedSources, name: str, source: str | Source) -> str:
    """``source`` as it is, or a URI that stands for it in this run."""
    if isinstance(source, str):
        return source
    uri = f"given:{name}"
    sources.add(uri, source)
    return uri
