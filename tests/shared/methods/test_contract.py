"""What holds of many methods alike: defaults, options that cannot be, what travels, and that a federation runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.shared.data import open_source
from promptfed.shared.methods import METHODS, make_method, resolve_spec
from promptfed.shared.methods.core.interface import ClientUpdate, ServerContext
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneShape, SpecError, TrainingSpec
from tests.support.equality import assert_values
from tests.support.textless import MODEL, textless_backbone

CLASSES = {"class_names": ["a", "b"]}
FEDPGP = {"label_space": "federation", "context_init": None, "tau_con": 0.5, "pairs": "both", "full_rank": False}
PLAN = {"alpha": 1.0, "zero_shot_reference": True, "text_aggregation": "attention", "visual_aggregation": "attention"}
FEDOTP = {"gamma": 0.8, "epsilon": 0.1, "iterations": 100, "threshold": 1e-3, "transport": "unbalanced"}
PFEDPROMPT = {"memory": "labels", "beta": 5.5, "query": "pooled", "per_class": 16, "train_with_memory": False}
SGD = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 5e-4}
ADAM = {"optimizer": "adam", "weight_decay": 0}
VPT = {"rounds": 20, "epochs": 1, "batch_size": 32, "weighting": "samples"}
HEADS = {"head": "text", "projected": False}
DEFAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fedapt": ({"weighting": "uniform"}, {}),
    "fedclip": (
        {"rounds": 300, "optimizer": "adam", "rate": 5e-5, "epochs": 1, "batch_size": 32, "weight_decay": 0.2},
        {},
    ),
    "fedclipadapter": (ADAM, {"sides": "image", "reduction": 4, "alpha": 0.2}),
    "fedmaple": (VPT | {"rate": 0.0035}, {"m": 8, "depth": None}),
    "fedotp": ({"rounds": 10, "epochs": 5, "batch_size": 32, "rate": 0.001}, {"m": 16} | FEDOTP),
    "fedpgp": (
        {"rounds": 25, "epochs": 2, "batch_size": 32, "rate": 0.001, "weighting": "samples"} | SGD,
        {"m": 16, "b": 8, "mu": 1.0} | FEDPGP,
    ),
    "fedtaskres": (ADAM, {}),
    "fedtpg": (
        {"rounds": 500, "epochs": 1, "batch_size": 200, "rate": 0.003, "weighting": "uniform"}
        | {"momentum": 0.9, "weight_decay": 1e-5, "schedule": "cosine"},
        {"label_space": "client", "m": 4, "heads": 4, "feedforward": "relu", "start": "scaled"},
    ),
    "fedvpt": (VPT | {"rate": 0.002}, {"m": 10, "depth": 1} | HEADS),
    "fedvpt_deep": (VPT | {"rate": 0.002}, {"m": 1, "depth": None} | HEADS),
    "pfedpg": (
        {"rounds": 100, "epochs": 5, "batch_size": 64, "rate": 0.25, "momentum": 0.9, "weight_decay": 1e-3},
        {"m": 10, "generator": "attention", "generator_optimizer": "adam"},
    ),
    "pfedprompt": ({}, {"weight": 1.0} | PFEDPROMPT),
    "plan": (
        {"rounds": 20, "epochs": 1, "batch_size": 32, "rate": 0.0015, "weighting": "uniform"} | SGD,
        {"m": 8, "depth": None, "reduction": 8, "residual": True, "aggregators": "persist", "local_prompts": "restart"}
        | PLAN,
    ),
    "promptfl_per": ({"rounds": 10, "epochs": 1, "batch_size": 32, "rate": 0.002}, {"m": 16}),
    "promptfolio": ({"rounds": 10, "epochs": 5, "batch_size": 16, "rate": 0.002}, {"m": 16}),
    "singleset_vpt": (VPT | {"rate": 0.002}, {"m": 10, "depth": 1} | HEADS),
}
"""Of the spec and of the method; with the backbones of the papers, `core.rates` has others for the embedded ones."""
WHOLE = ("fedpgp", "fedtpg")  # whose options are all listed
OUT_OF_RANGE: dict[str, list[dict[str, Any]]] = {
    "fedpgp": [
        {"b": 0}, {"mu": -0.1}, {"tau_con": 0.0}, {"pairs": "none"}, {"full_rank": "yes"}, {"rank": 3}, {"m": 65},
    ],
    "fedtpg": [{"m": 0}, {"heads": 0}, {"feedforward": "gelu"}, {"b": 3}],
    "fedkgcoop": [{"w": -1.0}],
    "fedclip": [{"m": 4}],
    "promptfl_ft": [{"finetune_epochs": 0}, {"finetune_learning_rate": 0.0}],
    "fedcocoop": [{"reduction": 0}],
    "fedotp": [{"epsilon": 0.001}, {"gamma": 0.0}, {"gamma": 1.1}, {"transport": "sliced"}],
    "promptfolio": [{"theta": 1.1}],
}  # fmt: skip
RATE = {"head_learning_rate": 0.1}
LINEAR = {"head": "linear"}
CANNOT_BE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"name": "fedapt"}, {}, "class_specific: false"),
    ({"name": "fedapt", "label_space": "client"}, CLASSES, "leave label_space out"),
    ({"name": "fedlp"}, {}, "list the federation's class_names"),
    ({"name": "fedtaskres"}, {}, "list the federation's class_names"),
    ({"name": "fedtaskres", "label_space": "client"}, CLASSES, "leave label_space out"),
    ({"name": "fedclip", "m": 4}, {}, "unknown key"),
    ({"name": "fedavg"} | RATE, CLASSES, "is the rate of a linear head, and fedavg classifies by the template"),
    ({"name": "singleset_full"} | RATE, CLASSES, "take head: linear"),
    ({"name": "fedvpt"} | RATE, CLASSES, "take head: linear"),
    ({"name": "fedpr"} | RATE, CLASSES, "take head: linear"),
    ({"name": "fedavg", "trainable": "none"} | LINEAR | RATE, CLASSES, "the head is trained alone"),
    ({"name": "singleset_vpt", "m": 0} | LINEAR | RATE, CLASSES, "the head is trained alone"),
    ({"name": "promptfl"} | RATE, CLASSES, "head_learning_rate"),
    ({"name": "fedclip"} | RATE, CLASSES, "head_learning_rate"),
    ({"name": "pfedpg", "generator": "mlp", "inner_width": 8}, {}, "generator mlp has no inner_width"),
    ({"name": "pfedpg", "generator": "basis", "hidden": 50}, {}, "generator basis has no hidden layer"),
    ({"name": "pfedpg", "hidden": 50}, {}, "generator attention has no hidden layer"),
    ({"name": "pfedprompt", "memory": "labels", "query": "patches"}, {}, "is looked up by the image"),
    ({"name": "promptfl_per", "m": 4, "shared_tokens": 4}, {}, "of m = 4 context vectors 4 would be shared"),
    ({"name": "promptfl_per", "m": 1}, {}, "of m = 1 context vectors 0 would be shared"),
    ({"name": "fedvpt", "projected": True}, {}, "take head: linear with it"),
    ({"name": "fedvpt_deep", "projected": True}, {}, "take head: linear with it"),
    ({"name": "singleset_vpt", "projected": True}, {}, "take head: linear with it"),
    ({"name": "fedrep", "trainable": "none"}, {}, "shares the tower"),
    ({"name": "fedrod"}, {}, "list the federation's class_names"),
    ({"name": "perfedavg"}, {"training": {"momentum": 0.9}}, "takes plain steps"),
    ({"name": "fedavg", "projected": True}, {}, "projected is for a linear head"),
    ({"name": "fedavg", "trainable": "none"}, {}, "leaves nothing to train"),
    ({"name": "fedavg"} | LINEAR, {}, "list the federation's class_names"),
    ({"name": "fedavg", "label_space": "client"} | LINEAR, CLASSES, "label_space: federation"),
    ({"name": "fedavg"}, {"backbone": {"precision": "bf16"}}, "with autocast"),
    ({"name": "fedavg", "private": "norms", "trainable": "norms"}, {}, "leaves nothing to share"),
    ({"name": "fedavg", "private": "norms", "trainable": "none"} | LINEAR, CLASSES, "does not"),
    ({"name": "fedavg", "cache_blocks": True}, {}, "take trainable: last_k"),
    ({"name": "fedlora", "cache_blocks": True}, {}, "take blocks: last_k"),
    ({"name": "diprompt", "candidates": ["a photo of a {}"]}, {}, "at least 2"),
    ({"name": "diprompt", "candidates": ["a photo", "a sketch of a {}"]}, {}, "exactly once"),
    ({"name": "diprompt", "candidates": ["{}", "a sketch of a {}"]}, {}, "and words"),
    ({"name": "fedapt"}, {"task": "multi_label"} | CLASSES, "does not train on images with several labels: take one"),
    ({"name": "promptfl"}, {"task": "multi_label"}, "need class_names"),
    ({"name": "fedavg"} | LINEAR, {"task": "multi_label"} | CLASSES, "need head: text"),
    ({"name": "promptfl", "label_space": "client"}, {"task": "multi_label"} | CLASSES, "need label_space: federation"),
]
CAN_BE = [
    {"name": "pfedpg", "inner_width": 8},
    {"name": "pfedpg", "generator": "mlp", "hidden": 50},
    *({"name": name, "head": "linear", "projected": True} for name in ("fedvpt", "fedvpt_deep", "singleset_vpt")),
]


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_the_papers(name: str) -> None:
    of_spec, of_method = DEFAULTS[name]
    spec = resolve_spec({"name": "x", "method": {"name": name}, "backbone": {"model": "ViT-B-16"}} | CLASSES)
    told = spec.training.model_dump() | {"rounds": spec.rounds, "weighting": spec.aggregation.weighting}
    told["rate"] = told["learning_rate"]
    assert {key: told[key] for key in of_spec} == of_spec
    assert {key: spec.method[key] for key in of_method} == of_method
    if name in WHOLE:
        assert set(spec.method) == {"name", *of_method}


@pytest.mark.parametrize(("name", "option"), [(name, one) for name, some in OUT_OF_RANGE.items() for one in some])
def test_options_out_of_range_are_refused_by_name(name: str, option: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_spec({"name": "x", "method": {"name": name} | option})
    assert caught.value.errors[0]["path"] == f"method.{next(iter(option))}"


@pytest.mark.parametrize(("method", "spec", "said"), CANNOT_BE)
def test_what_cannot_be_is_refused_with_what_to_do(method: dict[str, Any], spec: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        resolve_spec({"name": "x", "method": method} | spec)


@pytest.mark.parametrize("method", CAN_BE)
def test_options_that_go_together_stay(method: dict[str, Any]) -> None:
    assert method["name"] in METHODS
    assert resolve_spec({"name": "x", "method": method}).method.items() >= method.items()


SHAPE = BackboneShape(
    d_t=512, d_v=768, d_e=512, text_layers=12, vision_layers=12, context_length=77, patch_size=16, patch_tokens=196
)
TRAVELS: dict[str, dict[str, tuple[int, ...]]] = {
    "fedclip": {"adapter_w1": (512, 512), "adapter_b1": (512,), "adapter_w2": (512, 512), "adapter_b2": (512,)},
    "fedclipadapter": {"image_w1": (128, 512), "image_w2": (512, 128)},
    "fedkgcoop": {"context": (16, 512)},
    "fedotp": {"global_context": (16, 512)},
    "fedpgp": {"global_context": (16, 512)},
    "fedpr": {"visual_prompts": (12, 8, 768)},
    "fedtaskres": {"residual": (3, 512)},
    "fedvpt": {"visual_prompts": (1, 10, 768)},
    "fedvpt_deep": {"visual_prompts": (12, 1, 768)},
    "pfedprompt": {"context": (16, 512)},
    "promptfl": {"context": (16, 512)},
    "promptfl_ft": {"context": (16, 512)},
    "promptfl_per": {"context": (8, 512)},
    "promptfl_prox": {"context": (16, 512)},
    "promptfolio": {"global_context": (16, 512)},
}


@pytest.mark.parametrize("name", TRAVELS)
def test_what_is_shared_is_the_state_and_all_that_travels_and_is_averaged(name: str) -> None:
    method = make_method({"name": name})
    context = ServerContext(TrainingSpec(), SHAPE, ("sun", "anchor", "umbrella"), (), seed=3, rounds=4)
    state = method.initial_state(context, initial_draws(3))
    assert {key: tuple(tensor.shape) for key, tensor in state.items()} == TRAVELS[name]
    assert not state["residual"].any() if name == "fedtaskres" else any(tensor.any() for tensor in state.values())
    (phase,) = method.phases(1, 4)
    assert phase.mean
    assert phase.up == phase.down == method.state_tensors()
    sizes = method.dims(context)
    assert {spec.name: spec.resolve(sizes) for spec in phase.up} == TRAVELS[name]
    assert {spec.dtype for spec in phase.up} == {"float32"}
    one = {key: tensor + 1 for key, tensor in state.items()}
    updates = [ClientUpdate("a", 0.25, one), ClientUpdate("b", 0.75, {key: 3 * tensor for key, tensor in one.items()})]
    after = method.aggregate(state, phase, iter(updates), weighted_mean, context)
    for key, tensor in one.items():
        assert_values(after[key], 2.5 * tensor, 1e-6)


TOWERS: list[dict[str, Any]] = [
    {"name": "fedlora", "blocks": "last_k"},
    {"name": "fedavg", "trainable": "last_k", "transport": "bfloat16"},
    {"name": "fedavg", "head": "linear"},
    {"name": "fedavg", "trainable": "last_k", "weighting": "ga", "head": "linear"},
    {"name": "fedavg", "trainable": "last_k", "head": "linear", "fedsr": True, "d_z": 5},
    {"name": "fedrep", "trainable": "last_k"},
    {"name": "fedbabu", "trainable": "last_k"},
    {"name": "fedrod", "trainable": "last_k"},
    {"name": "perfedavg", "trainable": "last_k", "head": "linear"},
    {"name": "singleset_full", "trainable": "last_k", "head": "linear"},
]


@pytest.mark.parametrize("method", TOWERS)
def test_a_federation_trains_a_tower(method: dict[str, Any]) -> None:
    data = "symbols:sketch?topic=weather&per_class=3&test_per_class=1&partition=iid&clients=2&client={}"
    spec = {"name": "x", "method": method, "rounds": 2, "training": {"learning_rate": 0.01, "batch_size": 8}}
    textless: dict[str, Any] = {}
    if method not in TOWERS[:2]:
        names = list(open_source(data.format(0)).class_names)
        spec |= {"backbone": {"model": MODEL, "pretrained": None}, "class_names": names}
        textless = {"backbone": textless_backbone(), "allow_backbone": True}
    found = simulate(spec, [Site(f"site-{k}", data.format(k)) for k in range(2)], **textless)
    assert [len(phase["counted"]) for report in found.reports[1:] for phase in report["phases"]] == [2, 2]
    assert len({one.client for one in found.final()}) == 2
    assert len(found.final()) == (4 if method["name"] == "fedrod" else 2)  # it has two heads
    assert not any("own" in key for key in found.state)
    assert all(bool(tensor.any()) for name, tensor in found.state.items() if name in ("in_proj_weight", "ln_1_bias"))
    if method["name"] == "fedlora":
        measured = [phase["measured"]["phase"] for report in found.reports[1:] for phase in report["phases"]]
        assert all(0 < one["product_error"] < 1 for one in measured)
        assert found.state["visual_b"].shape == (1, 3, 128, 2)
    if "weighting" in method:
        assert float(found.state["ga_weights"].sum()) == pytest.approx(1)
        assert int(found.state["ga_round"]) == 2
    if method in TOWERS[1:3]:
        assert {tensor.dtype for tensor in found.state.values()} == {torch.float32}
