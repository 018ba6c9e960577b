"""What every method is in a spec: its paper's defaults, and options and sections that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from promptfed.shared.methods import METHODS, resolve_spec
from promptfed.shared.spec.spec import SpecError

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
