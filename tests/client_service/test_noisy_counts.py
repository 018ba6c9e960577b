"""Noisy counts: their exact distribution, one spend a release, and what is withheld all the same."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from promptfed.client_service.exits import Exit
from promptfed.client_service.privacy import noisy_counts
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.privacy.noisy_counts import DRAWN_FILE, noisy_count, what_leaves
from promptfed.client_service.privacy.policy import Policy
from promptfed.client_service.settings import Settings
from promptfed.shared.data.source import Source
from promptfed.shared.messages import EnrolmentInfo, SplitResult
from promptfed.shared.methods import make_method
from promptfed.shared.privacy.accounting import Event, epsilon_of
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.privacy.settings import PrivacySpec
from promptfed.shared.spec.spec import TrainingSpec
from tests.client_service.conftest import Make
from tests.support.fake_coordinator import FakeCoordinator

TRAINING = TrainingSpec(learning_rate=0.1, batch_size=6).model_dump()
NOISY = PrivacySpec(
    level="sample", clip=0.3, noise_multiplier=2.0, delta=1e-3, evaluation="noisy", evaluation_epsilon=0.5
)


@pytest.fixture
def own(settings: Settings, tmp_path: Path) -> Settings:
    return settings.model_copy(update={"ledger": tmp_path / "ledger.jsonl", "max_epsilon": 50.0})


@pytest.fixture
def apart(source: Source) -> Source:
    """The source without the test images that are trained on as well."""
    trained = {source.train.digest(row) for row in range(len(source.train))}
    rows = [row for row in range(len(source.test)) if source.test.digest(row) not in trained]
    return replace(source, test=source.test.select(source.test.labels.new_tensor(rows)))


def noisy(make: Make, **changes: Any) -> FakeCoordinator:
    return make.coordinator(**({"privacy": NOISY.model_dump(), "training": TRAINING, "rounds": 2} | changes))


def test_a_count_has_just_the_distribution_that_it_is_paid_for() -> None:
    """P(k + η) ∝ e^(−a·|η|), with all beyond 0 and N gathered at these."""
    right, images, a, draws = 6, 9, 0.7, 6000
    stream, result = SeededNoise(3).stream("counts"), SplitResult(accuracy=right / images, num_samples=images)
    found = Counter(round(noisy_count(stream, result, a).accuracy * images) for _ in range(draws))
    weight = (1 - exp(-a)) / (1 + exp(-a))
    chance = {count: weight * exp(-a * abs(count - right)) for count in range(1, images)}
    chance[0] = sum(weight * exp(-a * abs(count - right)) for count in range(-200, 1))
    chance[images] = sum(weight * exp(-a * abs(count - right)) for count in range(images, 200))
    assert sum(chance.values()) == pytest.approx(1)
    keys = sorted(chance)
    tried = stats.chisquare([found[key] for key in keys], [draws * chance[key] for key in keys])
    assert tried.pvalue > 1e-6
    told = noisy_count(stream, result.model_copy(update={"ece": 0.1, "macro_f1": 0.2}), a)
    assert (told.num_samples, told.ece, told.macro_f1) == (images, None, None), "no other figure leaves"


def test_each_release_is_paid_once_and_the_template_s_is_drawn_once(make: Make, own: Settings, apart: Source) -> None:
    coordinator = noisy(make)
    assert asyncio.run(make.worker(coordinator, settings=own, source=apart).run()) is Exit.OK
    first, second = coordinator.evaluations
    ledger = Ledger(own.ledger_file)
    spends = [one for one in ledger.spends() if one.split == "test"]
    assert [one.events for one in spends] == [(Event("laplace", 1.0, 0.5, 2),), (Event("laplace", 1.0, 0.5, 1),)]
    assert ledger.epsilon("test") == pytest.approx(epsilon_of([Event("laplace", 1.0, 0.5, 3)], 1e-3))
    assert first["zero_shot"] == second["zero_shot"], "sent again unchanged"
    for told in (first, second):
        assert told["metrics"] == {}
        assert told["splits"]["test"]["num_samples"] == len(apart.test)
        assert (told["splits"]["test"]["accuracy"] * len(apart.test)) % 1 == pytest.approx(0, abs=1e-9)
        assert told["privacy"]["noise"] == "secret"
    assert [one["privacy"]["epsilon"] for one in (first, second)] == [one.epsilon for one in spends]
    assert len([one for one in ledger.spends() if one.split == "train"]) == 2


@pytest.mark.parametrize("at", ["counts-written", "counts-spent"])
def test_a_client_that_dies_between_drawing_and_sending_sends_the_same_and_pays_once(
    at: str, make: Make, own: Settings, apart: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = noisy(make, rounds=1)

    class Died(BaseException):
        pass

    def die(name: str) -> None:
        if name == at:
            raise Died

    with monkeypatch.context() as patched, pytest.raises(Died):
        patched.setattr(noisy_counts, "point", die)
        asyncio.run(make.worker(coordinator, settings=own, source=apart).run())
    drawn = json.loads((own.state_dir / DRAWN_FILE).read_text())
    ledger = Ledger(own.ledger_file)
    assert len(ledger.spends()) == (at == "counts-spent")
    assert coordinator.evaluations == []
    assert asyncio.run(make.worker(coordinator, settings=own, source=apart).run()) is Exit.OK
    sent = coordinator.evaluations[0]
    assert sent["splits"] == drawn["body"]["splits"]
    assert [one.split for one in ledger.spends()] == ["test", "train", "test"]


def test_what_the_budget_has_no_room_for_is_withheld(make: Make, own: Settings, apart: Source, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"version: 1\nprivacy: {{max_epsilon: 50, max_test_epsilon: 1.1}}\nledger: {own.ledger_file}\n")
    coordinator = noisy(make)
    settings = own.model_copy(update={"policy": policy})
    assert asyncio.run(make.worker(coordinator, settings=settings, source=apart).run()) is Exit.OK
    first, second = coordinator.evaluations
    assert first["splits"] != {}
    assert (second["splits"], second["zero_shot"], second["withheld"]) == ({}, {}, True)
    assert [one.split for one in Ledger(own.ledger_file).spends()] == ["test", "train", "train"]


@pytest.mark.parametrize("why", ["trained and tested on", "fine-tuned", "the policy", "the floor"])
def test_what_no_noise_makes_right_is_withheld(
    why: str, make: Make, own: Settings, apart: Source, tmp_path: Path
) -> None:
    coordinator = noisy(make, rounds=1)
    if why == "fine-tuned":
        coordinator = noisy(make, rounds=1, method={"name": "promptfl_ft", "m": 4})
    if why == "trained and tested on":
        apart = replace(apart, test=apart.train)
    if why in ("the policy", "the floor"):
        metrics = "accuracy: withheld" if why == "the policy" else f"floor: {len(apart.test)}"
        policy = tmp_path / "policy.yaml"
        policy.write_text(f"version: 1\nmetrics: {{{metrics}}}\nledger: {own.ledger_file}\n")
        own = own.model_copy(update={"policy": policy})
    assert asyncio.run(make.worker(coordinator, settings=own, source=apart).run()) is Exit.OK
    assert coordinator.failures == []
    assert [(one["splits"], one["withheld"]) for one in coordinator.evaluations] == [({}, True)] * 2
    assert [one.split for one in Ledger(own.ledger_file).spends()] == ["train"]


def test_the_stricter_of_federation_and_owner_says_what_leaves() -> None:
    method, tuned = make_method({"name": "promptfl"}), make_method({"name": "promptfl_ft"})

    def leaves(asked: str | None, owner: str | None, **given: Any) -> str:
        privacy = None if asked is None else NOISY.model_copy(update={"evaluation": asked})
        if given.pop("level", "sample") == "client":
            privacy = PrivacySpec(level="client", clip=1.0, evaluation=asked)
        policy = None if owner is None else Policy.model_validate({"version": 1, "metrics": {"accuracy": owner}})
        info = EnrolmentInfo.model_construct(privacy=privacy)
        return what_leaves(info, given.pop("method", method), given.pop("role", "trainer"), policy, **given)

    asked = ("withheld", "noisy", "plain")
    assert [[leaves(one, owner) for one in asked] for owner in (None, *asked)] == [
        ["withheld", "noisy", "withheld"],  # in the clear only where both say so
        ["withheld"] * 3,
        ["withheld", "noisy", "noisy"],
        ["withheld", "noisy", "plain"],
    ]
    assert [leaves(None, owner) for owner in (None, *asked)] == ["plain", "withheld", "noisy", "plain"]
    assert [leaves(one, "plain", method=tuned) for one in asked] == ["withheld"] * 3
    assert [leaves(None, owner, method=tuned) for owner in (None, "noisy")] == ["plain", "withheld"]
    whole = [[leaves(one, owner, level="client") for one in ("plain", "withheld", None)] for owner in (None, "plain")]
    assert whole == [["withheld"] * 3, ["plain", "withheld", "withheld"]], "in the clear only where both say so"
    assert leaves("plain", None, handed_in=True) == "plain"
    several = make_method({"name": "promptfl", "task": "multi_label"})
    figures = [leaves(*one, method=several) for one in (("noisy", None), (None, "noisy"), ("plain", "plain"))]
    assert figures == ["withheld", "withheld", "plain"], "a mean average precision is no count"
    assert leaves(None, "noisy", method=several, role="evaluator") == "withheld"
    said = [[leaves(one, owner, role="evaluator") for one in asked] for owner in (None, "noisy", "plain")]
    assert said == [["withheld", "noisy", "withheld"], ["noisy"] * 3, ["plain"] * 3], "its own test set is its own"
