"""Protocols made from others: FedMGP's combined metric, ceilings of a federation, and corrupted pictures.

Ceilings show how much can be gained: a method in its federation beside the same method without the federation's limits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, harmonic_mean
from typing import ClassVar

from promptfed.experiments.protocols.label_spaces import label_space
from promptfed.experiments.protocols.protocols import (
    PROTOCOLS,
    TARGET,
    BaseToNovel,
    FewShot,
    LeaveOneDomainOut,
    Personalisation,
    Pick,
    Protocol,
    Trial,
    headline,
)
from promptfed.experiments.protocols.setting import UNSEEN_DOMAIN, Setting, with_options
from promptfed.runtime.services import Site
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.result import Accuracy
from promptfed.shared.data.corruptions import CORRUPTIONS, STRENGTHS
from promptfed.shared.data.union import union_uri

CM = "CM"
FEDERATED, ON_TARGET, CENTRALISED, SINGLE, ALONE = "federated", "on target", "centralised", "single source", "alone"
POOLED = "pooled"  # the client that has all images
CLEAN, MEAN = "clean", "mean"
_UNDER = "-under-"  # between the names of a test set and of its corruption: test-under-noise-1


class CombinedMetric(BaseToNovel):
    """Base-to-novel with a further column, CM = (local + HM(base, novel))/2 (Bo et al., NeurIPS 2025, Table 1).

    It is computed from the three averages in the table, as is the harmonic mean.
    """

    name = "combined:base-to-novel"
    summary = "base classes divided over the clients, novel classes unseen; CM = (local + HM(base, novel))/2"

    def columns(self, setting: Setting) -> tuple[str, ...]:
        """Those of base-to-novel, and CM."""
        return (*super().columns(setting), CM)

    def scores(self, by_trial: Mapping[str, Sequence[Accuracy]], pick: Pick) -> dict[str, float]:
        """Those of base-to-novel, and CM."""
        means = super().scores(by_trial, pick)
        others = harmonic_mean([means["base"], means["novel"]])
        return means | {CM: (means["local"] + others) / 2}


class Ceilings(Protocol):
    """A protocol's federation beside trials without its limits, a column each: the mean over all trials of a kind."""

    kinds: ClassVar[tuple[str, ...]]

    def columns(self, setting: Setting) -> tuple[str, ...]:
        """The kinds of trials; a trial's name begins with its kind."""
        return self.kinds

    def scores(self, by_trial: Mapping[str, Sequence[Accuracy]], pick: Pick) -> dict[str, float]:
        """The mean of each kind that a trial has values of."""
        values: dict[str, list[float]] = {}
        for name, rows in by_trial.items():
            kind = next(kind for kind in self.kinds if name.startswith(kind))
            values.setdefault(kind, []).extend(self.values(kind, rows, pick))
        return {kind: fmean(values[kind]) for kind in self.kinds if values.get(kind)}

    @abstractmethod
    def values(self, kind: str, rows: Sequence[Accuracy], pick: Pick) -> Iterable[float]:
        """The values of one trial, each counting once."""


class TargetCeilings(Ceilings):
    """Leave-one-domain-out with three further columns, all means over the targets.

    ``on target``: one client trained on as many images of the target as a source has, tested on the same test images.
    ``centralised``: one client with all sources' images. ``single source``: each source alone, as a mean. A method that
    needs several clients has only the first column.
    """

    name = "ceilings:leave-one-domain-out"
    summary = "each domain once unseen, beside training on the target itself, on all sources in one place, on one alone"
    kinds = (FEDERATED, ON_TARGET, CENTRALISED, SINGLE)
    inner = LeaveOneDomainOut()

    def used(self, setting: Setting) -> frozenset[str]:
        """As leave-one-domain-out, without ``target_images``: the target's training images are not test images here."""
        return self.inner.used(setting) - {"target_images"}

    def trials(self, setting: Setting, seed: int, personal: bool) -> list[Trial]:
        """For each target the federation, and the ceilings with one client each."""
        if setting.target_images != "test":
            raise CommandError(f"{self.name} trains on the target's images: test on its test split", Exit.BAD_INPUT)
        if any(UNSEEN_DOMAIN in data for data in setting.data):
            text = f"{self.name} trains on the target, which data with {UNSEEN_DOMAIN} in it are only tested on"
            raise CommandError(f"{text}: leave that option out", Exit.BAD_INPUT)
        trials: list[Trial] = []
        for whole in self.inner.trials(setting, seed, personal):
            space = label_space(setting.class_names, whole.name, setting.domain_uris())
            target = setting.uri(space.cut(setting.domain_uris()[whole.name]), seed)
            sources = [site for site in whole.sites if site.role == "trainer"]
            referees = [site for site in whole.sites if site.role != "trainer"]
            tests = sources[0].tests
            pooled = Site(POOLED, union_uri(site.data for site in sources), tests=tests)
            singles = [(f"{SINGLE} {site.name}", (site, *referees)) for site in sources]
            for kind, sites in (
                (FEDERATED, whole.sites),
                (ON_TARGET, (Site("target", target, domain=setting.domain_words.get(whole.name)),)),
                (CENTRALISED, (pooled, *referees)),
                *singles,
            ):
                trials.append(Trial(f"{kind}/{whole.name}", whole.spec, tuple(sites)))
        return trials

    def values(self, kind: str, rows: Sequence[Accuracy], pick: Pick) -> Iterable[float]:
        """The accuracy on the target: an evaluator's, or the mean of personal classifiers', or the target's own."""
        shared = [row for row in rows if row.role == "evaluator"]
        own = [row for row in rows if row.split == ("test" if kind == ON_TARGET else TARGET)]
        return [fmean(value for row in shared or own if (value := pick(row)) is not None)]


class ClientCeilings(Ceilings):
    """Personalisation beside each client alone, and one model of all clients' images tested on each client's images."""

    name = "ceilings:personalisation"
    summary = "every client tested on its own mix, beside each client alone and all images in one place"
    kinds = (FEDERATED, ALONE, CENTRALISED)
    inner = Personalisation()

    def used(self, setting: Setting) -> frozenset[str]:
        """As personalisation, without tests on other clients' images."""
        return self.inner.used(setting) - {"out_of_client", "swap_prompts"}

    def trials(self, setting: Setting, seed: int, personal: bool) -> list[Trial]:
        """The federation, each client alone, and all images in one place."""
        [whole] = self.inner.trials(setting, seed, personal)
        sites = [Site(site.name, site.data, domain=site.domain) for site in whole.sites]
        pooled = Site(POOLED, union_uri(site.data for site in sites), tests={site.name: site.data for site in sites})
        alone = [Trial(f"{ALONE}/{site.name}", whole.spec, (site,)) for site in sites]
        return [
            Trial(f"{FEDERATED}/all", whole.spec, tuple(sites)),
            *alone,
            Trial(f"{CENTRALISED}/all", whole.spec, (pooled,)),
        ]

    def values(self, kind: str, rows: Sequence[Accuracy], pick: Pick) -> Iterable[float]:
        """The accuracy on each client's test images, which are a further test set of the pooled client."""
        own = [row for row in rows if (row.split == "test") == (kind != CENTRALISED)]
        return [value for row in own if (value := pick(row)) is not None]


class Corrupted(Protocol):
    """Trained on clean pictures; tested on clean pictures and on corrupted ones (`shared.data.corruptions`).

    Columns: the inner protocol's headline number (its harmonic mean, or its mean) on clean pictures, under each
    corruption (the mean over the strengths), and the mean over the corruptions.
    """

    def __init__(self, inner: Protocol):
        self.inner = inner
        self.name = f"corrupted:{inner.name}"  # type: ignore[misc]  # each inner protocol makes another
        self.summary = f"{inner.name}, tested also on noisy, blurred, pale and compressed pictures"

    def used(self, setting: Setting) -> frozenset[str]:
        """The inner protocol's, without tests on other clients' images and unseen classes."""
        return self.inner.used(setting) - {"out_of_client", "unseen_classes", "swap_prompts"}

    def columns(self, setting: Setting) -> tuple[str, ...]:
        """Clean, each corruption, their mean."""
        return (CLEAN, *CORRUPTIONS, MEAN)

    def trials(self, setting: Setting, seed: int, personal: bool) -> list[Trial]:
        """The inner protocol's, with every test set once more for each corruption and strength."""
        plain = replace(setting, out_of_client=False, unseen_classes=False, swap_prompts=False)
        trials = self.inner.trials(plain, seed, personal)
        return [replace(trial, sites=tuple(_tested(site) for site in trial.sites)) for trial in trials]

    def scores(self, by_trial: Mapping[str, Sequence[Accuracy]], pick: Pick) -> dict[str, float]:
        """The inner protocol's headline number for each corruption."""

        def of(mark: str) -> float:
            rows = {name: _marked(accuracies, mark) for name, accuracies in by_trial.items()}
            return headline(self.inner.scores(rows, pick))

        worse = {kind: fmean(of(f"{_UNDER}{kind}-{strength}") for strength in STRENGTHS) for kind in CORRUPTIONS}
        return {CLEAN: of(""), **worse, MEAN: fmean(worse.values())}


def _tested(site: Site) -> Site:
    tests = dict(site.tests)
    for name, uri in {"test": site.data, **site.tests}.items():
        for kind in CORRUPTIONS:
            for strength in STRENGTHS:
                tests[f"{name}{_UNDER}{kind}-{strength}"] = with_options(uri, {"corrupt": f"{kind}:{strength}"})
    return replace(site, tests=tests)


def _marked(rows: Sequence[Accuracy], mark: str) -> list[Accuracy]:
    """The accuracies on the test sets with ``mark`` in their name, renamed to those of the clean test sets."""
    if not mark:
        return [row for row in rows if _UNDER not in row.split]
    return [replace(row, split=row.split.removesuffix(mark)) for row in rows if row.split.endswith(mark)]


CEILINGS: dict[str, Protocol] = {protocol.name: protocol for protocol in (TargetCeilings(), ClientCeilings())}
CORRUPTED: dict[str, Protocol] = {
    protocol.name: protocol
    for protocol in (Corrupted(inner) for inner in PROTOCOLS.values() if not isinstance(inner, FewShot))
}
KNOWN: dict[str, Protocol] = PROTOCOLS | {CombinedMetric.name: CombinedMetric()} | CEILINGS | CORRUPTED
"""Every protocol by its name on the command line."""
