"""`promptfed.run`: a whole federation in this process; `promptfed.connect`: federations at a coordinator.

Both are for a notebook or a program.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, InstanceOf
from tqdm import tqdm

from promptfed.console.progress import Snapshot, follow
from promptfed.experiments.bench.entries import RawSpec
from promptfed.experiments.simulation.simulation import simulate
from promptfed.library.result import Result
from promptfed.runtime.processes import Site
from promptfed.runtime.run_file import completed
from promptfed.sdk import operations
from promptfed.sdk.arguments import all_checked, checked
from promptfed.sdk.client import DEFAULT_URL, URL_VARIABLE, Coordinator, open_coordinator
from promptfed.shared.clip import Backbone
from promptfed.shared.data import Source
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.errors import BadInput, EndedBadly, Failed
from promptfed.shared.methods import METHODS, resolve_spec
from promptfed.shared.methods.core.interface import Method
from promptfed.shared.methods.core.spec_backbone import open_backbone, spelt
from promptfed.shared.spec.spec import AllowedBackbones

Opened = InstanceOf[Source]
Data = Mapping[str, str | Opened] | Sequence[str | Opened]
Methodlike = str | RawSpec | type[Method] | Method

SOON_SECONDS = 5.0  # what is over by then needs no progress in a log


@checked
def run(
    method: Methodlike,
    data: Data,
    *,
    unseen: Data = (),
    tests: Mapping[str, str | Opened] | None = None,
    domains: Mapping[str, str] | None = None,
    backbone: Backbone | Mapping[str, Any] | str | None = None,
    backbone_file: Path | str | None = None,
    folder: Path | str | None = None,
    pool: Annotated[int, Field(ge=1)] = 1,
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
        backbone: the frozen model: a name (one of open_clip's has random weights), a mapping as in a run file, such as
            ``{"model": "ViT-B-16", "pretrained": "openai"}``, or a loaded one (`load_backbone`).
        backbone_file: a file of the backbone's weights, or a folder with one, instead of a download.
        folder: a new folder for the state of coordinator and clients; default: a temporary one.
        pool: clients that compute at once.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        allow_backbone: names of models outside open_clip's registry that may be loaded; True: any.
        progress: whether to show progress; default: in a terminal and in a notebook, elsewhere once it takes
            over 5 s.
        **spec: further keys of a run file: ``rounds``, ``class_names``, ``training``, ``seed``, ...

    Raises:
        PromptfedError: the spec, data or backbone cannot be used, or the federation did not finish.
    """
    sources, named = SharedSources(), _named(method)
    sites = _described(_all_sites(sources, data, unseen, tests or {}), domains or {})
    raw = {"name": str(named.get("name", "run")).replace("_", "-")} | spec | {"method": named}
    raw |= {} if backbone is None else {"backbone": spelt(backbone)}
    resolved = resolve_spec(completed(raw, sites, lambda uri, role: sources.open(uri, role).class_names)[0])
    file = Path(backbone_file) if backbone_file is not None else None
    model = backbone if isinstance(backbone, Backbone) else None
    if model is not None and file is not None:
        raise BadInput("backbone is loaded already: leave backbone_file out")
    if model is not None and device not in ("cpu", str(model.device)):
        raise BadInput(f"backbone is loaded on {model.device} already: load it on {device}, or leave device out")
    model = model or open_backbone(resolved.backbone, allow_backbone=allow_backbone, device=device, file=file)
    options: dict[str, Any] = {"pool": pool, "backbone": model, "sources": sources}
    options |= {"folder": Path(folder) if folder is not None else None}
    with _shown(progress, resolved.rounds) as show:
        result = simulate(resolved, sites, progress=show, **options)
    return Result(result, model, allow_backbone)


@contextmanager
def _shown(progress: bool | None, rounds: int | None = None) -> Iterator[Callable[[Snapshot], None]]:
    """What shows each snapshot on a bar of rounds. With ``rounds``, the bar is full once the block has ended."""
    live = progress or "ipykernel" in sys.modules or bool(sys.stderr and sys.stderr.isatty())
    hidden = sys.stderr is None or progress is False
    # A log is written seldom, and not at all by what is over soon.
    patience = {} if live else {"delay": SOON_SECONDS, "mininterval": SOON_SECONDS}
    with tqdm(total=rounds, unit="round", disable=hidden, **patience) as bar:

        def show(snapshot: Snapshot) -> None:
            bar.total = snapshot.rounds
            bar.set_postfix_str(snapshot.ended or snapshot.describe(), refresh=False)
            bar.update((snapshot.rounds if snapshot.state == "finished" else max(0, snapshot.round - 1)) - bar.n)
            if live:
                bar.refresh()

        yield show
        if rounds is not None:  # the last ones may be too quick to be told of
            bar.update(rounds - bar.n)


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
        raise BadInput(f"this method cannot be used: {error}") from None
    return {"name": kind.name} | (method.hyper.model_dump() if isinstance(method, Method) else {})


def _all_sites(sources: SharedSources, data: Data, unseen: Data, tests: Mapping[str, str | Source]) -> list[Site]:
    further = {name: _uri(sources, f"test-{name}", source) for name, source in tests.items()}
    trainers = [Site(name, uri, "trainer", further) for name, uri in _sites(sources, data, "client")]
    return trainers + [Site(name, uri, "evaluator") for name, uri in _sites(sources, unseen, "unseen")]


def _described(sites: list[Site], domains: Mapping[str, str]) -> list[Site]:
    unknown = sorted(set(domains) - {site.name for site in sites})
    if unknown:
        text = f"domains describe {unknown[0]!r}, which is no client: they are {', '.join(site.name for site in sites)}"
        raise BadInput(text)
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


@checked
def connect(url: str | None = None, *, token: str | None = None, token_file: Path | str | None = None) -> Connection:
    """A coordinator at ``url`` (default: $PROMPTFED_COORDINATOR, else loopback's port 8080) with its operator token.

    Of several coordinators that wait for each other, ``url`` may name all, separated by commas.

    The token is ``token``, or that of ``token_file``, or $PROMPTFED_OPERATOR_TOKEN.

    Raises:
        PromptfedError: there is no token, or two are given.

    Example:
        >>> with promptfed.connect(token_file="run/coordinator/operator.token") as coordinator:
        ...     federation = coordinator.create("promptfl", "styles", rounds=3)
        ...     print(federation.enrolment_token())
    """
    if token is not None and token_file is not None:
        raise BadInput("token and token_file both name the operator token: give one")
    if "" in (url, token, token_file):
        raise BadInput("url, token and token_file are no empty texts: leave out what is not known")
    if token is not None:
        return Connection(Coordinator(url or os.environ.get(URL_VARIABLE) or DEFAULT_URL, token))
    return Connection(open_coordinator(url, Path(token_file) if token_file is not None else None))


@all_checked
class Connection:
    """One coordinator as its operator sees it; close it, or use it in a ``with`` block."""

    def __init__(self, api: Coordinator):
        self._api = api

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._api.close()

    def create(
        self, method: str | dict[str, Any], name: str, *, allow_backbone: AllowedBackbones = False, **spec: Any
    ) -> Federation:
        """Create a federation; ``spec`` has the further keys of its spec. The backbone is loaded here, for its
        fingerprint.

        Raises:
            PromptfedError: the spec or the backbone is wrong, or the coordinator refuses.
        """
        from promptfed.shared.methods.core.spec_backbone import with_backbone

        named = {"name": method} if isinstance(method, str) else method
        raw = spec | {"name": name, "method": named}
        resolved, initial_state = with_backbone(resolve_spec(raw), allow_backbone)
        raw["backbone"] = resolved.backbone.model_dump(mode="json", exclude_unset=True)
        created = self._api.run(operations.create(raw, initial_state))
        return Federation(self._api, created.json["id"], allow_backbone)

    def federation(self, name: str) -> Federation:
        """The federation of that name or id. Raises PromptfedError if there is none."""
        return Federation(self._api, self._api.send(operations.get_federation(name)).json["id"])

    def federations(self) -> list[Federation]:
        """All federations."""
        pages = self._api.run(operations.list_federations())
        return [Federation(self._api, view["id"]) for page in pages for view in page.json["federations"]]


@all_checked
class Federation:
    """One federation at a coordinator. Every call asks the coordinator; every refusal is a PromptfedError."""

    def __init__(self, api: Coordinator, id: str, allow_backbone: AllowedBackbones = False):
        self._api, self.id, self._allow = api, id, allow_backbone

    def __repr__(self) -> str:
        view = self._api.send(operations.get_federation(self.id)).view
        return f"<Federation {view.name}: {view.state}, round {view.round} of {view.spec.rounds}>"

    def status(self) -> dict[str, Any]:
        """What ``GET /v1/federations/{id}`` answers: resolved spec, state, round, who is awaited."""
        status: dict[str, Any] = self._api.send(operations.get_federation(self.id)).json
        return status

    @property
    def state(self) -> str:
        """``enrolling``, ``running``, ``paused``, ``finished``, ``failed`` or ``cancelled``."""
        return str(self.status()["state"])

    def clients(self) -> list[dict[str, Any]]:
        """The enrolled clients."""
        pages = self._api.run(operations.list_clients(self.id))
        return [client for page in pages for client in page.json["clients"]]

    def enrolment_token(self, uses: Annotated[int, Field(ge=1)] = 1) -> str:
        """A fresh token with which ``uses`` clients can enrol."""
        return self._api.send(operations.mint_token(self.id, uses)).view.token

    def start(self) -> Self:
        """Start the rounds, and confirm the backbone that the first client enrolled with."""
        return self._steer("start")

    def pause(self) -> Self:
        """Pause: no client is asked until `resume`."""
        return self._steer("pause")

    def resume(self) -> Self:
        """Resume after a pause."""
        return self._steer("resume")

    def cancel(self) -> Self:
        """End for good."""
        return self._steer("cancel")

    def wait(self, seconds: float | None = None, *, progress: bool | None = None) -> Result:
        """Wait until it has finished; its result.

        Raises:
            PromptfedError: it ended otherwise, or ``seconds`` have passed.
        """
        end = time.monotonic() + seconds if seconds is not None else None

        def look() -> None:
            if end is not None and time.monotonic() > end:
                raise Failed(f"the federation has not finished in {seconds:g} s")

        with _shown(progress) as show:
            snapshot: Snapshot | None = None
            for snapshot in follow(self._api, self.id, look):
                show(snapshot)
        if snapshot is None or snapshot.state != "finished":
            state = snapshot.describe() if snapshot is not None else "unknown"
            raise EndedBadly(f"the federation is {state}")
        return self.result()

    def result(self, round: int | None = None) -> Result:
        """Its result after ``round``, or after its last finished one."""
        taken = self._api.run(operations.take(self.id, round))
        return Result(taken, allow_backbone=self._allow, coordinator=self._api)

    def _steer(self, verb: operations.Verb) -> Self:
        self._api.send(operations.steer(self.id, verb))
        return self
