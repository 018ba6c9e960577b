"""The interface of a method: its defaults, and its optional hooks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from promptfed.shared.methods import make_method
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.interface import check_admission
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.torch_tensors import TorchDraws

BIAS = TensorSpec("bias", ("C",))
SECRET = TensorSpec("secret", ("C",), shared_with_clients=False)
CONTEXT = pf.ServerContext(TrainingSpec(), BackboneShape(d_e=4), ("a", "b"), (), seed=0, rounds=1)


class Biased(pf.Method):
    """As little as a method can say."""

    name = "biased"
    summary = paper = "none"
    Hyper = pf.Hyperparameters

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        return (BIAS, SECRET)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        return {"C": len(context.class_names or ())}

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        raise NotImplementedError

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        raise NotImplementedError


def test_by_default_shared_tensors_go_down_and_up_and_their_combination_is_the_state() -> None:
    method = Biased(Biased.Hyper())
    [phase] = method.phases(1, 1)
    assert (phase.down, phase.up, phase.mean) == ((BIAS,), (BIAS,), True)
    state = method.initial_state(CONTEXT, TorchDraws())
    assert {name: tensor.tolist() for name, tensor in state.items()} == {"bias": [0, 0], "secret": [0, 0]}
    combined: dict[str, Tensor] = {"bias": torch.ones(2)}
    after = method.aggregate(state, phase, iter(()), lambda updates: combined, CONTEXT)
    assert after["bias"] is combined["bias"]
    assert after["secret"] is state["secret"]


def test_a_method_that_shares_nothing_has_a_phase_in_which_nothing_travels() -> None:
    method = make_method({"name": "coop"})
    [phase] = method.phases(1, 1)
    assert (phase.down, phase.up, phase.mean) == ((), (), False)
    state: dict[str, Tensor] = {}
    assert method.aggregate(state, phase, iter(()), lambda updates: {"bias": torch.ones(2)}, CONTEXT) is state


def test_a_result_holds_no_graph() -> None:
    leaf = torch.ones(2, requires_grad=True)
    result = pf.TrainResult({"bias": leaf * 2}, {"own": leaf})
    assert not result.update["bias"].requires_grad
    assert not result.private["own"].requires_grad
    assert result.update["bias"].tolist() == [2, 2]


def test_only_methods_that_look_at_other_clients_are_shown_them() -> None:
    def nobody() -> pf.ServerContext:
        raise AssertionError("asked for the other clients")

    newcomer, referee = (pf.ClientInfo("x", role, 1, ("a", "b")) for role in ("trainer", "evaluator"))
    check_admission(make_method({"name": "promptfl"}), referee, None, nobody)
    check_admission(make_method({"name": "fedvpt", "head": "linear"}), newcomer, None, nobody)
    with pytest.raises(pf.MethodError, match="an evaluator has none"):
        check_admission(make_method({"name": "fedvpt", "head": "linear"}), referee, None, nobody)
    with pytest.raises(AssertionError, match="asked for"):
        check_admission(make_method({"name": "fast_pt"}), newcomer, None, nobody)
