"""A method and a learning rate for a run file, by successive halving on held-out training images (`promptfed tune`).

Every candidate trains for a few rounds, the better ones for more, and the last ones for all rounds with several seeds.
Then the rates around the best are tried until the best lies between two others. No test image is used. The run file's
own method and rate are in every rung, so the choice is never below them on the held-out images.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

import numpy as np

from promptfed.experiments.figures.comparison import paired_bootstrap
from promptfed.experiments.tuning.trials import Answers, Candidate, Trial, mean_of
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.plain_text import counted
from promptfed.shared.spec.halving import grid, ranked, rungs, survivors
from promptfed.shared.spec.spec import FederationSpec

AUTO = (
    "fedtaskres",
    "fedclipadapter",
    "fedlp",
    "fedclip",
    "fedpgp",
    "promptfl",
    "promptfolio",
    "pfedprompt",
    "fedlora",
)
"""Those that gain most in the sweep of defaults for their time; but for the last, images pass the tower once."""
LAST = 4  # candidates of the last rung
MOST_RATE = 1000.0  # that a spec may hold

Done = dict[Candidate, list[Trial]]
Progress = Callable[[str], None]


class Runs(Protocol):
    """What a choice needs of `Trials`."""

    default: FederationSpec

    def spec(self, method: str) -> FederationSpec:
        """The resolved spec of a method at its own rate. Raises CommandError if it cannot run."""

    def run(self, candidate: Candidate, rounds: int, seed: int) -> Trial:
        """One federation."""


@dataclass(frozen=True)
class Plan:
    """What may be tried: ``rates`` for every method (None: four decades around its default), under ``seeds``.

    A trial's seed draws the images that it holds out; four in a row hold out each quarter once. ``seconds`` limit the
    search; ``bytes`` are those that one client may send and receive in all rounds of the chosen federation.
    """

    methods: tuple[str, ...] = ()
    rates: tuple[float, ...] | None = None
    seeds: tuple[int, ...] = (12, 13, 14, 15)
    seconds: float = 300.0
    bytes: float | None = None


@dataclass(frozen=True)
class Gain:
    """A difference of accuracies (fractions) with its 95 % interval over paired images; none of a single seed."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Standing:
    """A candidate in the last rung that it reached: its accuracy there, and what one client's part costs in all."""

    candidate: Candidate
    rounds: int
    accuracy: float
    seconds: float
    bytes: float


@dataclass(frozen=True)
class Chosen:
    """The winner, what it gains over the default and over the template, and everything that was tried, best first.

    ``default_gain`` is None if the default wins. ``at_edge``: the rate is the smallest or largest that was tried.
    ``refused`` has a reason for each method that did not take part; ``untried`` counts candidates for which there was
    no time.
    """

    winner: Candidate
    default: Candidate
    accuracy: float
    zero_shot: float | None
    default_gain: Gain | None
    template_gain: Gain | None
    at_edge: bool
    tried: list[Standing]
    refused: dict[str, str]
    untried: int


def choose(
    runs: Runs, plan: Plan, progress: Progress = lambda text: None, clock: Callable[[], float] = time.monotonic
) -> Chosen:
    """The candidate with the highest accuracy in the last rung.

    Raises:
        CommandError: the run file's own method cannot be simulated, or all candidates have the same accuracy.
    """
    race = _Race(runs, plan, progress, clock)
    finals = race.refine(race.halve())
    scores = _scores(finals)
    if len(scores) > 1 and len(set(scores.values())) == 1:
        raise CommandError("every candidate has the same accuracy: nothing was trained that shows", Exit.BAD_INPUT)
    fits = [candidate for candidate in scores if candidate.method not in race.refused] or [race.default]
    winner = max(fits, key=lambda candidate: (scores[candidate], candidate == race.default))
    best = finals[winner]
    templates = [trial.template for trial in best]

    def told(found: Gain | None) -> Gain | None:
        """One seed's images say nothing of other draws: its gain has no interval."""
        return replace(found, low=None, high=None) if found is not None and len(plan.seeds) < 2 else found

    return Chosen(
        winner=winner,
        default=race.default,
        accuracy=scores[winner],
        zero_shot=fmean(map(mean_of, templates)) if all(templates) else None,
        default_gain=None
        if winner == race.default
        else told(gain(best, [trial.right for trial in finals[race.default]])),
        template_gain=told(gain(best, templates)),
        at_edge=winner.method not in race.without_rate and winner.rate in _edges(race.reached, winner.method),
        tried=race.standings(),
        refused=race.refused,
        untried=race.untried,
    )


def gain(trials: Sequence[Trial], others: Sequence[Answers]) -> Gain | None:
    """Mean difference to ``others`` (by seed), image by image; None if the two have no image in common."""
    pairs = zip(trials, others, strict=True)
    differences = [right - other[key] for trial, other in pairs for key, right in trial.right.items() if key in other]
    if not differences:
        return None
    low, high, _ = paired_bootstrap(differences)
    return Gain(float(np.concatenate(differences).mean()), low, high)


def _scores(trials: Done) -> dict[Candidate, float]:
    return {candidate: fmean(trial.accuracy for trial in done) for candidate, done in trials.items()}


def _rates(tried: Iterable[Candidate], method: str) -> list[float]:
    return [candidate.rate for candidate in tried if candidate.method == method]


def _edges(tried: Iterable[Candidate], method: str) -> tuple[float, float]:
    rates = _rates(tried, method)
    return min(rates), max(rates)


def _between(best: float, rate: float, other: float) -> bool:
    """Whether ``other`` is on the same side of ``best`` as ``rate``, and not clearly further away."""
    way, far = math.log(other / best), math.log(rate / best)
    return way * far > 0 and abs(way) < abs(far) + 0.1


class _Race:
    """The trials of a choice. The first rung, with every candidate, has half of the time; the others share the rest."""

    def __init__(self, runs: Runs, plan: Plan, progress: Progress, clock: Callable[[], float]):
        self._runs, self._plan, self._progress, self._clock = runs, plan, progress, clock
        self._began = clock()
        self.reached: Done = {}
        self._took: dict[str, float] = {}  # seconds of a round, by method
        spec = runs.default
        self.default, self._rounds = Candidate(spec.method["name"], spec.training.learning_rate), spec.rounds
        self.refused: dict[str, str] = {}
        self.without_rate: set[str] = set()
        self.untried = 0

    def halve(self) -> Done:
        """The trials of the last rung."""
        candidates, done = self._candidates(), Done()
        steps = rungs(len(candidates), self._rounds, last=LAST)
        for index, rung in enumerate(steps):
            share, last = (1 + index / len(steps)) / 2, rung is steps[-1]
            if done:
                candidates = survivors(_scores(done), rung.candidates, self.default, lambda tried: tried.method)
            if done and not last and self._spent() > share:
                continue  # the time left is for the last rung
            others = [candidate for candidate in candidates if candidate != self.default]
            must = {self.default, *(others[:1] if last and done else ())}
            seeds = self._plan.seeds if last else self._plan.seeds[:1]
            done = self._try_all(candidates, rung.rounds, seeds, share, must)
        return done

    def refine(self, finals: Done) -> Done:
        """``finals`` with rates half a decade below and above the best one, until these are worse or time ends."""
        while self._plan.rates is None:
            best = ranked(_scores(finals))[0]
            tried = _rates(finals, best.method)
            wanted = [
                rate for rate in grid(best.rate, 1, 2) if not any(_between(best.rate, rate, one) for one in tried)
            ]
            candidates = [Candidate(best.method, rate) for rate in wanted if rate not in tried and rate <= MOST_RATE]
            more = self._try_all(candidates, self._rounds, self._plan.seeds, 1)
            if not more:
                break
            finals = finals | more
        return finals

    def standings(self) -> list[Standing]:
        """All candidates, those that came furthest first, and the most accurate of these."""
        scores = _scores(self.reached)
        rows = [
            Standing(
                candidate,
                trials[0].rounds,
                scores[candidate],
                sum(trial.seconds for trial in trials),
                self._bytes(trials[0]),
            )
            for candidate, trials in self.reached.items()
        ]
        return sorted(rows, key=lambda row: (-row.rounds, -row.accuracy))

    def _candidates(self) -> list[Candidate]:
        """The default first, then every method at its own rate, then the other rates."""
        first, others = [self.default], []
        for method in dict.fromkeys([self.default.method, *self._plan.methods]):
            try:
                own = self._runs.spec(method).training.learning_rate
            except CommandError as error:
                self.refused[method] = str(error)
                continue
            rates = self._plan.rates or grid(own)
            first += [Candidate(method, own)] if self._plan.rates is None else []
            others += [Candidate(method, rate) for rate in rates]
        return list(dict.fromkeys([*first, *others]))

    def _spent(self, further: float = 0.0) -> float:
        """The share of the time that is gone after ``further`` seconds."""
        return (self._clock() - self._began + further) / self._plan.seconds

    def _try_all(
        self,
        candidates: Sequence[Candidate],
        rounds: int,
        seeds: Sequence[int],
        share: float,
        must: Set[Candidate] = frozenset(),
    ) -> Done:
        """The trials of the candidates for which there is time, and of those in ``must``."""
        done = Done()
        for place, candidate in enumerate(candidates):
            if self._is_out(candidate):
                continue
            expected = self._took.get(candidate.method, 0.0) * rounds * len(seeds)
            if candidate not in must and self._spent(expected) > share:
                self.untried += 1
                continue
            self._progress(f"{place + 1} of {len(candidates)} for {counted(rounds, 'round')}: {candidate}")
            trials = self._try(candidate, rounds, seeds)
            if trials:
                done[candidate] = self.reached[candidate] = trials
        return done

    def _try(self, candidate: Candidate, rounds: int, seeds: Sequence[int]) -> list[Trial]:
        """The trials by seed; none for a method that cannot run, needs too many bytes, or has no learning rate."""
        trials = []
        for seed in seeds:
            began = self._clock()
            try:
                trials.append(self._runs.run(candidate, rounds, seed))
            except CommandError as error:
                if candidate == self.default:
                    raise
                self.refused[candidate.method] = str(error)
                return []
            self._took[candidate.method] = (self._clock() - began) / trials[-1].rounds
        size, most = self._bytes(trials[0]), self._plan.bytes
        if most is not None and size > most:
            self.refused[candidate.method] = f"a client would send and receive {size:,.0f} bytes in all rounds"
            return trials if candidate == self.default else []
        for other, before in self.reached.items():
            same = other.method == candidate.method and other.rate != candidate.rate
            if same and before[0].confidences == trials[0].confidences != ():
                self.without_rate.add(candidate.method)
                return []
        return trials

    def _is_out(self, candidate: Candidate) -> bool:
        if candidate == self.default or candidate in self.reached:
            return candidate.method in self.refused and candidate != self.default
        return candidate.method in self.refused or candidate.method in self.without_rate

    def _bytes(self, trial: Trial) -> float:
        """Bytes of a client in all rounds, both ways."""
        return trial.bytes_round * self._runs.spec(trial.candidate.method).rounds
