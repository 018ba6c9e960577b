"""A run in one YAML file: the spec, under ``clients`` the clients and their data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from promptfed.runtime.processes import Site
from promptfed.shared.data import DataError
from promptfed.shared.errors import BadInput
from promptfed.shared.messages import Role
from promptfed.shared.methods import needs_class_names, with_default_backbone
from promptfed.shared.plain_text import counted
from promptfed.shared.service.yaml_text import read_mapping
from promptfed.shared.spec.spec import NAME_PATTERN, FederationSpec, Name, SpecError

INDEX, COUNT = "{index}", "{count}"


class ClientEntry(BaseModel):
    """One client, or ``count`` clients. ``{index}`` (from 0) and ``{count}`` are replaced in its texts."""

    model_config = ConfigDict(extra="forbid", strict=True)

    data: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)] | None = None
    role: Literal["trainer", "evaluator"] = "trainer"
    tests: dict[Name, str] = {}
    domain: Annotated[
        str | None, Field(min_length=1, max_length=500, description="what the images look like, in words")
    ] = None
    count: Annotated[int, Field(ge=1, le=100_000)] | None = None

    def sites(self, count: int | None, first: int) -> Iterator[Site]:
        """The clients of the entry; numbering of unnamed clients starts at ``first``."""
        if self.count is None:
            yield Site(self.name or f"client-{first}", self.data, self.role, self.tests, self.domain)
            return
        total = count or self.count
        for index in range(total):

            def fill(text: str, index: int = index) -> str:
                return text.replace(INDEX, str(index)).replace(COUNT, str(total))

            tests = {name: fill(uri) for name, uri in self.tests.items()}
            words = None if self.domain is None else fill(self.domain)
            yield Site(fill(self.name or f"client-{INDEX}"), fill(self.data), self.role, tests, words)


@dataclass(frozen=True)
class RunFile:
    """The contents of a run file: the unresolved spec, and the clients in the file's order.

    ``chosen``: which backbone the spec has, and why, where the file names none.
    """

    spec: Mapping[str, Any]
    sites: tuple[Site, ...]
    chosen: str | None = None


def read_run(path: Path, clients: int | None = None) -> RunFile:
    """Read the run in ``path``; ``clients`` overrides the file's number of trainers.

    Raises:
        PromptfedError: the file cannot be read, ``clients`` is missing or invalid (with its path), a name occurs twice,
            or more trainers are requested than the file lists.
    """
    raw = read_mapping(path)
    if "clients" not in raw:
        text = f"{path} has no `clients`: list them as `- {{name: eyes, data: 'folder:/data/eyes'}}`"
        raise BadInput(text)
    entries = _entries(raw.pop("clients"), path)
    sites = _sites(entries, clients, path)
    raw = {"name": path.stem, **raw}
    try:
        spec, chosen = completed(raw, sites)
    except DataError:  # a run file may be written before its data are there
        spec, chosen = with_default_backbone(raw, data_of(sites))
    return RunFile(spec, sites, chosen)


def completed(
    raw: Mapping[str, Any], sites: Sequence[Site], names_of: Callable[[str, Role], Sequence[str]] | None = None
) -> tuple[dict[str, Any], str | None]:
    """``raw`` with what it leaves open and the data of ``sites`` say, and why it has its backbone.

    These are the backbone, and the class names where the method needs a list of them (`common_names`).
    ``names_of``: those of a URI; default: `class_names_of`.

    Raises:
        DataError: names are needed, and data of a site cannot be opened.
    """
    spec, chosen = with_default_backbone(raw, data_of(sites))
    if needs_class_names(spec):
        from promptfed.shared.data.registry import class_names_of

        named = [(site.role, tuple((names_of or class_names_of)(site.data, site.role))) for site in sites]
        if (names := common_names(named)) is not None:
            spec["class_names"] = names
    return spec, chosen


def common_names(named: Iterable[tuple[Role, Sequence[str]]]) -> list[str] | None:
    """The class names of the trainer that has all those of ``named`` ``(role, names)``; None: there is none."""
    lists = list(named)
    everything = {name for _, names in lists for name in names}
    return next((list(names) for role, names in lists if role == "trainer" and {*names} == everything), None)


def data_of(sites: Iterable[Site]) -> list[str]:
    """The URIs of all images of ``sites``."""
    return [uri for site in sites for uri in (site.data, *site.tests.values())]


def _entries(raw: Any, path: Path) -> list[ClientEntry]:
    listed = raw if isinstance(raw, list) else [raw]
    if not listed:
        raise BadInput(f"{path}: `clients` is empty: list at least one")
    entries = []
    for number, entry in enumerate(listed):
        where = f"clients.{number}" if isinstance(raw, list) else "clients"
        try:
            entries.append(ClientEntry.model_validate(entry))
        except ValidationError as error:
            raise BadInput(f"{path}: {SpecError.from_validation(error, where, ClientEntry)}") from None
    return entries


def _sites(entries: list[ClientEntry], clients: int | None, path: Path) -> tuple[Site, ...]:
    groups = [entry for entry in entries if entry.count is not None and entry.role == "trainer"]
    listed = [entry for entry in entries if entry.count is None and entry.role == "trainer"]
    stretch = None
    if clients is not None and len(groups) == 1 and not listed:
        stretch = clients
    sites: list[Site] = []
    for entry in entries:
        sites += entry.sites(stretch if entry in groups else None, first=len(sites))
    if clients is not None and stretch is None:
        sites = _first_trainers(sites, clients, path)
    _check_names(sites, path)
    return tuple(sites)


def _first_trainers(sites: list[Site], clients: int, path: Path) -> list[Site]:
    trainers = [site for site in sites if site.role == "trainer"]
    if clients > len(trainers):
        listed = counted(len(trainers), "trainer")
        text = f"{path} lists {listed}, not {clients}: ask for fewer, or give one entry with `count`"
        raise BadInput(text)
    kept = trainers[:clients]
    return [site for site in sites if site.role != "trainer" or site in kept]


def _check_names(sites: list[Site], path: Path) -> None:
    seen: set[str] = set()
    for site in sites:
        if not re.fullmatch(NAME_PATTERN, site.name):
            text = f"{path}: {site.name!r} is no client name: use letters, digits, '.', '_' and '-', at most 64"
            raise BadInput(text)
        if site.name in seen:
            text = f"{path}: two clients are named {site.name}: put {INDEX} into `name`, or give other names"
            raise BadInput(text)
        seen.add(site.name)
    if not any(site.role == "trainer" for site in sites):
        raise BadInput(f"{path}: no client is a trainer: nothing would be learned")


def with_own_classes(spec: FederationSpec, sites: Sequence[Site]) -> FederationSpec:
    """``spec`` with ``label_space: client`` where a partition deals the classes out to the trainers."""
    dealt = any("partition=pathological" in site.data for site in sites if site.role == "trainer")
    if spec.class_names is not None or not dealt:
        return spec
    return spec.model_copy(update={"method": spec.method | {"label_space": "client"}})


def check_trainers(sites: Sequence[Site], wanted: int) -> None:
    """Refuse fewer trainers than ``participation.min_clients``: the federation would never start.

    Raises:
        PromptfedError: there are fewer trainers.
    """
    trainers = sum(site.role == "trainer" for site in sites)
    if trainers < wanted:
        text = f"{counted(trainers, 'trainer')} where participation.min_clients wants {wanted}: give more, or lower it"
        raise BadInput(text)
