"""Tuning: trials of a run file on held-out training images, successive halving, and the choice of a rate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol, TypeVar

import numpy as np

from promptfed.experiments.bench.trials import Answers, Candidate, Floats, Trial, mean_of
from promptfed.shared.errors import BadInput, PromptfedError
from promptfed.shared.methods import method_class
from promptfed.shared.plain_text import counted
from promptfed.shared.spec.spec import FederationSpec

CANDIDATES_FACTOR = 3  # candidates of a rung for each that goes on
ROUNDS_FACTOR = 2  # rounds of a rung for each round of the one before
DECADES = 4
Key = TypeVar("Key")

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
DRAWS = 10_000  # of the bootstrap
Progress = Callable[[str], None]
Done = dict[Candidate, list[Trial]]


@dataclass(frozen=True)
class Rung:
    """``candidates`` train for ``rounds`` rounds from the start."""

    candidates: int
    rounds: int


def rungs(candidates: int, rounds: int, last: int = 2) -> tuple[Rung, ...]:
    """The rungs for ``candidates``, from many with few rounds to at most ``last`` with all ``rounds``.

    A rung has a third of the candidates of the one before, and twice its rounds.

    Raises:
        ValueError: a number is below 1.
    """
    if min(candidates, rounds, last) < 1:
        raise ValueError("candidates, rounds and last must be at least 1")
    counts = [candidates]
    while counts[-1] > last:
        counts.append(max(last, math.ceil(counts[-1] / CANDIDATES_FACTOR)))
    steps = range(len(counts) - 1, -1, -1)
    return tuple(
        Rung(count, math.ceil(rounds / ROUNDS_FACTOR**step)) for count, step in zip(counts, steps, strict=True)
    )


def ranked(scores: Mapping[Key, float]) -> list[Key]:
    """The candidates from the highest score to the lowest; equal ones in the order of ``scores``."""
    return sorted(scores, key=lambda key: -scores[key])


def survivors(
    scores: Mapping[Key, float], keep: int, default: Key, group: Callable[[Key], Hashable] | None = None, most: int = 2
) -> list[Key]:
    """The ``keep`` best candidates in the order of their scores. The ``default`` always survives, if need be as last.

    With ``group`` at most ``most`` candidates of one group survive, such as the rates of one method.

    Raises:
        ValueError: ``keep`` is below 1, or the default has no score.
    """
    if keep < 1 or default not in scores:
        raise ValueError("at least one candidate must be kept, and the default must have a score")
    best: list[Key] = []
    for key in ranked(scores):
        if group is None or sum(group(other) == group(key) for other in best) < most:
            best.append(key)
    return best[:keep] if default in best[:keep] else [*best[: keep - 1], default]


def grid(centre: float, decades: float = DECADES, per_decade: int = 1) -> tuple[float, ...]:
    """Rates in equal ratios over ``decades``, in ascending order, with ``centre`` in the middle."""
    half = math.ceil(decades * per_decade / 2)
    steps = range(-half, half + 1)
    return tuple(_short(centre * 10 ** (step / per_decade)) if step else centre for step in steps)


def _short(rate: float) -> float:
    """The rate with two digits, as it is written into a spec."""
    return float(f"{rate:.2g}")


class Runs(Protocol):
    """What a choice needs of `Trials`."""

    default: FederationSpec

    def spec(self, method: str) -> FederationSpec:
        """The resolved spec of a method at its own rate. Raises PromptfedError if it cannot run."""

    def run(self, candidate: Candidate, rounds: int, seed: int) -> Trial:
        """One federation."""


@dataclass(frozen=True)
class Plan:
    """What may be tried: ``rates`` for every method (None: four decades around its default), under ``seeds``.

    A trial's seed draws the images that it holds out; four in a row hold out each quarter once. ``seconds`` limit the
    search.
    """

    methods: tuple[str, ...] = ()
    rates: tuple[float, ...] | None = None
    seeds: tuple[int, ...] = (12, 13, 14, 15)
    seconds: float = 300.0


@dataclass(frozen=True)
class Gain:
    """A difference of accuracies (fractions) with its 95 % interval over paired images; none of a single seed."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Standing:
    """A candidate in the last rung that it reached: its accuracy there, and what one client's part costs in all.

    ``seeds``: how many trials the accuracy is the mean of.
    """

    candidate: Candidate
    rounds: int
    seeds: int
    accuracy: float
    seconds: float
    bytes: float


@dataclass(frozen=True)
class Untried:
    """A candidate that a rung wanted and for which there was no time. ``rounds``: of the rung it reached; 0: none."""

    candidate: Candidate
    rounds: int


@dataclass(frozen=True)
class Chosen:
    """The winner, what it gains over the default and over the template, and everything that was tried, best first.

    ``accuracy`` is the mean of ``seeds`` trials after ``rounds``: of fewer than were asked for where time ran out.
    ``default_gain`` is None if the default wins. ``at_edge``: the rate is the smallest or largest that was tried.
    ``refused`` has a reason for each method that did not take part.
    """

    winner: Candidate
    default: Candidate
    accuracy: float
    rounds: int
    seeds: int
    zero_shot: float | None
    default_gain: Gain | None
    template_gain: Gain | None
    at_edge: bool
    tried: list[Standing]
    refused: dict[str, str]
    untried: list[Untried]


def choose(
    runs: Runs, plan: Plan, progress: Progress = lambda text: None, clock: Callable[[], float] = time.monotonic
) -> Chosen:
    """The candidate with the highest accuracy in the last rung, or in the one before where a rung was not finished.

    Raises:
        PromptfedError: the run file's own method cannot be simulated, or all candidates have the template's accuracy.
    """
    race = _Race(runs, plan, progress, clock)
    finals = race.refine(race.halve())
    scores = _scores(finals)
    if len(scores) > 1 and all(
        trial.accuracy == mean_of(trial.template) for trials in finals.values() for trial in trials
    ):
        raise BadInput("every candidate has the template's accuracy: nothing was trained that shows")
    fits = [candidate for candidate in scores if candidate.method not in race.refused] or [race.default]
    winner = max(fits, key=lambda candidate: (scores[candidate], candidate == race.default))
    best, beside = finals[winner], race.defaults[race.rung[winner]]
    templates = [trial.template for trial in best]

    def told(found: Gain | None) -> Gain | None:
        """One seed's images say nothing of other draws: its gain has no interval."""
        return replace(found, low=None, high=None) if found is not None and len(best) < 2 else found

    return Chosen(
        winner=winner,
        default=race.default,
        accuracy=scores[winner],
        rounds=best[0].rounds,
        seeds=len(best),
        zero_shot=fmean(map(mean_of, templates)) if all(templates) else None,
        default_gain=None if winner == race.default else told(gain(best, [trial.right for trial in beside])),
        template_gain=told(gain(best, templates)),
        at_edge=winner.method not in race.without_rate and winner.rate in _edges(race.reached, winner.method),
        tried=race.standings(),
        refused=race.refused,
        untried=race.left_behind(),
    )


def gain(trials: Sequence[Trial], others: Sequence[Answers]) -> Gain | None:
    """Mean difference to ``others`` (by seed), image by image; None if the two have no image in common."""
    pairs = zip(trials, others, strict=True)
    differences = [right - other[key] for trial, other in pairs for key, right in trial.right.items() if key in other]
    if not differences:
        return None
    low, high = paired_bootstrap(differences)
    return Gain(float(np.concatenate(differences).mean()), low, high)


def paired_bootstrap(differences: Sequence[Floats], seed: int = 0, draws: int = DRAWS) -> tuple[float, float]:
    """The 95 % interval of the mean difference of pairs.

    ``differences`` has one array ``(N,)`` for each list of pictures. Pictures are resampled within their list, so every
    draw has the same number of pictures of each list.
    """
    rng = np.random.default_rng(seed)
    sums = np.zeros(draws)
    for rows in differences:
        for start in range(0, draws, 500):
            size = min(500, draws - start)
            sums[start : start + size] += rows[rng.integers(len(rows), size=(size, len(rows)))].sum(axis=1)
    low, high = np.quantile(sums / sum(each.size for each in differences), [0.025, 0.975])
    return float(low), float(high)


def rates_of(text: str) -> tuple[float, ...]:
    """The rates of a text such as ``0.001,0.01`` in ascending order.

    Raises:
        PromptfedError: the text does not hold different rates above 0.
    """
    try:
        rates = tuple(sorted(float(part) for part in text.split(",")))
    except ValueError:
        rates = ()
    if not rates or len(set(rates)) < len(rates) or not all(0 < rate < math.inf for rate in rates):
        raise BadInput(f"--rates {text!r}: write different rates above 0 separated by commas")
    return rates


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
    """The trials of a choice. The first rung, with every candidate, has half of the time; the others share the rest.

    A candidate for which a rung has no time keeps its trials of the rung before.
    """

    def __init__(self, runs: Runs, plan: Plan, progress: Progress, clock: Callable[[], float]):
        self._runs, self._plan, self._progress, self._clock = runs, plan, progress, clock
        self._began = clock()
        self.reached: Done = {}
        self.rung: dict[Candidate, int] = {}  # that a candidate's trials are of
        self.defaults: dict[int, list[Trial]] = {}  # the default's trials, by rung
        self._took: dict[str, float] = {}  # seconds of a round, by method
        spec = runs.default
        self.default, self._rounds = Candidate(spec.method["name"], spec.training.learning_rate), spec.rounds
        self.refused: dict[str, str] = {}
        self.without_rate: set[str] = set()
        self._untried: dict[Candidate, int] = {}  # the rung for which there was no time
        self._last = 0

    def halve(self) -> Done:
        """The trials of the last rung; of those for which it had no time, their last ones."""
        candidates, done = self._candidates(), Done()
        steps = rungs(len(candidates), self._rounds, last=LAST)
        self._last = len(steps) - 1
        for index, rung in enumerate(steps):
            share, last = (1 + index / len(steps)) / 2, index == self._last
            if done:
                candidates = survivors(_scores(done), rung.candidates, self.default, lambda tried: tried.method)
            if done and not last and self._spent() > share:
                self._untried |= dict.fromkeys(candidates, index)
                continue  # the time left is for the last rung
            others = [candidate for candidate in candidates if candidate != self.default]
            must = {self.default, *(others[:1] if last and done else ())}
            seeds = self._plan.seeds if last else self._plan.seeds[:1]
            tried = self._try_all(candidates, index, rung.rounds, seeds, share, must)
            done = {each: done[each] for each in candidates if each in done and not self._is_out(each)} | tried
        return done

    def refine(self, finals: Done) -> Done:
        """``finals`` with rates half a decade below and above the best one, until these are worse or time ends.

        The best one itself first, where the last rung had no time for it.
        """
        while self._plan.rates is None:
            best = ranked(_scores(finals))[0]
            tried = _rates(finals, best.method)
            rates = [rate for rate in grid(best.rate, 1, 2) if not any(_between(best.rate, rate, one) for one in tried)]
            candidates = [Candidate(best.method, rate) for rate in rates if rate not in tried and rate <= MOST_RATE]
            if best.method in self.without_rate:
                candidates = []
            if self.rung[best] < self._last:
                candidates = [best]
            more = self._try_all(candidates, self._last, self._rounds, self._plan.seeds, 1)
            if not more:
                break
            finals = finals | more
        return finals

    def left_behind(self) -> list[Untried]:
        """Those for which there was no time in a rung, those that came furthest first."""
        rows = [
            Untried(candidate, self.reached[candidate][0].rounds if candidate in self.reached else 0)
            for candidate, rung in self._untried.items()
            if self.rung.get(candidate, -1) < rung and not self._is_out(candidate)
        ]
        return sorted(rows, key=lambda row: -row.rounds)

    def standings(self) -> list[Standing]:
        """All candidates, those that came furthest first, and the most accurate of these."""
        scores = _scores(self.reached)
        rows = [
            Standing(
                candidate,
                trials[0].rounds,
                len(trials),
                scores[candidate],
                sum(trial.seconds for trial in trials),
                trials[0].bytes_round * self._runs.spec(candidate.method).rounds,
            )
            for candidate, trials in self.reached.items()
        ]
        return sorted(rows, key=lambda row: (-row.rounds, -row.accuracy))

    def _candidates(self) -> list[Candidate]:
        """The default first, then every method at its own rate, then the other rates."""
        first, others = [self.default], []
        for method in dict.fromkeys([self.default.method, *self._plan.methods]):
            try:
                usual_rate = self._runs.spec(method).training.learning_rate
            except PromptfedError as error:
                self.refused[method] = str(error)
                continue
            if "learning_rate" in method_class(method).ignores:
                self.without_rate.add(method)
                first.append(Candidate(method, usual_rate))
                continue
            rates = self._plan.rates or grid(usual_rate)
            first += [Candidate(method, usual_rate)] if self._plan.rates is None else []
            others += [Candidate(method, rate) for rate in rates]
        return list(dict.fromkeys([*first, *others]))

    def _spent(self, further: float = 0.0) -> float:
        """The share of the time that is gone after ``further`` seconds."""
        return (self._clock() - self._began + further) / self._plan.seconds

    def _try_all(
        self,
        candidates: Sequence[Candidate],
        rung: int,
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
                self._untried[candidate] = rung
                continue
            self._progress(f"{place + 1} of {len(candidates)} for {counted(rounds, 'round')}: {candidate}")
            trials = self._try(candidate, rounds, seeds)
            if trials:
                done[candidate] = self.reached[candidate] = trials
                self.rung[candidate] = rung
                if candidate == self.default:
                    self.defaults[rung] = trials
        return done

    def _try(self, candidate: Candidate, rounds: int, seeds: Sequence[int]) -> list[Trial]:
        """The trials by seed; none for a method that cannot run or has no learning rate."""
        trials = []
        for seed in seeds:
            began = self._clock()
            try:
                trials.append(self._runs.run(candidate, rounds, seed))
            except PromptfedError as error:
                if candidate == self.default:
                    raise
                self.refused[candidate.method] = str(error)
                return []
            self._took[candidate.method] = (self._clock() - began) / trials[-1].rounds
        for other, before in self.reached.items():
            same = other.method == candidate.method and other.rate != candidate.rate
            if same and before[0].confidences == trials[0].confidences != ():
                self.without_rate.add(candidate.method)
                return []
        return trials

    def _is_out(self, candidate: Candidate) -> bool:
        if candidate == self.default or candidate in self.reached:
            return candidate.method in self.refused and candidate != self.default
        reached = any(other.method == candidate.method for other in self.reached)
        return candidate.method in self.refused or (candidate.method in self.without_rate and reached)
