"""What draws of noise are for: another round, phase or client draws anew, and nothing else changes them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from promptfed.client_service.exits import Failure
from promptfed.client_service.privacy import noisy_counts
from promptfed.client_service.privacy import protection as protection_module
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.privacy.noisy_counts import NoisyCounts, noisy_count, overlap
from promptfed.client_service.privacy.protection import PrivacyPlan, SiteProtection
from promptfed.shared.messages import SplitResult, Task
from promptfed.shared.privacy.accounting import Event
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.spec.sections import PrivacySpec
from promptfed.shared.spec.spec import TrainingSpec
from tests.support.fake_coordinator import made_up_source

CASES = [(1, "train", "a"), (2, "train", "a"), (1, "second", "a"), (1, "train", "b")]


def task_of(round: int, phase: str) -> Task:
    training = TrainingSpec(batch_size=8, epochs=1)
    return cast(Task, SimpleNamespace(task_id="t", round=round, phase=phase, config=SimpleNamespace(training=training)))


def protection(most: float = 8.0, groups: Any = None) -> SiteProtection:
    spec = PrivacySpec(level="sample", clip=0.3)
    plan = PrivacyPlan(24 if groups is None else len(groups), 2.0, 1e-3, 8, 0.25, 1.0, 1.0, most)
    own = SiteProtection(spec, plan, Ledger(None), SeededNoise(1), "http://x", "fed-1", groups)
    own.ledger.open(1e-3)
    return own


def trained(round: int, phase: str, client: str) -> Any:
    return tuple(protection().begin(task_of(round, phase), client, 24).stream.normals(4))


def evaluated(round: int, phase: str, client: str) -> Any:
    info = SimpleNamespace(privacy=PrivacySpec(evaluation_epsilon=0.01), federation_id="f", name="f")
    counts = NoisyCounts(cast(Any, info), Ledger(None), SeededNoise(1), cast(Any, Notes()), 8.0, client, "http://x")
    counts.ledger.open(1e-6)
    told = counts.drawn(task_of(round, phase), {"test": SplitResult(accuracy=0.5, num_samples=10**6)}, {}, {})
    return told.splits["test"].accuracy


class Notes:
    """A state folder in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def read_as(self, name: str, kind: object) -> Any:
        return self.kept.get(name)

    def write_as(self, name: str, value: object) -> None:
        self.kept[name] = value


@pytest.mark.parametrize("draws", [trained, evaluated])
def test_each_round_phase_and_client_draws_its_own_noise(draws: Any) -> None:
    assert len({draws(*case) for case in CASES}) == len(CASES)
    assert draws(*CASES[0]) == draws(*CASES[0]), "the same in a simulation that is run again"


def test_noise_goes_to_test_sets_in_order_of_name() -> None:
    info = SimpleNamespace(privacy=PrivacySpec(evaluation_epsilon=0.01), federation_id="f", name="f")
    result, told = SplitResult(accuracy=0.5, num_samples=10**6), []
    for names in (("a", "b", "c"), ("c", "b", "a")):
        counts = NoisyCounts(cast(Any, info), Ledger(None), SeededNoise(1), cast(Any, Notes()), 8.0, "x", "http://x")
        counts.ledger.open(1e-6)
        sets = dict.fromkeys(names, result)
        told.append(counts.drawn(task_of(1, "train"), sets, sets, {name: f"key of {name}" for name in names}))
        assert counts.drawn(task_of(2, "train"), {}, {}, {}).withheld
        new = counts.drawn(task_of(3, "train"), {}, {"d": result}, {"d": "another"})
        assert (new.withheld, set(new.splits), set(new.zero_shot)) == (False, set(), {"d"})
    assert told[0].splits == told[1].splits
    assert told[0].zero_shot == told[1].zero_shot
    assert len({repr(one) for one in told[0].splits.values()}) == 3


def test_counts_that_were_drawn_and_never_paid_are_drawn_and_paid_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    info = SimpleNamespace(privacy=PrivacySpec(evaluation_epsilon=0.5), federation_id="f", name="f")
    counts = NoisyCounts(cast(Any, info), Ledger(None), SeededNoise(1), cast(Any, Notes()), 8.0, "a", "http://x")
    counts.ledger.open(1e-6)
    right, points = SplitResult(accuracy=0.5, num_samples=100), list[tuple[str, int]]()

    def draw(number: int) -> int:
        """The number of counts that are paid for: of a test set, and of the template where it was not paid before."""
        task = task_of(number, "train")
        cast(Any, task).task_id = f"t{number}"
        told = counts.drawn(task, {"test": right}, {"test": right}, {"test": "key"})
        assert counts.kept(task) == told
        assert counts.kept(cast(Any, SimpleNamespace(task_id="another"))) is None
        return told.privacy.events[0].count

    def point(name: str) -> None:
        points.append((name, len(counts.ledger.spends())))
        if name == dies:
            raise KeyboardInterrupt

    monkeypatch.setattr(noisy_counts, "point", point)
    dies = "counts-written"
    with pytest.raises(KeyboardInterrupt):
        draw(1)
    dies = ""
    assert [draw(2), draw(3)] == [2, 1]
    assert points[:3] == [("counts-written", 0), ("counts-written", 0), ("counts-spent", 1)]
    assert [spend.round for spend in counts.ledger.spends()] == [2, 3]


def test_a_task_is_trained_with_the_clip_and_noise_that_were_agreed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    points = list[str]()
    monkeypatch.setattr(protection_module, "point", points.append)
    begun = protection().begin(task_of(1, "train"), "a", 24)
    assert (begun.clip, begun.noise_multiplier, begun.units, begun.batch_size, begun.epochs) == (0.3, 2.0, 24, 8, 1)
    assert begun.event == Event("gaussian", 8 / 24, 2.0, 3)
    assert points == ["task-affordable"]
    plan = protection().plan
    for told, place in ((replace(plan, replaced=None), 0), (replace(plan, replaced=2.5), 1)):
        assert "".join(text for _, text in told.lines()).count("ε = 2.5 for replace-one neighbours") == place
    groups = ((0, 1), (2,), (3, 4))
    of_groups = protection(groups=groups).begin(task_of(1, "train"), "a", 24)
    assert (of_groups.units, of_groups.rows, of_groups.event) == (3, groups, Event("gaussian", 1.0, 2.0, 1))
    for own, images, kind in ((protection(), 23, "data-changed"), (protection(0.01), 24, "privacy-budget-exhausted")):
        with pytest.raises(Failure) as refused:
            own.begin(task_of(1, "train"), "a", images)
        assert refused.value.kind == kind


@pytest.mark.parametrize(("noise", "right"), [(-7, 0), (-5, 0), (-4, 1), (0, 5), (2, 7), (5, 10), (9, 10)])
def test_a_count_with_noise_stays_within_the_images(noise: int, right: int) -> None:
    stream = SimpleNamespace(discrete_laplace=lambda a: noise)
    told = noisy_count(cast(Any, stream), SplitResult(accuracy=0.5, num_samples=10), 1.0)
    assert told == SplitResult(accuracy=right / 10, num_samples=10)


def test_an_image_that_is_trained_and_tested_on_is_found_in_every_test_set() -> None:
    source, other = made_up_source(0), made_up_source(1)
    assert not overlap(source, {"other": other})
    assert overlap(source, {"other": replace(other, test=source.train.select([3]))})
    assert overlap(replace(source, test=source.train.select([0, 1])), {})


@pytest.mark.parametrize(("epsilon", "least", "remarked"), [(0.1, 9, True), (0.1, 8, False), (0.2, 9, False)])
def test_counts_begin_where_no_image_is_both_trained_and_tested_on_and_few_images_are_remarked(
    epsilon: float, least: int, remarked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = made_up_source(0)
    source = replace(source, test=source.test.select(list(range(8))))
    monkeypatch.setattr(noisy_counts, "LEAST_IMAGES", least)
    info = SimpleNamespace(privacy=PrivacySpec(evaluation_epsilon=epsilon))
    counts = NoisyCounts(cast(Any, info), Ledger(None), SeededNoise(1), cast(Any, Notes()), 8.0, "a", "http://x")
    assert counts.begun(replace(source, test=source.train.select([0])), {}, 1e-6) is None
    assert counts.ledger.delta() is None
    assert counts.begun(source, {}, 1e-6) is counts
    assert counts.ledger.delta() == 1e-6
    assert ("says little" in caplog.text) is remarked
