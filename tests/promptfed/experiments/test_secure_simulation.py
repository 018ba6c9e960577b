"""A federation whose updates nobody sees: in one process, to the same state as in the clear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from promptfed.client_service.privacy.ledger import BudgetExhausted, Ledger
from promptfed.client_service.privacy.secure import SecureWork
from promptfed.client_service.training.trainer import TaskWork
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.sdk.client import CommandError
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import DataError
from promptfed.shared.methods.core.interface import MethodError, TrainResult
from promptfed.shared.methods.promptfl import PromptFL

DATA = "symbols:painting?topic=weather&per_class=4&test_per_class=2&partition=iid&clients=4&client={}"
SITES = [Site(f"site-{k}", DATA.format(k)) for k in range(4)]


def spec(method: str = "promptfl", **changes: Any) -> dict[str, Any]:
    return {
        "name": "summed", "method": {"name": method, "m": 4}, "rounds": 2,
        "training": {"learning_rate": 0.02, "batch_size": 4}, "participation": {"min_clients": 4}, "seed": 3,
    } | changes  # fmt: skip


@pytest.mark.parametrize("method", ["promptfl", "fedpgp"])
def test_the_state_is_that_of_the_mean_in_the_clear(method: str, backbone: Backbone, features: FeatureCache) -> None:
    def run(**changes: Any) -> Any:
        return simulate(spec(method, **changes), SITES, backbone=backbone, features=features)

    clear, summed = run(), run(secure_aggregation={"threshold": 0.7})
    assert summed.federation.state == "finished"
    for name, tensor in clear.state.items():
        assert (summed.state[name] - tensor).abs().max() < 1e-6, name
    assert run(secure_aggregation={"threshold": 0.7}).state_hash == summed.state_hash, "masks cancel"


PRIVACY = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0, "delta": 1e-3}


def test_with_noise_for_records_the_state_is_that_of_the_same_noise_in_the_clear(
    backbone: Backbone, features: FeatureCache
) -> None:
    def run(**changes: Any) -> Any:
        return simulate(spec(rounds=1, privacy=PRIVACY, **changes), SITES, backbone=backbone, features=features)

    clear, summed = run(), run(secure_aggregation={"threshold": 0.7})
    for name, tensor in clear.state.items():
        assert (summed.state[name] - tensor).abs().max() < 1e-6, name
    spent, told = clear.privacy(), summed.privacy()
    assert told == spent
    assert (told.clients, told.noise, told.rounds_counted) == (4, "seeded", 1)
    assert summed.sums().smallest_sum == 4
    assert all(phase.updates == [] for report in summed.round_reports for phase in report.phases)


@pytest.mark.slow
def test_a_change_that_its_data_set_can_no_longer_afford_does_not_leave(
    backbone: Backbone, features: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted before its masked vector is sent; the others' sum is opened, and the next round is as usual."""
    spend, refused = Ledger.spend, []

    def spend_but_once(ledger: Ledger, *about: Any) -> bool:
        if not refused:
            refused.append(ledger)
            raise BudgetExhausted("another federation was faster")
        return spend(ledger, *about)

    monkeypatch.setattr(Ledger, "spend", spend_but_once)
    wanted = spec(privacy=PRIVACY, secure_aggregation={"threshold": 0.7})
    result = simulate(wanted, SITES, backbone=backbone, features=features)
    first, second = (report.phases[0] for report in result.round_reports[1:])
    assert [one.type for one in first.failed] == ["privacy-budget-exhausted"]
    assert [one.answered for one in first.secure.steps[:3]] == [4, 4, 3]
    assert (first.secure.sum_clients, second.secure.sum_clients) == (3, 4)
    assert len(refused[0].spends()) == 1


@pytest.mark.parametrize(("told", "withheld"), [(None, True), ("withheld", True), ("plain", False)])
def test_accuracies_stay_with_the_sites_unless_the_spec_says_otherwise(
    told: str | None, withheld: bool, backbone: Backbone, features: FeatureCache
) -> None:
    referee = Site("referee", DATA.format(0).replace("painting", "neon"), role="evaluator")
    wanted = spec(rounds=1, secure_aggregation={}, privacy={"evaluation": told} if told else {})
    result = simulate(wanted, [*SITES, referee], backbone=backbone, features=features)
    clients = result.reports[1]["evaluation"]["clients"]
    assert {name: one["withheld"] for name, one in clients.items()} == {
        **dict.fromkeys((site.name for site in SITES), withheld),
        "referee": False,
    }, "an evaluator's own test set is its owner's"
    assert all((one["splits"] == {}) is one["withheld"] for one in clients.values())
    assert all(one["metrics"] == {} and one["zero_shot"] == {} for one in clients.values() if one["withheld"])
    assert result.reports[1]["phases"][0]["metrics"] == {}


PROTECTED = {"level": "sample", "clip": 0.3, "noise_multiplier": 4.0}


def under_noise(
    monkeypatch: pytest.MonkeyPatch, own: Callable[[Any, dict[str, Tensor]], dict[str, Tensor]], *given: Any
) -> Any:
    """One round of protected training, where ``own`` of context and payload is what site-0 trains."""
    train = PromptFL.train

    def patched(self: PromptFL, context: Any, payload: Any, private: Any) -> TrainResult:
        if context.client == "site-0":
            own(context, payload)
        return train(self, context, payload, private)

    monkeypatch.setattr(PromptFL, "train", patched)
    wanted = spec(rounds=1, privacy=PROTECTED, participation={"min_clients": 4, "quorum": 0.75}, secure_aggregation={})
    return simulate(wanted, SITES, backbone=given[0], features=given[1])


def _raise(error: Exception) -> Any:
    raise error


UNREADABLE = DataError("image 17 cannot be read")
DIVERGED = MethodError("the tensor 'context' does not converge")
WRONG = ValueError("record 17 has label 3")


@pytest.mark.parametrize(
    ("when", "error"),
    [
        ("images", UNREADABLE),
        ("preparing", DIVERGED),
        ("training", DIVERGED),
        ("training", WRONG),
        ("keeping", MemoryError("too many images of class 3")),
    ],
)
def test_under_protection_the_coordinator_is_not_told_why_training_failed(
    when: str, error: Exception, backbone: Backbone, features: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing: list[int] = []

    def fail_once(self: Any, *given: Any) -> Any:
        evaluates = {"images": lambda: given[2].split()[1] == "0", "preparing": lambda: given[1].round == 0}
        if not failing and not evaluates.get(when, bool)():  # round 0 is only evaluated
            failing.append(1)
            raise error
        return original(self, *given)

    where = {
        "images": (TaskWork, "_train_split"),
        "preparing": (TaskWork, "_prepared"),
        "keeping": (SecureWork, "keep"),
    }.get(when)
    if where is not None:
        original = getattr(*where)
        monkeypatch.setattr(*where, fail_once)

    def own(context: Any, payload: dict[str, Tensor]) -> dict[str, Tensor]:
        return _raise(error) if when == "training" else dict(payload)

    phase = under_noise(monkeypatch, own, backbone, features).round_reports[1].phases[0]
    assert [(one.type, one.detail) for one in phase.failed] == [
        ("training-failed", "protected training failed; this client's own log says why")
    ]


@pytest.mark.parametrize("error", [DIVERGED, WRONG])
def test_under_protection_the_coordinator_is_not_told_why_evaluation_failed(
    error: Exception, backbone: Backbone, features: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TaskWork, "_serve", lambda *given: _raise(error))
    said = "evaluation-failed: protected evaluation failed; this client's own log says why$"
    with pytest.raises(CommandError, match=said):
        under_noise(monkeypatch, lambda context, payload: dict(payload), backbone, features)
