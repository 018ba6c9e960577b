"""The disclosure floor against an attacker: by subtraction, from fractions, between rounds."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from promptfed.client_service.exits import Exit
from promptfed.client_service.privacy.noisy_counts import AnsweredStates, coded_accuracy, lowest, what_leaves
from promptfed.client_service.privacy.policy import FLOOR
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.messages import EnrolmentInfo
from promptfed.shared.methods import make_method
from promptfed.shared.spec.spec import BackboneSpec, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.client_service.conftest import Make
from tests.support.fake_coordinator import FakeCoordinator


def test_accuracies_tell_nothing_in_any_number_of_rounds() -> None:
    """An attacker who knows the exact number of test images cannot narrow few right or wrong answers, in any round."""
    for count in range(251):
        right_by_answer: dict[object, set[int]] = defaultdict(set)
        for right in range(count + 1):
            right_by_answer[coded_accuracy(right, count, FLOOR)].add(right)
        for rights in right_by_answer.values():
            for few in ({right for right in rights if right < FLOOR}, {count - r for r in rights if count - r < FLOOR}):
                assert few in (set(), set(range(min(FLOOR, count + 1))))


def test_three_of_seven_is_not_told() -> None:
    assert coded_accuracy(3, 7, FLOOR) is None
    assert coded_accuracy(9, 19, FLOOR) is None
    assert coded_accuracy(200, 300, FLOOR, patients=19) is None
    assert coded_accuracy(3, 7, 1) is not None
    assert (lowest(7, FLOOR), lowest(37, FLOOR), lowest(7, 1)) == (0, 30, 7)


class Attacker(FakeCoordinator):
    """Sends a state of its own choice at each round: ``chosen`` by round."""

    chosen: Mapping[int, Tensors]

    def current_task(self) -> dict[str, Any]:
        self.global_state = self.chosen[self.plan[0][1]]
        return super().current_task()


def test_a_site_answers_few_states_and_every_field_follows_from_ranges(
    tmp_path: Path, backbone: Backbone, make: Make, settings: Settings
) -> None:
    """The attacker has all fields of all answers; what it sends again is answered again, also after a restart."""
    draws = torch.Generator().manual_seed(3)
    first = Attacker(shape_of(backbone), rounds=9).global_state
    spread = {name: tensor.std() for name, tensor in first.items()}
    chosen = {
        round: {
            name: torch.randn(tensor.shape, generator=draws) * spread[name] * 3.0 ** (round - 2)
            for name, tensor in first.items()
        }
        for round in range(7)
    }
    chosen |= {7: chosen[1], 8: {name: -tensor for name, tensor in chosen[1].items()}}
    (tmp_path / "policy.yaml").write_text("version: 1\nmetrics: {floor: 10, states: 5}\n")
    answers: dict[str, list[dict[str, Any]]] = {}
    for kind, policy in (("open", None), ("floor", tmp_path / "policy.yaml")):
        own = settings.model_copy(update={"policy": policy, "state_dir": tmp_path / kind})
        coordinator = Attacker(shape_of(backbone), rounds=9)
        coordinator.chosen = chosen
        for rounds in (range(7), range(7, 9)):
            coordinator.plan = [("evaluate", round) for round in rounds]
            assert asyncio.run(make.worker(coordinator, settings=own).run()) is Exit.OK
        answers[kind] = coordinator.evaluations
    assert len({answer["splits"]["test"]["accuracy"] for answer in answers["open"]}) > 1
    for round, (told, exact) in enumerate(zip(answers["floor"], answers["open"], strict=True)):
        if round in (5, 6, 8):
            assert told == {"splits": {}, "zero_shot": {}, "metrics": {}, "withheld": True}
            continue
        expected = {
            kind: {
                name: {
                    "accuracy": coded_accuracy(round_half(each), each["num_samples"], 10),
                    "num_samples": lowest(each["num_samples"], 10),
                }
                for name, each in exact[kind].items()
            }
            for kind in ("splits", "zero_shot")
        }
        assert expected["splits"]["test"]["num_samples"] == 20
        assert told == {**expected, "metrics": {}}
    assert answers["floor"][7] == answers["floor"][1]


def round_half(result: Mapping[str, Any]) -> int:
    """The number of right answers."""
    return round(result["accuracy"] * result["num_samples"])


def test_two_names_of_one_test_set_share_its_states(tmp_path: Path) -> None:
    answered = AnsweredStates(PrivateState(tmp_path / "state"), 2)
    images = {"test": "a", "again": "a", "other": "b"}
    assert answered.admitted({"test": "a"}, "1") == {"test"}
    assert answered.admitted(images, "2") == set(images)
    assert answered.admitted(images, "3") == {"other"}
    assert answered.admitted(images, "1") == {"test", "again"}
    assert answered.admitted(images, "4") == set()


def test_of_several_labels_no_figure_leaves_under_a_floor() -> None:
    """A mean average precision under constant scores is the share of positives, to the unit."""
    method = make_method({"name": "promptfl", "task": "multi_label"})
    info = EnrolmentInfo(
        federation_id="f", name="pets", template=None, state="running", class_names=None,
        method={"name": "promptfl", "task": "multi_label"}, backbone=BackboneSpec(), rounds=3, training=TrainingSpec(),
        seed=0, evaluate_every=1,
    )  # fmt: skip
    assert [what_leaves(info, method, "trainer", None, floor=floor) for floor in (1, 2)] == ["plain", "withheld"]
