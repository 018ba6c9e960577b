"""Virtual time: arrivals, states and times are those of a written-out queue of events."""

from __future__ import annotations

import heapq
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.experiments.simulation.simulation import SimulationOptions, simulate
from promptfed.runtime.services import Site
from promptfed.runtime.speeds import Clock
from promptfed.sdk.errors import CommandError
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone, tiny

DATA = "symbols:painting?topic=weather&per_class=4&test_per_class=1&partition=iid&clients=5&client={}"
SITES = [Site(name, DATA.format(number)) for number, name in enumerate("abcde")]
SECONDS = {"a": 1.0, "b": 2.5, "c": 3.25, "d": 7.0, "e": 19.0}
ROUNDS = 8

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.set_num_threads(1)
    return load_backbone(tiny.MODEL, tiny.PRETRAINED)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return FeatureCache(tmp_path_factory.mktemp("features"))


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    trace = tmp_path / "trace.csv"
    trace.write_text("client,seconds\n" + "".join(f"{name},{seconds}\n" for name, seconds in SECONDS.items()))
    return Clock(speeds=f"trace:{trace}")


def run(backbone: Backbone, features: FeatureCache, clock: Clock | None, **changes: Any) -> FederationResult:
    spec = {
        "name": "virtual",
        "method": {"name": "promptfl", "m": 2},
        "rounds": ROUNDS,
        "training": {"learning_rate": 0.02, "batch_size": 64},
        "evaluation": {"every": ROUNDS},
        "seed": 5,
        **changes,
    }
    return simulate(spec, SITES, backbone=backbone, features=features, options=SimulationOptions(clock=clock), pool=2)


def played(buffer: int, rounds: int) -> tuple[list[list[str]], list[float]]:
    """Who counts in each round, and when it is over, where everyone trains all the time, but once for each state."""
    queue = [(seconds, name) for name, seconds in SECONDS.items()]
    heapq.heapify(queue)
    counted: list[list[str]] = [[]]
    over: list[float] = []
    while len(over) < rounds:
        now, name = heapq.heappop(queue)
        counted[-1].append(name)
        if len(counted[-1]) == buffer:
            over.append(now)
            for idle in counted[-1]:
                heapq.heappush(queue, (now + SECONDS[idle], idle))
            counted.append([])
    return [sorted(names) for names in counted[:rounds]], over


def counted(result: FederationResult) -> list[list[str]]:
    return [sorted(one["client"] for one in report["phases"][0]["counted"]) for report in result.reports[1:]]


@pytest.mark.parametrize("buffer", [1, 2, 3])
def test_arrivals_are_those_of_a_queue_of_events(
    buffer: int, backbone: Backbone, features: FeatureCache, clock: Clock
) -> None:
    result = run(backbone, features, clock, schedule={"kind": "buffered", "buffer": buffer})
    expected, over = played(buffer, ROUNDS)
    assert counted(result) == expected
    assert result.virtual_seconds == pytest.approx(over)


def test_a_synchronous_round_takes_as_long_as_its_slowest_client(
    backbone: Backbone, features: FeatureCache, clock: Clock
) -> None:
    timed, plain = run(backbone, features, clock, rounds=3), run(backbone, features, None, rounds=3)
    assert timed.virtual_seconds == pytest.approx([19.0, 38.0, 57.0])
    assert timed.state_hash == plain.state_hash
    assert plain.virtual_seconds == ()


def test_steps_make_a_task_longer_and_two_exchanges_take_twice_as_long(
    backbone: Backbone, features: FeatureCache, clock: Clock
) -> None:
    """Each client has eight images or more: four epochs of two steps."""
    training = {"learning_rate": 0.02, "batch_size": 8, "epochs": 4}
    result = run(backbone, features, clock, rounds=2, training=training, method={"name": "plan"})
    images = {client.name: client.num_samples for client in result.clients}
    steps = {name: 4 * -(-images[name] // 8) for name in SECONDS}
    once = max(steps[name] * SECONDS[name] for name in SECONDS)
    assert result.virtual_seconds == pytest.approx([2 * once, 4 * once])


def test_the_same_seed_gives_the_same_bits(backbone: Backbone, features: FeatureCache) -> None:
    clock, schedule = Clock(speeds="lognormal"), {"kind": "buffered", "buffer": 2, "concurrency": 3}
    first, second = (run(backbone, features, clock, schedule=schedule) for _ in range(2))
    assert (first.state_hash, first.virtual_seconds) == (second.state_hash, second.virtual_seconds)
    assert counted(first) == counted(second)


def test_the_first_answers_of_an_over_selected_round_are_the_fastest_clients(
    backbone: Backbone, features: FeatureCache, clock: Clock
) -> None:
    part = {"fraction": 0.4, "over_select": 2.5, "min_clients": 2}
    results = [run(backbone, features, clock, rounds=3, participation=part) for _ in range(2)]
    assert results[0].state_hash == results[1].state_hash
    assert results[0].virtual_seconds == (2.5, 5.0, 7.5)  # all are asked, and two answers are enough
    for report in results[0].round_reports[1:]:
        assert sorted(update.client for update in report.phases[0].updates) == ["a", "b"]


def test_oort_goes_by_virtual_seconds(backbone: Backbone, features: FeatureCache, clock: Clock) -> None:
    """n·√(Σ loss²/n) + √(0.1·ln R/L), times (T/t)² for who takes t > T seconds. Of five clients none is clipped."""
    part = {"fraction": 0.6, "choice": "oort", "preferred_seconds": 3.0}
    result = run(backbone, features, clock, participation=part)
    images = {client.name: client.num_samples for client in result.clients}
    told: dict[str, float] = {}
    last: dict[str, int] = {}
    checked = set()
    for report in result.round_reports[1:]:
        [phase] = report.phases
        for name, reason in phase.choice.items():
            if not reason.startswith("utility "):
                continue
            utility = images[name] * math.sqrt(told[name] / images[name])
            utility += math.sqrt(0.1 * math.log(report.round) / last[name])
            utility *= (3.0 / SECONDS[name]) ** 2 if SECONDS[name] > 3.0 else 1.0
            assert reason == f"utility {utility:.4g}"
            checked.add(name)
        for update in phase.updates:
            told[update.client], last[update.client] = update.metrics["squared_losses"], report.round
    assert checked & {"c", "d", "e"}, "a slow one too"
    assert checked & {"a", "b"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("participation.over_select", {"participation": {"fraction": 0.4, "over_select": 2.0}}),
        ("participation.preferred_seconds", {"participation": {"choice": "oort", "preferred_seconds": 5.0}}),
        ("training.budget.seconds", {"training": {"budget": {"seconds": 5.0}}}),
        ("schedule", {"schedule": {"kind": "buffered", "buffer": 4}}),
    ],
)
def test_what_depends_on_this_machine_s_speed_is_refused(
    backbone: Backbone, features: FeatureCache, name: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(CommandError, match=f"{name}: .* depends on this machine in a simulation: give clients speeds"):
        run(backbone, features, None, **changes)
