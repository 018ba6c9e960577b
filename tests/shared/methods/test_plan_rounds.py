"""PLAN's rounds: what each phase may change, who takes part, what travels; the ablations and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import MethodError
from promptfed.shared.methods.plan import Aggregator
from promptfed.shared.tensors.torch_tensors import TorchDraws
from tests.support.equality import assert_values
from tests.support.small_plan import check_state, phase_of, plan, run_phase, slow_reference, start
from tests.support.visual_clients import NAMES, client_context, server_context, small_backbone


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


# Rounds


def test_each_phase_changes_its_own_bytes_only(backbone: Backbone) -> None:
    method, names = plan(), ["a", "c"]
    before = start(method, backbone)
    kept = {name: tensor.clone() for name, tensor in before.items()}
    aggregators = [spec.name for spec in phase_of(method, "aggregators").up]

    between, first = run_phase(method, backbone, before, "prompts", names)
    for client in first.values():
        assert set(client.update) == {"text_prompts", "visual_prompts"}
    for row, client in enumerate(names):
        for kind in ("text", "visual"):
            assert between[f"client_{kind}_prompts"][row].equal(first[client].update[f"{kind}_prompts"])
            assert not first[client].update[f"{kind}_prompts"].equal(before[f"{kind}_prompts"])
    assert between["prompt_owners"].tolist() == [0, 2]
    for name in (*aggregators, "text_prompts", "visual_prompts"):
        assert between[name].equal(before[name]), name
    check_state(between, method, backbone)

    shown = {name: tensor.clone() for name, tensor in between.items()}
    after, second = run_phase(method, backbone, between, "aggregators", names)
    for client in second.values():
        assert set(client.update) == set(aggregators)
        moved = {name for name in aggregators if not client.update[name].equal(between[name])}
        assert moved >= {name for name in aggregators if not name.endswith("fq.b2")}
    for name, tensor in shown.items():
        assert between[name].equal(tensor), f"the second phase changed {name} in place"
    for name, tensor in kept.items():
        assert before[name].equal(tensor), f"training changed {name} in place"
    assert not after["text_prompts"].equal(before["text_prompts"])
    check_state(after, method, backbone)


def test_the_number_of_clients_may_change_from_round_to_round(backbone: Backbone) -> None:
    method = plan()
    state = start(method, backbone, scale=None)
    for round, (asked, answered) in enumerate([("abcd", "acd"), ("b", "b"), ("bd", "d")], start=1):
        between, _ = run_phase(method, backbone, state, "prompts", list(asked), round=round)
        assert between["client_text_prompts"].shape[0] == len(asked)
        server = server_context(backbone, *"abcd")
        after, _ = run_phase(method, backbone, between, "aggregators", list(answered), round=round)
        measured = method.measure(between, phase_of(method, "aggregators"), after, server)
        assert list(measured.clients) == list(asked)
        total = sum(measured.clients[name]["gamma_visual_2"] for name in asked)
        assert total == pytest.approx(1, abs=1e-5)
        check_state(after, method, backbone)
        state = after


def test_what_an_evaluation_downloads_is_the_global_prompts(backbone: Backbone) -> None:
    method = plan()
    state, server = start(method, backbone), server_context(backbone, "a")
    payload = method.payload(state, None, server.clients[0], server)
    assert set(payload) == {"text_prompts", "visual_prompts"}
    context = client_context(backbone, 5)
    found = method.classifier(context, payload, {}).logits(context.train, torch.tensor([3, 0]))
    wanted = slow_reference(replace(context, round=2), payload)[[3, 0]]
    assert_values(found, wanted)
    other = replace(context, class_names=("teapot", "sun"), label_space=NAMES)
    assert_values(method.classifier(other, payload, {}).logits(context.train, torch.arange(2))[:, 1], found.new_tensor(
        slow_reference(replace(context, round=2), payload)[:2, 0].tolist()))  # fmt: skip


# The readings of Algorithm 1


def two_rounds(backbone: Backbone, **changes: Any) -> tuple[list[dict[str, Tensor]], list[dict[str, Any]]]:
    """The states after each phase of two rounds, and what clients a and b answered in each; private state is kept."""
    method, state = plan(**changes), start(plan(**changes), backbone, scale=None)
    states, answers = [state], []
    private: dict[str, dict[str, Tensor]] = {"a": {}, "b": {}}
    for round in (1, 2):
        for phase in ("prompts", "aggregators"):
            state, results = run_phase(method, backbone, state, phase, ["a", "b"], round=round, private=private)
            private = {name: result.private for name, result in results.items()}
            states.append(state)
            answers.append(results)
    return states, answers


def test_aggregators_persist_or_start_anew_in_every_round(backbone: Backbone) -> None:
    aggregators = [spec.name for spec in phase_of(plan(), "aggregators").up]
    persisting, _ = two_rounds(backbone)
    for name in aggregators:
        assert persisting[3][name].equal(persisting[2][name]), name
    anew, _ = two_rounds(backbone, aggregators="reset")
    assert any(not anew[2][name].equal(anew[1][name]) for name in aggregators)
    for name in aggregators:  # each round's second phase begins from the same draws
        assert anew[3][name].equal(anew[1][name]), name
    mean = anew[3]["client_text_prompts"].mean(0)
    start_of_round = Aggregator("text", anew[3], residual=True)
    uneven = start_of_round.shares(anew[3]["client_text_prompts"]) - 0.5
    assert float(uneven.abs().max()) < 0.2
    assert_values(start_of_round._perceptron("fa", anew[3]["client_text_prompts"]).mean(0), mean)


def test_local_prompts_restart_or_persist(backbone: Backbone) -> None:
    method = plan(local_prompts="persist")
    states, answers = two_rounds(backbone, local_prompts="persist")
    for name in ("text_prompts", "visual_prompts"):
        assert answers[1]["a"].private[name].equal(answers[0]["a"].update[name])  # through the second phase
    context = client_context(backbone, client="a", round=2, phase="prompts")
    given = {name: states[2][name] for name in ("text_prompts", "visual_prompts")}
    own = answers[0]["a"].update
    again = method.train(context, given, own).update
    assert again["text_prompts"].equal(answers[2]["a"].update["text_prompts"])
    # One step from its own prompts under the global reference: what a restart from them without KL would be, and more.
    no_reference = plan(alpha=0.0).train(context, dict(own), {}).update
    persisting = plan(alpha=0.0, local_prompts="persist").train(context, given, own).update
    assert persisting["text_prompts"].equal(no_reference["text_prompts"])
    restarted = plan(alpha=0.0).train(context, given, own)
    assert not restarted.update["text_prompts"].equal(persisting["text_prompts"])
    assert restarted.private == {}


# Ablations of Table VI, options, refusals


def test_without_an_aggregator_the_mean_takes_its_place(backbone: Backbone) -> None:
    names = ["a", "b"]
    method = plan(text_aggregation="mean")
    assert not any(name.startswith(("text_aggregator", "client_text")) for name in start(method, backbone))
    state = start(method, backbone)
    between, first = run_phase(method, backbone, state, "prompts", names)
    mean = (first["a"].update["text_prompts"] + first["b"].update["text_prompts"]) / 2
    assert_values(between["text_prompts"], mean)
    assert between["visual_prompts"].equal(state["visual_prompts"])
    down = {spec.name for spec in phase_of(method, "aggregators").down}
    assert {"text_prompts", "client_visual_prompts"} < down
    assert "client_text_prompts" not in down
    after, second = run_phase(method, backbone, between, "aggregators", names)
    assert after["text_prompts"].equal(between["text_prompts"])
    assert all(name.startswith("visual_aggregator") for name in second["a"].update)
    check_state(after, method, backbone)

    plain = plan(text_aggregation="mean", visual_aggregation="mean")
    assert [phase.name for phase in plain.phases(1, 4)] == ["prompts"]
    after, first = run_phase(plain, backbone, start(plain, backbone), "prompts", names)
    assert set(after) == {"text_prompts", "visual_prompts"}
    for name, tensor in after.items():
        assert_values(tensor, (first["a"].update[name] + first["b"].update[name]) / 2)


def test_ablated_references(backbone: Backbone) -> None:
    def trained(round: int, **changes: Any) -> Tensor:
        context = client_context(backbone, round=round, phase="prompts", epochs=2, learning_rate=0.1)
        method = plan(**changes)
        return method.train(context, start(plan(), backbone), {}).update["visual_prompts"]

    assert trained(1, zero_shot_reference=False).equal(trained(1, alpha=0.0))
    assert trained(2, zero_shot_reference=False).equal(trained(2))
    assert not trained(1).equal(trained(1, alpha=0.0))
    assert not trained(2).equal(trained(2, alpha=0.0))


def test_training_keeps_no_gradient_of_a_weight(backbone: Backbone) -> None:
    method = plan()
    for phase in ("prompts", "aggregators"):
        run_phase(
            method, backbone, run_phase(method, backbone, start(method, backbone), "prompts", ["a"])[0], phase, ["a"]
        )
    assert all(weight.grad is None and not weight.requires_grad for weight in backbone.model.parameters())


def test_the_paper_s_numbers_for_vit_b_16() -> None:
    """Numbers per client and round, both ways: two exchanges with K = 3 (our count of the paper's: 11.15 million)."""
    from promptfed.shared.spec.spec import BackboneShape

    shape = BackboneShape(d_t=512, d_v=768, d_e=512, text_layers=12, vision_layers=12, context_length=77)
    method = make_method({"name": "plan"})
    server = replace(server_context_of(shape), clients=())
    dims = method.dims(server) | {"K": 3}

    def count(specs: tuple[Any, ...]) -> int:
        return sum(torch.Size(spec.resolve(dims)).numel() for spec in specs)

    first, second = method.phases(1, 20)
    assert (count(first.down), count(first.up)) == (122_880, 122_880)
    assert (count(second.down), count(second.up)) == (3 * 122_880 + 5_269_248, 5_269_248)
    assert sum(count(phase.down) + count(phase.up) for phase in (first, second)) == 11_152_896


def test_which_phases_are_means() -> None:
    """A robust rule may stand for a mean; prompts that an aggregator is to look at are kept, each for itself."""
    kinds = {(): [False, True], ("text",): [False, True], ("text", "visual"): [True]}
    for means, wanted in kinds.items():
        method = plan(**{f"{kind}_aggregation": "mean" for kind in means})
        assert [phase.mean for phase in method.phases(1, 4)] == wanted


def server_context_of(shape: Any) -> Any:
    """A roster of nobody before a backbone of this shape."""
    from promptfed.shared.methods.core.interface import ServerContext
    from promptfed.shared.spec.spec import TrainingSpec

    return ServerContext(TrainingSpec(), shape, None, (), seed=0, rounds=20)


@pytest.mark.parametrize(
    ("changes", "shape", "told"),
    [
        ({"depth": 3}, {}, "the text tower has 2 blocks"),
        ({"depth": 4}, {"text_layers": 12}, "the image tower has 3 blocks"),
        ({}, {"d_v": None, "vision_layers": None}, "needs a vision transformer"),
        ({}, {"d_t": None, "text_layers": None}, "needs a text tower"),
        ({"m": 14}, {}, "leaves no room for a class name"),
    ],
)
def test_backbones_that_it_cannot_run(
    backbone: Backbone, changes: dict[str, Any], shape: dict[str, Any], told: str
) -> None:
    server = server_context(backbone, "a")
    other = replace(server, shape=server.shape.model_copy(update=shape))
    with pytest.raises(MethodError, match=told):
        plan(**changes).initial_state(other, TorchDraws())


def test_a_client_without_images_is_told(backbone: Backbone) -> None:
    method = plan()
    with pytest.raises(MethodError, match="no training images"):
        method.train(client_context(backbone, 0, phase="prompts"), start(method, backbone), {})
