"""Protocols of a bench: data URIs, their division over clients, label spaces, and the test sets."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean, harmonic_mean, pstdev
from typing import Any, ClassVar

from promptfed.runtime.processes import Site
from promptfed.sdk.result import Accuracy
from promptfed.shared.data.options import Role
from promptfed.shared.data.partition import clients_of
from promptfed.shared.data.registry import class_names_of
from promptfed.shared.data.schemes import scheme_of
from promptfed.shared.errors import BadInput

UNSEEN_DOMAIN = "{target}"  # in data: the domain that is left out, for sources that are tested on its images
_SHOWN = 5  # classes of one data set that an error lists
DOMAIN = "{domain}"
TARGET = "target"
Pick = Callable[[Accuracy], float | None]
_TRAINING = frozenset({"shots", "validation"})

_reader: ContextVar[Callable[[str, Role], tuple[str, ...]]] = ContextVar("reader", default=class_names_of)


@dataclass(frozen=True)
class Setting:
    """A bench's data and their division over clients. Each of ``domains`` replaces ``{domain}`` in ``data``.

    ``target_images``: an unseen domain is tested on its ``test`` split or on ``all`` its images. ``words`` describe
    domains, of presets whose folders' names do not.
    Sources that draw their test images draw others for every seed, so that a spread over seeds includes their
    sampling.
    """

    data: tuple[str, ...]
    domains: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    clients: int = 10
    classes_per_client: int | None = None
    partition: str = "pathological"
    alpha: float = 0.1
    shots: int | None = None
    validation: float | None = None
    curve: tuple[int, ...] = (1, 2, 4, 8, 16)
    target_images: str = "test"
    words: Mapping[str, str] = field(default_factory=dict)

    def uri(self, data: str, seed: int, **options: Any) -> str:
        """``data`` with the setting's options for this seed and ``options`` (None: left out)."""
        scheme = scheme_of(data)
        redrawn = scheme is not None and scheme.redrawn and self.validation is None
        common = {
            "shots": self.shots,
            "validation": self.validation,
            "split_seed": seed,
            "test_seed": seed if redrawn and seed else None,  # 0 is what is drawn anyway
        }
        return with_options(data, {**common, **options})

    def unseen(self, data: str, seed: int) -> str:
        """``data`` of a domain without a trainer, tested on its test split or on all its images."""
        whole = self.target_images == "all" and self.validation is None
        # For evaluators, all images of a folder are test images by default.
        scheme = scheme_of(data)
        of_files = scheme is not None and scheme.of_files and self.validation is None
        test_on = "all" if whole else "test" if of_files else None
        return self.uri(data, seed, shots=None, test_on=test_on)

    def domain_uris(self) -> dict[str, str]:
        """The data URI of each domain."""
        return {domain: self.data[0].replace("{domain}", domain) for domain in self.domains}


def with_target(uri: str, target: str | None) -> str:
    """``uri`` with ``{target}`` replaced; if ``target`` is None, without the options that hold it."""
    if target is not None:
        return uri.replace(UNSEEN_DOMAIN, target)
    address, _, query = uri.partition("?")
    parts = [part for part in query.split("&") if part and UNSEEN_DOMAIN not in part]
    return f"{address}?{'&'.join(parts)}" if parts else address


def with_options(uri: str, options: Mapping[str, Any]) -> str:
    """A data URI with further options. Options that it has already stay; options that are None are left out."""
    address, _, query = uri.partition("?")
    named = {part.partition("=")[0] for part in query.split("&") if part}
    added = [f"{key}={value}" for key, value in options.items() if value is not None and key not in named]
    parts = [part for part in (query, *added) if part]
    return f"{address}?{'&'.join(parts)}" if parts else address


@cache
def names_of(uri: str, role: Role = "trainer") -> tuple[str, ...]:
    """The class names of the data at ``uri``, remembered until `forget_names`.

    Raises:
        PromptfedError: the data cannot be used.
    """
    return _reader.get()(uri, role)


@contextmanager
def without_data() -> Iterator[None]:
    """Within the block every data set has two made-up classes: what a bench would be is told where data are missing."""
    token = _reader.set(lambda uri, role: ("a", "b"))
    try:
        yield
    finally:
        _reader.reset(token)
        forget_names()


def forget_names() -> None:
    """Forget the remembered class names, since data may have changed."""
    names_of.cache_clear()


def label_space(first: str, uris: Mapping[str, str]) -> list[str]:
    """The class names of the data set ``first`` among ``uris`` (by name).

    Raises:
        PromptfedError: data sets have classes that ``first`` lacks (the text names all); or data cannot be used.
    """
    names = names_of(uris[first])
    problems = []
    for name, uri in uris.items():
        more = [class_name for class_name in names_of(uri) if class_name not in names]
        if more:
            shown = ", ".join(more[:_SHOWN]) + (f" and {len(more) - _SHOWN} more" if len(more) > _SHOWN else "")
            problems.append(f"{name} has classes that {first} lacks ({shown})")
    if problems:
        text = f"{'; '.join(problems)}: name those to keep in the data URI, only=NAME,NAME"
        raise BadInput(text)
    return list(names)


@dataclass(frozen=True)
class Trial:
    """One federation of a protocol: its name within the seed, its additions to the spec, and its clients."""

    name: str
    spec: Mapping[str, Any]
    sites: tuple[Site, ...]


class Protocol(ABC):
    """One way to evaluate methods. The first columns are those of a paper's table."""

    name: ClassVar[str]
    summary: str

    @abstractmethod
    def used(self, setting: Setting) -> frozenset[str]:
        """The fields of ``setting`` that this protocol uses, besides the data."""

    @abstractmethod
    def columns(self, setting: Setting) -> tuple[str, ...]:
        """The table's columns, in order."""

    @abstractmethod
    def trials(self, setting: Setting, seed: int, personal: bool) -> list[Trial]:
        """The federations of one seed. If ``personal``, each client has its own classifier, and each is tested."""

    @abstractmethod
    def scores(self, by_trial: Mapping[str, Sequence[Accuracy]], pick: Pick) -> dict[str, float]:
        """The columns, from each trial's last evaluation; ``pick`` returns the method's or the template's accuracy."""


class BaseToNovel(Protocol):
    """Base classes divided over the clients, disjoint; no client has novel classes (FedPGP T1, FedTPG T1).

    ``local`` is a client's accuracy on test images of its own classes, over its method's label space; ``base`` and
    ``novel`` are over the base and the novel names. The harmonic mean is over these three averages.
    """

    name = "base-to-novel"
    summary = "base classes divided over the clients, novel classes unseen"

    def used(self, setting: Setting) -> frozenset[str]:
        """Fields of training, and ``clients`` or ``classes_per_client``."""
        return _TRAINING | {"clients" if setting.classes_per_client is None else "classes_per_client"}

    def columns(self, setting: Setting) -> tuple[str, ...]:
        """Local, base, novel, and their harmonic mean."""
        return ("local", "base", "novel", "harmonic mean")

    def trials(self, setting: Setting, seed: int, personal: bool) -> list[Trial]:
        """One federation with clients of every data set. A single data set's base names are the label space."""
        sites: list[Site] = []
        for number, data in enumerate(setting.data):
            tests = {part: setting.uri(data, seed, shots=None, classes=part) for part in ("base", "novel")}
            for client in range(self._clients(setting, data)):
                uri = setting.uri(
                    data,
                    seed,
                    classes="base",
                    partition="pathological",
                    clients=setting.clients if setting.classes_per_client is None else None,
                    classes_per_client=setting.classes_per_client,
                    partition_seed=seed,
                    client=client,
                )
                sites.append(Site(f"data{number}-client{client}", uri, tests=tests))
        names = _names(with_options(setting.data[0], {"classes": "base"})) if len(setting.data) == 1 else None
        return [Trial("all", {"class_names": names}, tuple(sites))]

    def scores(self, by_trial: Mapping[str, Sequence[Accuracy]], pick: Pick) -> dict[str, float]:
        """Means over the clients of each data set, then over the data sets, as FedTPG's paper averages."""
        by_data: dict[str, list[Accuracy]] = {}
        for row in by_trial["all"]:
            by_data.setdefault(row.client.partition("-")[0], []).append(row)
        means = {
            column: fmean(_mean(rows, pick, split) for rows in by_data.values())
            for column, split in (("local", "test"), ("base", "base"), ("novel", "novel"))
        }
        return means | {"harmonic mean": harmonic_mean(list(means.values()))}

    def _clients(self, setting: Setting, data: str) -> int:
        if setting.classes_per_client is None:
            return setting.clients
        return clients_of(len(_names(with_options(data, {"classes": "base"}))), setting.classes_per_client)


class LeaveOneDomainOut(Protocol):
    """Each target domain is left out once; each other domain has a client (FedPGP T2, PLAN T2-5, FaST-PT T1-2).

    The columns are the targets, their mean, and ``clients``: the mean accuracy on the source domains' own test images.
    A personal method is tested on the target with every client's classifier, as a mean. ``{target}`` in the data stands
    for the left-out domain; options that hold it are removed from the target's own data.
    """

    name = "leave-one-domain-out"
    summary = "each domain once the unseen target"

    def used(self, setting: Setting) -> frozenset[str]:
        """Fields of training, domains and targets; every domain is a client."""
        held_out = setting.validation is not None
        return _TRAINING | {"domains", "targets", "words"} | (set() if held_out else {"target_images"})

    def columns(self, setting: Setting) -> tuple[str, ...]:
        """The targets, their mean, and the clients' own domains."""
        return (*self._targets(setting), "mean", "clients")

    def trials(self, setting: Setting, seed: int, personal: bool) -> list[Trial]:
        """One federation for each target."""
        [data] = setting.data if len(setting.data) == 1 else [""]
        if DOMAIN not in data or len(setting.domains) < 2:
            text = (
                f"{self.name} needs one --data with {DOMAIN} in it, as 'symbols:{DOMAIN}', and at least two --domains"
            )
            raise BadInput(text)
        trials = []
        for target in self._targets(setting):
            uris = uris_beside(target, setting)
            names = label_space(target, uris)
            unseen = setting.unseen(uris[target], seed)
            tests = {TARGET: unseen} if personal else {}
            sites = [
                Site(_client(domain), setting.uri(uri, seed), tests=tests, domain=setting.words.get(domain))
                for domain, uri in uris.items()
                if domain != target
            ]
            words = setting.words.get(target)
            referees = [] if personal else [Site(_client(f"{TARGET}-{target}"), unseen, "evaluator", domain=words)]
            trials.append(Trial(target, {"class_names": names}, (*sites, *referees)))
        return trials

    def scores(self, by_trial: Mapping[str, Sequence[Accuracy]], pick: Pick) -> dict[str, float]:
        """The evaluator's accuracy or the clients' mean on each target; and the clients' on their own domains."""
        scores = {}
        for target, rows in by_trial.items():
            shared = [accuracy for accuracy in rows if accuracy.role == "evaluator"]
            target_rows = [accuracy for accuracy in rows if accuracy.split == TARGET]
            scores[target] = _mean(target_rows, pick, TARGET) if target_rows else _mean(shared, pick, "test")
        mean = fmean(scores.values())
        sources = [accuracy for rows in by_trial.values() for accuracy in rows if accuracy.role == "trainer"]
        return scores | {"mean": mean, "clients": _mean(sources, pick, "test")}

    def _targets(self, setting: Setting) -> tuple[str, ...]:
        unknown = sorted(set(setting.targets) - set(setting.domains))
        if unknown:
            raise BadInput(f"the target {unknown[0]} is not one of the domains")
        return setting.targets or setting.domains


class Personalisation(Protocol):
    """Every client is tested on its own mix of classes, or on its own domain (FedPGP T3/T5, pFedPG T1-3)."""

    name = "personalisation"
    summary = "every client tested on its own mix of classes, or on its own domain"

    def used(self, setting: Setting) -> frozenset[str]:
        """Fields of training, and domains or a partition."""
        return _TRAINING | ({"domains"} if any(DOMAIN in data for data in setting.data) else _partition(setting))

    def columns(self, setting: Setting) -> tuple[str, ...]:
        """The domains if each has a client; the mean, standard deviation and minimum over the clients."""
        domains = map(_client, setting.domains) if DOMAIN in setting.data[0] else ()  # as clients declare them
        return (*domains, "mean", "sd of clients", "worst client")

    def trials(self, setting: Setting, seed: int, personal: bool) -> list[Trial]:
        """One federation."""
        if len(setting.data) != 1:
            raise BadInput(f"{self.name} takes one --data")
        data = setting.data[0]
        if DOMAIN in data:
            if not setting.domains:
                raise BadInput(f"{data} needs --domains")
            names = label_space(setting.domains[0], setting.domain_uris())
            uris = {domain: setting.uri(uri, seed) for domain, uri in setting.domain_uris().items()}
        else:
            alpha = setting.alpha if setting.partition == "dirichlet" else None
            options = {"partition": setting.partition, "alpha": alpha, "clients": setting.clients}
            uris = {
                f"client{k:03}": setting.uri(data, seed, **options, partition_seed=seed, client=k)
                for k in range(setting.clients)
            }
            names = _names(data)
        sites = tuple(Site(_client(name), uri) for name, uri in uris.items())
        return [Trial("all", {"class_names": names}, sites)]

    def scores(self, by_trial: Mapping[str, Sequence[Accuracy]], pick: Pick) -> dict[str, float]:
        """Statistics over the clients, with equal weights."""
        values = _values(by_trial["all"], pick, "test")
        tested = [accuracy for accuracy in by_trial["all"] if accuracy.split == "test"]
        by_domain = {accuracy.domain: _mean([accuracy], pick, "test") for accuracy in tested if accuracy.domain}
        if len(by_domain) < len(tested):  # several clients share a domain: it is no column
            by_domain = {}
        return {**by_domain, "mean": fmean(values), "sd of clients": pstdev(values), "worst client": min(values)}


class MultiLabel(Personalisation):
    """The same for images with several labels; figures are mean average precisions."""

    name = "multi-label"
    summary = "images with several labels: the mean average precision of every client"

    def trials(self, setting: Setting, seed: int, personal: bool) -> list[Trial]:
        """One federation with ``task: multi_label``."""
        trials = super().trials(setting, seed, personal)
        return [replace(trial, spec={**trial.spec, "task": "multi_label"}) for trial in trials]


class CrossDataset(Protocol):
    """Trained on the first data set, divided over the clients, and tested on all others (FedTPG T3).

    A personal method is tested with every client's classifier, as a mean; other methods with one client's.
    """

    name = "cross-dataset"
    summary = "trained on the first data set, tested on the others"

    def used(self, setting: Setting) -> frozenset[str]:
        """Fields of training, and a partition of the first data set."""
        return _TRAINING | _partition(setting)

    def columns(self, setting: Setting) -> tuple[str, ...]:
        """The source's own test images, each other data set, and the mean of those."""
        return ("source", *self._others(setting), "mean")

    def trials(self, setting: Setting, seed: int, personal: bool) -> list[Trial]:
        """One federation. Its first client, or each client with a personal classifier, is tested on all data sets."""
        if len(setting.data) < 2:
            raise BadInput(f"{self.name} needs at least two --data: the source and the others")
        source = setting.data[0]
        tests = {name: setting.uri(uri, seed, shots=None) for name, uri in self._others(setting).items()}
        tests["source"] = setting.uri(source, seed, shots=None)
        sites = []
        for client in range(setting.clients):
            options = {"partition": setting.partition, "clients": setting.clients, "client": client}
            alpha = setting.alpha if setting.partition == "dirichlet" else None
            uri = setting.uri(source, seed, **options, alpha=alpha, partition_seed=seed)
            sites.append(Site(f"client{client:03}", uri, tests=tests if personal or client == 0 else {}))
        return [Trial("all", {"class_names": _names(source)}, tuple(sites))]

    def scores(self, by_trial: Mapping[str, Sequence[Accuracy]], pick: Pick) -> dict[str, float]:
        """Means over the clients that were tested."""
        splits = sorted({accuracy.split for accuracy in by_trial["all"]} - {"test"})
        scores = {split: _mean(by_trial["all"], pick, split) for split in splits}
        others = [value for split, value in scores.items() if split != "source"]
        return scores | {"mean": fmean(others)}

    def _others(self, setting: Setting) -> dict[str, str]:
        return {f"data{number}": uri for number, uri in enumerate(setting.data) if number}


class FewShot(Protocol):
    """Another protocol's headline number at several numbers of shots: a curve (PLAN F5, FaST-PT F4)."""

    name = "few-shot"
    summary = "few training images of each class"

    def __init__(self, inner: Protocol):
        self.inner = inner
        self.summary = f"{inner.name} at several numbers of training images of each class and client"

    def used(self, setting: Setting) -> frozenset[str]:
        """The inner protocol's, with ``curve`` instead of ``shots``."""
        return self.inner.used(setting) - {"shots"} | {"curve"}

    def columns(self, setting: Setting) -> tuple[str, ...]:
        """One for each number of shots."""
        return tuple(_shots(number) for number in setting.curve)

    def trials(self, setting: Setting, seed: int, personal: bool) -> list[Trial]:
        """The inner protocol's, for each number of shots."""
        return [
            replace(trial, name=f"{_shots(number)}/{trial.name}")
            for number in setting.curve
            for trial in self.inner.trials(replace(setting, shots=number), seed, personal)
        ]

    def scores(self, by_trial: Mapping[str, Sequence[Accuracy]], pick: Pick) -> dict[str, float]:
        """The inner protocol's harmonic mean, or mean."""
        by_shots: dict[str, dict[str, Sequence[Accuracy]]] = {}
        for name, rows in by_trial.items():
            shots, _, trial = name.partition("/")
            by_shots.setdefault(shots, {})[trial] = rows
        return {shots: headline(self.inner.scores(rows, pick)) for shots, rows in by_shots.items()}


def headline(scores: Mapping[str, float]) -> float:
    """The number that summarises a protocol's columns: the harmonic mean if there is one, else the mean."""
    return scores["harmonic mean" if "harmonic mean" in scores else "mean"]


_PLAIN: tuple[Protocol, ...] = (BaseToNovel(), LeaveOneDomainOut(), Personalisation(), MultiLabel(), CrossDataset())
PROTOCOLS: dict[str, Protocol] = {
    **{protocol.name: protocol for protocol in _PLAIN},
    **{f"{FewShot.name}:{protocol.name}": FewShot(protocol) for protocol in _PLAIN},
}
"""Every protocol by its name on the command line."""


def uris_beside(target: str, setting: Setting) -> dict[str, str]:
    """The data URI of each domain if ``target`` is left out."""
    return {
        domain: with_target(uri, None if domain == target else target) for domain, uri in setting.domain_uris().items()
    }


def _partition(setting: Setting) -> frozenset[str]:
    return frozenset({"clients", "partition"} | ({"alpha"} if setting.partition == "dirichlet" else set()))


def _shots(number: int) -> str:
    return f"{number} shot{'s' if number > 1 else ''}"


def _client(name: str) -> str:
    """A domain's name as a client's name, which has no spaces."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)


def _names(uri: str) -> list[str]:
    return list(names_of(uri))


def _values(rows: Iterable[Accuracy], pick: Pick, split: str) -> list[float]:
    return [value for row in rows if row.split == split and (value := pick(row)) is not None]


def _mean(rows: Iterable[Accuracy], pick: Pick, split: str) -> float:
    return fmean(_values(rows, pick, split))
