"""Further test sets, variants of a classifier, and the template of the client's own data."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.training import trainer
from promptfed.client_service.training.data import held_out
from promptfed.client_service.training.evaluation import answers
from promptfed.client_service.training.trainer import TaskWork
from promptfed.experiments.bench.trials import has_diverged
from promptfed.shared.clip import Backbone
from promptfed.shared.data import Source, open_source
from promptfed.shared.errors import Failed
from promptfed.shared.messages import SplitResult
from promptfed.shared.methods import METHODS
from promptfed.shared.methods.core.interface import Classifier, ClientContext, MethodError, Split
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.metrics.figures import calibration_error, macro_f1
from promptfed.shared.metrics.outcomes import Outcomes
from promptfed.shared.tensors import Tensors
from tests.client_service.conftest import Make
from tests.support.fake_coordinator import NAMES, made_up_source

OTHERS = ["moon", "pencil"]


class First:
    """Always says the first class."""

    def logits(self, split: Split, indices: Tensor) -> Tensor:
        return torch.tensor([[1.0, *[0.0] * 7]]).expand(len(indices), 8)


class WithVariant(PromptFL):
    name = "with_variant"

    def variants(self, context: ClientContext, payload: Tensors, private: Tensors) -> dict[str, Classifier]:
        return {"first": First()}


def zero_shot_of(backbone: Backbone, source: Source, template: str) -> float:
    text = backbone.encode_text([template.replace("{}", name) for name in source.class_names])
    right = 0
    for index in range(len(source.test)):
        image = backbone.preprocess(source.test.image(index)).unsqueeze(0)
        right += int((backbone.encode_images(image) @ text.T).argmax()) == int(source.test.labels[index])
    return right / len(source.test)


def run(make: Make, tests: dict[str, Source], **changes: Any) -> Any:
    coordinator = make.coordinator(rounds=1, **changes)
    assert asyncio.run(make.worker(coordinator, tests=tests).run()) is Exit.OK
    return coordinator.evaluations


def test_a_further_test_set_is_scored_over_its_own_class_names(make: Make, backbone: Backbone) -> None:
    novel = made_up_source(seed=5, names=OTHERS)
    other = made_up_source(seed=6)
    before, after = run(make, {"novel": novel, "other": other})
    assert set(before["splits"]) == set(after["splits"]) == {"test", "novel", "other"}
    for found in (before, after):
        expected = zero_shot_of(backbone, novel, "a photo of a {}.")
        assert 0 <= found["zero_shot"]["novel"].pop("ece") <= 1
        assert found["zero_shot"]["novel"] == {"accuracy": expected, "num_samples": len(novel.test)}
        assert found["zero_shot"]["other"]["accuracy"] == zero_shot_of(backbone, other, "a photo of a {}.")


def test_variants_are_measured_beside_classifier(make: Make, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "with_variant", WithVariant)
    extra = made_up_source(seed=6)
    found = run(make, {"other": extra}, method={"name": "with_variant", "m": 4})[-1]
    assert set(found["splits"]) == {"test", "test@first", "other", "other@first"}
    share = float((source.test.labels == 0).float().mean())
    assert found["splits"]["test@first"]["accuracy"] == pytest.approx(share)
    assert set(found["zero_shot"]) == {"test", "other"}


def test_figures_of_the_learned_classifier_go_with_its_accuracy(make: Make) -> None:
    told: list[Outcomes] = []
    found = run(replace(make, given=make.given | {"record": told.append}), {"other": made_up_source(seed=6)})[-1]
    assert set(found["zero_shot"]["test"]) == {"accuracy", "num_samples", "ece"}
    for split in ("test", "other"):
        answers = [one for one in told if one.split == split][-1]
        right = [a == b for a, b in zip(answers.labels, answers.predicted, strict=True)]
        assert found["splits"][split]["ece"] == pytest.approx(calibration_error(answers.confidence, right), abs=5.1e-5)
        assert found["splits"][split]["macro_f1"] == pytest.approx(
            macro_f1(answers.labels, answers.predicted), abs=5.1e-5
        )
        assert found["splits"][split]["auroc"] == pytest.approx(answers.auroc, abs=5.1e-5)
        for figure, classes in (("majority", answers.labels), ("one_answer", answers.predicted)):
            most = max(map(classes.count, classes)) / len(classes)
            assert found["splits"][split][figure] == pytest.approx(most, abs=5.1e-5)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_classifier_that_has_diverged_is_told_in_words(wrong: float) -> None:
    class Diverged:
        def logits(self, split: Split, indices: Tensor) -> Tensor:
            return torch.tensor([[1.0, wrong]]).expand(len(indices), 2)

    with pytest.raises(MethodError, match="not finite: lower") as raised:
        answers(Diverged(), made_up_source(names=["a", "b"]).test, lambda: False)
    assert has_diverged(Failed(f"client a could not evaluate round 1: {raised.value}"))


def test_without_template_in_spec_each_data_source_has_its_own(make: Make, backbone: Backbone, source: Source) -> None:
    extra = replace(made_up_source(seed=6), template="a blurred picture of the {} in the dark.")

    found = run(make, {"other": extra}, template=None)[-1]
    assert found["zero_shot"]["other"]["accuracy"] == zero_shot_of(backbone, extra, extra.template)
    assert found["zero_shot"]["test"]["accuracy"] == zero_shot_of(backbone, source, source.template)


def test_a_test_set_of_classes_that_the_client_lacks_needs_no_permission(make: Make) -> None:
    found = run(make, {"novel": made_up_source(names=OTHERS)}, class_names=list(NAMES))
    assert found[-1]["splits"]["novel"]["num_samples"] > 0


class Mixing(First):
    """Says which domains images look like; two of the three have one name."""

    domain_names = ("neon", "sketch", "neon")

    def shares(self, split: Split, indices: Tensor) -> Tensor:
        return torch.tensor([0.5, 0.3, 0.2]).expand(len(indices), 3)


class WithMixture(PromptFL):
    name = "with_mixture"

    def classifier(self, context: ClientContext, payload: Tensors, private: Tensors) -> Classifier:
        return Mixing()


def test_how_a_classifier_mixes_domains_is_told_as_a_mean(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "with_mixture", WithMixture)
    [*_, last] = run(make, {}, method={"name": "with_mixture"})
    shares = {name: value for name, value in last["metrics"].items() if name.startswith("domain_share:")}
    assert shares == {"domain_share:neon": pytest.approx(0.7), "domain_share:sketch": pytest.approx(0.3)}


# Training images that a selection of rounds holds out.


DATA = "symbols:neon?topic=weather&per_class=8&test_per_class=2&partition=iid&clients=2&client={}"


def test_held_out_images_are_training_images_that_are_not_trained_on() -> None:
    source = open_source(DATA.format(0))
    divided = held_out(source, 0.25, 7)

    def digests(split: Any) -> set[str]:
        return {split.digest(row) for row in range(len(split))}

    assert digests(divided.train) | digests(divided.test) == digests(source.train)
    assert not digests(divided.train) & digests(divided.test)
    assert not digests(divided.test) & digests(source.test)
    assert digests(held_out(source, 0.25, 7).test) == digests(divided.test) != digests(held_out(source, 0.25, 8).test)


@pytest.mark.parametrize(("share", "groups"), [(0.25, 2), (0.5, 4), (0.01, 1)])
def test_so_many_of_the_groups_are_held_out(share: float, groups: int) -> None:
    source = open_source(DATA.format(0))
    source.train.groups = tuple(f"patient {row % 8}" for row in range(len(source.train)))
    divided = held_out(replace(source, train=source.train), share, 7)
    assert len(set(divided.test.groups)) == groups
    assert not set(divided.test.groups) & set(divided.train.groups)


@pytest.mark.parametrize(
    ("leaving", "counts", "tensors", "trained", "withheld"),
    [
        ("withheld", None, {}, None, True),
        ("plain", None, {"v": 1}, None, False),
        ("noisy", "counts", {}, None, False),
        ("noisy", "counts", {"v": 1}, "sample", False),
        ("noisy", "counts", {"v": 1}, None, True),  # no noise covers what they depend on
    ],
)
def test_accuracies_of_unprotected_tensors_stay_here(
    leaving: str, counts: Any, tensors: Any, trained: str | None, withheld: bool
) -> None:
    kept = SimpleNamespace(committed=lambda: (tensors, SimpleNamespace(privacy=trained)))
    work = SimpleNamespace(privacy=SimpleNamespace(leaving=leaving, counts=counts), state=kept)
    assert TaskWork.withholds.fget(work) is withheld


def test_of_a_class_with_one_image_nothing_is_held_out() -> None:
    source = open_source(DATA.format(0))
    first = [int((source.train.labels == label).nonzero()[0]) for label in range(len(source.class_names))]
    rows = torch.tensor(sorted({*first, *(source.train.labels == 0).nonzero()[:, 0].tolist()}))
    few = held_out(type(source)(**{**vars(source), "train": source.train.select(rows)}), 0.25, 7)
    assert set(few.test.labels.tolist()) == {0}
    assert len(few.train) + len(few.test) == len(rows)


def test_groups_that_cannot_be_divided_end_the_client_before_anything_is_sent() -> None:
    source = open_source(DATA.format(0))
    source.train.groups = ("one patient",) * len(source.train)
    with pytest.raises(ClientError, match=r"no training images can be held out: .*one group"):
        held_out(source, 0.25, 7)


@pytest.mark.parametrize(("split", "selected", "role", "kept", "measured"), [
    (None, None, "trainer", [], {"test", "novel", "validation"}),
    ("validation", None, "trainer", [(2, "kept")], {"validation"}),
    ("validation", 1, "trainer", [(1, "selected")], {"test", "novel"}),
    ("validation", None, "evaluator", [], {"validation"}),
    ("validation", 1, "evaluator", [], {"test", "novel"}),
])  # fmt: skip
@pytest.mark.parametrize("floor", [1, 2])
def test_a_choice_of_rounds_is_by_its_split_and_the_rest_is_measured_once(
    split: str | None, selected: int | None, role: str, kept: list[Any], measured: set[str], floor: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seen, rounds, admitted = set[str](), list[Any](), list[Any]()
    monkeypatch.setattr(trainer, "keep_round", lambda state, round: rounds.append((round, "kept")))
    monkeypatch.setattr(trainer, "select_round", lambda state, round: rounds.append((round, "selected")))
    monkeypatch.setattr(trainer, "torch_settings", lambda context: nullcontext())

    def run(*given: Any) -> Any:
        seen.update(name for name in ("test", "novel", "validation") if given[-1](name))
        return {"test": SplitResult(accuracy=0.5, num_samples=8)}, {}

    def admit(serving: Any, tests: set[str], round: int | None) -> set[str]:
        admitted.append((serving.round, round))
        return tests

    privacy = SimpleNamespace(counts=None, floor=floor)
    data = SimpleNamespace(tests={"novel": None, "validation": None}, patients=lambda name: None)
    evaluation = SimpleNamespace(run=run, mixture=lambda classifier, context: {"shares": 1.0})
    work = SimpleNamespace(
        role=role, state=None, predictor=None, withholds=False, privacy=privacy, data=data, evaluation=evaluation,
        _serve=lambda serving, cancelled: (SimpleNamespace(context=None, classifier=None), ()), _admitted=admit,
    )  # fmt: skip
    config = SimpleNamespace(selection=None if split is None else SimpleNamespace(split=split), template=None)
    task = SimpleNamespace(round=2, phase="evaluate", selected=selected, config=config)
    told = TaskWork.evaluate(cast(Any, work), cast(Any, task), b"", lambda: False)
    assert (rounds, seen) == (kept, measured)
    assert admitted == ([] if floor == 1 else [(selected or 2, None if selected else 2)])
    assert set(told.metrics) == ({"shares", "evaluate_seconds"} if floor == 1 else set())
    assert set(told.splits) == {"test"}
    work.withholds = True
    assert TaskWork.evaluate(cast(Any, work), cast(Any, task), b"", lambda: False).withheld
    work.withholds, work._admitted = False, lambda *given: set()
    assert TaskWork.evaluate(cast(Any, work), cast(Any, task), b"", lambda: False).withheld is (floor > 1)
    if floor == 1:
        work.predictor, work.state = object(), SimpleNamespace(save_serving=rounds.append)
        privacy.counts = SimpleNamespace(kept=lambda task: "sent before")
        assert TaskWork.evaluate(cast(Any, work), cast(Any, task), b"", lambda: False) == "sent before"
        assert rounds[-1].round == (selected or 2)
        privacy.counts = SimpleNamespace(
            kept=lambda task: None, drawn=lambda task, splits, zero, keys: (set(splits), keys)
        )
        evaluation.zero_shot_keys = lambda context, template: "keys"
        assert TaskWork.evaluate(cast(Any, work), cast(Any, task), b"", lambda: False) == ({"test"}, "keys")
