"""The choice of clients by ``participation.choice``, with a reason for each.

Everything follows from the rules and the run: the same run chooses the same clients, after a restart too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from promptfed.coordinator.domain.run_state import Rules, Run, Told
from promptfed.shared.seeds import sampling_number, sampling_order
from promptfed.shared.spec.participation import SQUARED_LOSSES, ParticipationSpec
from promptfed.shared.spec.spec_section import ceil_fraction

Reasons = dict[str, str]
"""Clients in the order in which they are chosen, each with the reason."""

# Of Oort (Lai et al. 2021): the share of unknown clients, its decay per round and its end; α; c; the clip; and the
# weight of the time since a client's last answer.
EXPLORED, DECAY, LEAST_EXPLORED = 0.9, 0.98, 0.2
PENALTY, CUT_OFF, CLIP, STALENESS = 2.0, 0.95, 0.95, 0.1


def chosen(rules: Rules, run: Run, names: Sequence[str], count: int) -> Reasons:
    """At most ``count`` of ``names``. Clients that have not rested for ``cool_down`` rounds are the last choice."""
    part = rules.choice
    assert part is not None
    order = sampling_order(rules.draw, run.round, list(names))
    tired = [name for name in order if 0 <= run.round - run.asked.get(name, -math.inf) <= part.cool_down]
    tired = tired if part.cool_down else []
    rested = [name for name in order if name not in tired]
    reasons = _CHOICES[part.choice](rules, run, rested, min(count, len(rested)))
    tired.sort(key=lambda name: run.asked[name])
    again = {name: f"asked in round {run.asked[name]}, and too few have rested longer" for name in tired}
    return dict([*reasons.items(), *again.items()][:count])


def _drawn(rules: Rules, run: Run, order: Sequence[str], count: int) -> Reasons:
    return dict.fromkeys(order[:count], "drawn")


def _available(rules: Rules, run: Run, order: Sequence[str], count: int) -> Reasons:
    return dict.fromkeys(order[:count], "all are asked")


def _by_turns(rules: Rules, run: Run, order: Sequence[str], count: int) -> Reasons:
    turns = sorted(order, key=lambda name: run.asked.get(name, 0))
    return {name: f"its turn: asked last in round {run.asked.get(name, 0) or '-'}" for name in turns[:count]}


def _power_of_choice(rules: Rules, run: Run, order: Sequence[str], count: int) -> Reasons:
    """Cho et al. (2022), with each client's latest reported loss (rpow-d): the highest of d drawn candidates.

    Candidates are drawn without replacement, with probabilities in proportion to their numbers of images. A client
    that has not been asked yet comes first. One that was asked and has reported no loss counts as their mean.
    """
    assert rules.choice is not None
    images = {name: max(1, run.members[name].images) for name in order}
    drawn = weighted_draw(rules, run, images, ceil_fraction(rules.choice.candidates, count))
    known = {name: run.told[name].loss or 0.0 for name in drawn if name in run.told and run.told[name].loss is not None}
    losses = _with_silent(known, run, drawn, math.inf)
    highest = sorted(drawn, key=lambda name: -losses[name])[:count]
    return {
        name: f"loss {losses[name]:.4g}, of {len(drawn)} candidates" if name in known else "its loss is not known"
        for name in highest
    }


def _with_silent(known: dict[str, float], run: Run, names: Sequence[str], new: float | None) -> dict[str, float]:
    """The ``known`` values and those of others: the mean of clients that were asked before, ``new`` of the rest.

    A client that never answers, or whose owner keeps its losses, would else be asked in every round.
    """
    mean = fmean(known.values()) if known else new
    others = {name: mean if name in run.asked else new for name in names if name not in known}
    return known | {name: value for name, value in others.items() if value is not None}


def _oort(rules: Rules, run: Run, order: Sequence[str], count: int) -> Reasons:
    """Lai et al. (2021), Algorithm 1: clients with high utilities, and some that have not answered yet."""
    assert rules.choice is not None
    known = {name: run.told[name] for name in order if name in run.told and run.told[name].squared is not None}
    images = {name: run.members[name].images for name in known}
    utility = _with_silent(utilities(rules.choice, known, images, run.round), run, order, None)
    share = max(LEAST_EXPLORED, EXPLORED * DECAY ** (run.round - 1))
    explored = int(share * count + sampling_number(rules.draw, run.round, ""))  # rounded at random: its mean is exact
    explored = min(len(order) - len(utility), max(explored, count - len(utility)))
    exploited = count - explored
    best = sorted(utility.values(), reverse=True)[:exploited]
    pool = {name: value for name, value in utility.items() if best and value >= CUT_OFF * best[-1]}
    reasons = {name: f"utility {utility[name]:.4g}" for name in weighted_draw(rules, run, pool, exploited)}
    new = [name for name in order if name not in utility][:explored]
    return reasons | dict.fromkeys(new, "explored: its utility is not known")


def utilities(
    part: ParticipationSpec, told: Mapping[str, Told], images: Mapping[str, int], round: int
) -> dict[str, float]:
    """Oort's utilities: n·√(Σ loss²/n), clipped at the 95th percentile, + √(0.1·ln R / L), × (T/t)² where t > T.

    n: images; R: this round; L: the round of the client's latest answer; t: the seconds that it took; T:
    ``preferred_seconds``.
    """
    plain = {name: math.sqrt(images[name] * max(0.0, one.squared or 0.0)) for name, one in told.items()}
    most = sorted(plain.values())[math.ceil(CLIP * len(plain)) - 1] if plain else 0.0
    made = {}
    for name, one in told.items():
        waited = math.sqrt(STALENESS * math.log(max(1, round)) / max(1, one.round))
        is_slow = part.preferred_seconds is not None and one.seconds > part.preferred_seconds
        speed = ((part.preferred_seconds or 0.0) / one.seconds) ** PENALTY if is_slow else 1.0
        made[name] = (min(plain[name], most) + waited) * speed
    return made


def weighted_draw(rules: Rules, run: Run, weights: Mapping[str, float], count: int) -> list[str]:
    """``count`` names without replacement, with probabilities in proportion to ``weights`` (Efraimidis, Spirakis)."""

    def key(name: str) -> tuple[float, str]:
        number = sampling_number(rules.draw, run.round, name)
        return (-math.log(number) / weights[name] if weights[name] > 0 else math.inf, name)

    return sorted(weights, key=key)[:count]


_CHOICES: dict[str, Callable[[Rules, Run, Sequence[str], int], Reasons]] = {
    "uniform": _drawn,
    "all_available": _available,
    "round_robin": _by_turns,
    "power_of_choice": _power_of_choice,
    "oort": _oort,
}


def told_by(metrics: Mapping[str, float], round: int, seconds: float | None) -> Told | None:
    """What an update's ``metrics`` say for the choice; None if they say nothing."""
    loss, squared = metrics.get("loss"), metrics.get(SQUARED_LOSSES)
    return None if loss is None and squared is None else Told(round, loss, squared, seconds or 0.0)
