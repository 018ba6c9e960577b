"""What holds of many methods alike: defaults, options that cannot be, what travels, and that a federation runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.client_service.training.payloads import check_payload, known_sizes
from promptfed.coordinator.aggregation.rules import weighted_mean
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.shared import methods
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.data import open_source
from promptfed.shared.messages import Domain
from promptfed.shared.methods import METHODS, make_method, method_class, method_for, resolve_spec
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.costs import allowed_rounds, costs, expected_clients, spent
from promptfed.shared.methods.core.interface import Method, check_admission
from promptfed.shared.methods.core.refusals import check_clients, check_hopeless
from promptfed.shared.methods.core.registry import MethodRegistry, UnusableMethod
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.privacy.accounting import Event, epsilon_of, replace_one_epsilon
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.sections import SecureAggregationSpec
from promptfed.shared.spec.spec import BackboneShape, FederationSpec, SpecError, TrainingSpec
from promptfed.shared.tensors import TensorError, Tensors, TensorSpec
from promptfed.shared.tensors.torch_tensors import TorchDraws
from tests.shared.methods.conftest import NAMES as MANY
from tests.shared.methods.conftest import Make
from tests.shared.spec.test_effects import costs_are_computed_coarsely as costs_are_computed_coarsely
from tests.support.equality import assert_values
from tests.support.textless import MODEL, textless_backbone

CLASSES = {"class_names": ["a", "b"]}


FEDPGP = {"label_space": "federation", "context_init": None, "tau_con": 0.5, "pairs": "both", "full_rank": False}


PLAN = {"alpha": 1.0, "zero_shot_reference": True, "text_aggregation": "attention", "visual_aggregation": "attention"}


FEDOTP = {"gamma": 0.8, "epsilon": 0.1, "iterations": 100, "threshold": 1e-3}


PFEDPROMPT = {"beta": 5.5, "per_class": 16}


SGD = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 5e-4}


ADAM = {"optimizer": "adam", "weight_decay": 0}


VPT = {"rounds": 20, "epochs": 1, "batch_size": 32, "weighting": "samples"}


HEADS = {"head": "text", "projected": False}


DEFAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fedapt": ({"weighting": "uniform"}, {}),
    "fedclip": (
        {"rounds": 20, "optimizer": "adam", "rate": 4e-4, "epochs": 3, "batch_size": 32, "weight_decay": 0},
        {"start": "zero_shot"},
    ), "fedclipadapter": (ADAM | {"epochs": 5}, {"reduction": 4, "alpha": 0.2}),
    "fedmaple": (VPT | {"rate": 0.0035}, {"m": 8, "depth": None}),
    "fedotp": ({"rounds": 10, "epochs": 5, "batch_size": 32, "rate": 0.001}, {"m": 16} | FEDOTP),
    "fedpgp": (
        {"rounds": 10, "epochs": 5, "batch_size": 32, "rate": 0.001, "weighting": "samples"} | SGD,
        {"m": None, "b": 8, "mu": 1.0} | FEDPGP,
    ), "fedtaskres": (ADAM, {}),
    "fedtpg": (
        {"rounds": 500, "epochs": 1, "batch_size": 200, "rate": 0.003, "weighting": "uniform"}
        | {"momentum": 0.9, "weight_decay": 1e-5, "schedule": "cosine"},
        {"label_space": "client", "m": 4, "heads": 4, "feedforward": "relu", "start": "scaled"},
    ), "fedvpt": (VPT | {"rate": 0.002}, {"m": 10, "depth": 1} | HEADS),
    "fedvpt_deep": (VPT | {"rate": 0.002}, {"m": 1, "depth": None} | HEADS),
    "pfedpg": (
        {"rounds": 100, "epochs": 5, "batch_size": 64, "rate": 0.25, "momentum": 0.9, "weight_decay": 1e-3},
        {"m": 10, "generator": "attention", "generator_optimizer": "adam"},
    ), "pfedprompt": ({}, {"weight": 1.0} | PFEDPROMPT),
    "plan": (
        {"rounds": 20, "epochs": 1, "batch_size": 32, "rate": 0.0015, "weighting": "uniform"} | SGD,
        {"m": 8, "depth": None, "reduction": 8, "residual": True, "aggregators": "persist", "local_prompts": "restart"}
        | PLAN,
    ),
    "promptfl_per": ({"rounds": 10, "epochs": 5, "batch_size": 32, "rate": 0.002, "schedule": "cosine"}, {"m": None}),
    "promptfolio": ({"rounds": 10, "epochs": 5, "batch_size": 16, "rate": 0.002}, {"m": None}),
    "singleset_vpt": (VPT | {"rate": 0.002}, {"m": 10, "depth": 1} | HEADS),
}  # fmt: skip


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
    "fedotp": [{"epsilon": 0.001}, {"gamma": 0.0}, {"gamma": 1.1}],
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
    ({"name": "promptfl_per", "m": 4, "shared_tokens": 4}, {}, "of m = 4 context vectors 4 would be shared"),
    ({"name": "promptfl_per", "m": 1}, {}, "of m = 1 context vectors 0 would be shared"),
    ({"name": "fedvpt", "projected": True}, {}, "take head: linear with it"),
    ({"name": "fedvpt_deep", "projected": True}, {}, "take head: linear with it"),
    ({"name": "singleset_vpt", "projected": True}, {}, "take head: linear with it"),
    ({"name": "fedrep", "trainable": "none"}, {}, "shares the tower"),
    ({"name": "fedrod"}, {}, "list the federation's class_names"),
    (
        {"name": "perfedavg"},
        {"training": {"momentum": 0.9}},
        r"momentum has no effect here \(perfedavg does not use it\)",
    ),
    ({"name": "fedavg", "projected": True}, {}, "projected is for a linear head"),
    ({"name": "fedavg", "trainable": "none"}, {}, "leaves nothing to train"),
    ({"name": "fedavg"} | LINEAR, {}, "list the federation's class_names"),
    ({"name": "fedavg", "label_space": "client"} | LINEAR, CLASSES, "label_space: federation"),
    ({"name": "fedavg"}, {"backbone": {"precision": "bf16"}}, "with autocast"),
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
    {"name": "fedavg", "head": "linear", "fedsr": True},
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
    assert resolve_spec({"name": "x", "method": method} | CLASSES).method.items() >= method.items()


SHAPE = BackboneShape(
    d_t=512, d_v=768, d_e=512, text_layers=12, vision_layers=12, context_length=77, patch_size=16, patch_tokens=196
)


OF_PLAN = "this client's own {} prompts as it trained them: each round they go to all who take part in it, unnamed"
OF_TOWERS = "your changes to the image tower, up to 86 million numbers (ViT-B): images are easier to rebuild from them"
DISCLOSED: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
    ({"name": "plan"}, [("sites", OF_PLAN.format("text and visual"))]), ({"name": "promptfl"}, []),
    ({"name": "plan", "text_aggregation": "mean"}, [("sites", OF_PLAN.format("visual"))]),
    ({"name": "plan", "visual_aggregation": "mean"}, [("sites", OF_PLAN.format("text"))]),
    ({"name": "plan", "text_aggregation": "mean", "visual_aggregation": "mean"}, []),
    ({"name": "fedapt"}, [("operator", "a prompt for every class, as you trained it")]),
    ({"name": "fedapt", "class_specific": False}, [("operator", "a prompt")]),
    *(({"name": "fedlora", "towers": towers}, [("operator", f"low-rank changes of attention in {where}")])
      for towers, where in (("both", "both towers"), ("visual", "the visual tower"), ("text", "the text tower"))),
    *(({"name": name}, [("operator", f"{OF_TOWERS} than from prompts")]) for name in ("fedavg", "fedrep")),
]  # fmt: skip


@pytest.mark.parametrize(("method", "told"), DISCLOSED)
def test_what_is_learnt_of_a_client_beside_an_aggregate(method: dict[str, Any], told: list[tuple[str, str]]) -> None:
    first, *more = make_method(method).disclosures
    assert (first, [(one.to, one.what) for one in more]) == (pf.AGGREGATE, told)


TRAVELS: dict[str, dict[str, tuple[int, ...]]] = {
    "fedclip": {"adapter_w1": (512, 512), "adapter_b1": (512,), "adapter_w2": (512, 512), "adapter_b2": (512,)},
    "fedclipadapter": {"image_w1": (128, 512), "image_w2": (512, 128)}, "fedkgcoop": {"context": (4, 512)},
    "fedmaple": {"text_prompts": (9, 8, 512), "coupling_weight": (9, 768, 512), "coupling_bias": (9, 768)},
    "fedotp": {"global_context": (16, 512)}, "fedpgp": {"global_context": (4, 512)},
    "fedpr": {"visual_prompts": (12, 8, 768)}, "fedtaskres": {"residual": (3, 512)},
    "fedvpt": {"visual_prompts": (1, 10, 768)}, "fedvpt_deep": {"visual_prompts": (12, 1, 768)},
    "pfedprompt": {"context": (4, 512)}, "promptfl": {"context": (4, 512)}, "promptfl_ft": {"context": (4, 512)},
    "promptfl_per": {"context": (2, 512)}, "promptfl_prox": {"context": (4, 512)},
    "promptfolio": {"global_context": (4, 512)},
}  # fmt: skip


@pytest.mark.parametrize("name", TRAVELS)
def test_what_is_shared_is_the_state_and_all_that_travels_and_is_averaged(name: str) -> None:
    method = make_method({"name": name})
    context = pf.ServerContext(TrainingSpec(), SHAPE, ("sun", "anchor", "umbrella"), (), seed=3, rounds=4)
    state = method.initial_state(context, initial_draws(3))
    assert {key: tuple(tensor.shape) for key, tensor in state.items()} == TRAVELS[name]
    at_the_template = name == "fedtaskres" or issubclass(METHODS[name].Hyper, pf.WordsHyper)
    assert any(tensor.any() for tensor in state.values()) is not at_the_template
    (phase,) = method.phases(1, 4)
    assert phase.mean
    assert phase.up == phase.down == method.state_tensors()
    sizes = method.dims(context)
    assert {spec.name: spec.resolve(sizes) for spec in phase.up} == TRAVELS[name]
    assert {spec.dtype for spec in phase.up} == {"float32"}
    one = {key: tensor + 1 for key, tensor in state.items()}
    updates = [
        pf.ClientUpdate("a", 0.25, one),
        pf.ClientUpdate("b", 0.75, {key: 3 * tensor for key, tensor in one.items()}),
    ]
    after = method.aggregate(state, phase, iter(updates), weighted_mean, context)
    for key, tensor in one.items():
        assert_values(after[key], 2.5 * tensor, 1e-6)


TOWERS: list[dict[str, Any]] = [
    {"name": "fedlora", "blocks": "last_k"}, {"name": "fedavg", "trainable": "last_k"},
    {"name": "fedavg", "head": "linear"},
    {"name": "fedavg", "trainable": "last_k", "weighting": "ga", "head": "linear"},
    {"name": "fedavg", "trainable": "last_k", "head": "linear", "fedsr": True, "d_z": 5},
    {"name": "fedrep", "trainable": "last_k"}, {"name": "fedbabu", "trainable": "last_k"},
    {"name": "fedrod", "trainable": "last_k"}, {"name": "perfedavg", "trainable": "last_k", "head": "linear"},
    {"name": "singleset_full", "trainable": "last_k", "head": "linear"},
    *({"name": name, "m": 2, "head": "linear"} for name in ("fedvpt", "fedvpt_deep", "singleset_vpt")),
]  # fmt: skip


FEW = ("fedlora", "fedrod", "fedvpt")  # the first tier's: weights, heads, prompts


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=() if one["name"] in FEW else pytest.mark.extended) for one in TOWERS]
)
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
    assert all((one.zero_shot is None) == bool(textless) for one in found.final())
    assert not any("own" in key for key in found.state)
    if "vpt" in method["name"]:
        assert set(found.state) == (set() if method["name"] == "singleset_vpt" else {"visual_prompts"})
    assert all(bool(tensor.any()) for name, tensor in found.state.items() if name in ("in_proj_weight", "ln_1_bias"))
    if method["name"] == "fedlora":
        assert found.state["visual_b"].shape == (1, 3, 128, 2)
    if "weighting" in method:
        assert float(found.state["ga_weights"].sum()) == pytest.approx(1)
        assert int(found.state["ga_round"]) == 2
    if method in TOWERS[1:3]:
        assert {tensor.dtype for tensor in found.state.values()} == {torch.float32}


# Methods that other packages bring: what is loaded when, and what is said of those that cannot be used.


SOUND = """
from promptfed.shared.methods.promptfl import PromptFL

class Mine(PromptFL):
    name = "mine"
"""


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package with one module and its entry points where Python looks for packages."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(package: str, text: str, **entries: str) -> None:
        module = package.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(text)
        about = tmp_path / f"{module}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        points = [f"{name} = {module}:{value}" for name, value in entries.items()]
        (about / "entry_points.txt").write_text("\n".join(["[promptfed.methods]", *points]))

    return put


@pytest.fixture
def registry() -> MethodRegistry:
    return MethodRegistry({"promptfl": PromptFL})


def why(registry: MethodRegistry, name: str) -> str:
    with pytest.raises(UnusableMethod) as raised:
        registry[name]
    return str(raised.value)


def test_a_method_of_a_package_is_one_of_the_methods(install: Install, registry: MethodRegistry) -> None:
    install("sound-1", SOUND, mine="Mine")
    assert set(registry) == {"promptfl", "mine"}
    assert registry["mine"].name == "mine"
    assert registry.package("mine") == "sound-1==1.0"
    assert registry.package("promptfl") is None


def test_our_own_are_listed_by_name() -> None:
    assert list(methods._own_methods()) == sorted(METHODS.own())


def test_our_own_are_told_from_those_of_packages(install: Install, registry: MethodRegistry, tmp_path: Path) -> None:
    mark = tmp_path / "imported"
    install("apart", f"open({str(mark)!r}, 'w').close()\n" + SOUND, mine="Mine")
    registry["put_here"] = PromptFL
    assert registry.own() == ["promptfl", "put_here"]
    assert not mark.exists()
    assert set(registry) == {"promptfl", "put_here", "mine"}
    assert registry.own() == ["promptfl", "put_here"]


def test_a_class_that_is_given_has_a_name_of_its_own(install: Install, registry: MethodRegistry) -> None:
    install("sound-3", SOUND, mine="Mine")

    def made(name: str | None, **more: Any) -> type[Method]:
        return type("Given", (PromptFL,), ({} if name is None else {"name": name}) | more)

    registry.use(PromptFL)  # as it is
    for name in ("promptfl", "mine"):
        with pytest.raises(ValueError, match=f"there is a method '{name}' already: give yours another name"):
            registry.use(made(name))
    for kind, said in ((int, "set its `name`|is not a subclass"), (made("other", phases=None), "cannot be described")):
        with pytest.raises(ValueError, match=said):
            registry.use(kind)
    assert set(registry) == {"promptfl", "mine"}
    for kind in (made("own"), made("own")):
        registry.use(kind)
        registry.use(kind)
        assert registry["own"] is kind, "a later class of a name replaces it"
    assert registry.own() == ["promptfl"]
    del registry["own"]
    assert ("own" in registry, len(registry)) == (False, 2)
    registry["own"] = made("own")
    assert registry.own() == ["promptfl", "own"], "put here, and not given"


def test_threads_asking_at_once_import_it_once_and_know_its_package(install: Install, registry: MethodRegistry) -> None:
    text = SOUND.replace("class Mine", "import time\n\nIMPORTS = []\nIMPORTS.append(1)\ntime.sleep(0.2)\n\nclass Mine")
    install("sound-2", text, mine="Mine")
    with ThreadPoolExecutor(4) as pool:
        packages = list(pool.map(lambda _: (registry["mine"], registry.package("mine"))[1], range(4)))
    assert packages == ["sound-2==1.0"] * 4


UNUSABLE = [
    ("import not_installed_anywhere", "Mine", "importing {module}:Mine fails (ModuleNotFoundError: No module"),
    ("raise SystemExit(3)", "Mine", "importing {module}:Mine fails (SystemExit: 3)"),
    (SOUND, "Yours", "importing {module}:Yours fails (AttributeError:"),
    ("Mine = 3", "Mine", "{module}:Mine is not a subclass of promptfed.shared.methods.core.interface.Method"),
    (
        "from promptfed.shared.methods.core.interface import Method\nclass Mine(Method): name = 'mine'",
        "Mine",
        "{module}:Mine does not define classifier, dims, state_tensors, train",
    ),
    (SOUND.replace('"mine"', '"other"'), "Mine", "{module}:Mine calls itself 'other': name it and its entry"),
    (SOUND + "    def phases(self, round): return ()", "Mine", "cannot be described (TypeError: "),
]


@pytest.mark.parametrize(("text", "value", "said"), UNUSABLE)
def test_what_cannot_be_used_is_named_with_its_package(
    install: Install, registry: MethodRegistry, text: str, value: str, said: str, tmp_path: Path
) -> None:
    package = tmp_path.name.replace("_", "-")
    install(package, text, mine=value)
    told = why(registry, "mine")
    assert told.startswith(f"the method 'mine' of {package}==1.0 cannot be used: ")
    assert said.format(module=package.replace("-", "_")) in told
    assert "mine" not in registry


def test_two_packages_with_one_name_are_refused_and_both_named(install: Install, registry: MethodRegistry) -> None:
    for package in ("first-one", "second-one"):
        install(package, SOUND, mine="Mine")
    told = why(registry, "mine")
    assert "first-one==1.0" in told
    assert "second-one==1.0" in told
    assert told.endswith("more than one package brings it: uninstall all but one")


def test_no_package_replaces_ours(install: Install, registry: MethodRegistry, caplog: pytest.LogCaptureFixture) -> None:
    install("usurper", SOUND.replace('"mine"', '"promptfl"'), promptfl="Mine")
    with caplog.at_level(logging.WARNING):
        assert list(registry) == ["promptfl"]
    assert registry["promptfl"] is PromptFL
    assert "the method 'promptfl' of usurper==1.0 is not used" in caplog.text


def test_lists_leave_out_what_cannot_be_used_and_say_so_once(
    install: Install, registry: MethodRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    install("failing", "raise ValueError('half written')", broken="Mine")
    install("working", SOUND, mine="Mine")
    with caplog.at_level(logging.WARNING):
        assert set(registry) == set(registry) == {"promptfl", "mine"}
        assert len(registry) == 2
    assert caplog.text.count("half written") == 1


def test_a_spec_that_asks_for_it_is_refused_at_method_name(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("unfinished", "raise ValueError('half written')", broken="Mine")
    monkeypatch.setattr(methods, "METHODS", MethodRegistry({"promptfl": PromptFL}))
    with pytest.raises(SpecError, match="half written") as refused:
        method_class("broken")
    assert [error["path"] for error in refused.value.errors] == ["method.name"]
    with pytest.raises(SpecError, match=r"there is no method 'broke'; promptfed .* `promptfed methods`"):
        method_class("broke")


def test_a_file_in_the_folder_is_a_method_as_contributing_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
    start = text.index("```python\n", text.index("## Add a method")) + len("```python\n")
    (tmp_path / "promptfl_sparse.py").write_text(dedent("   " + text[start : text.index("   ```", start)].lstrip(" ")))
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    own = MethodRegistry(methods._own_methods())
    assert set(own) == {*METHODS.own(), "promptfl_sparse"}
    assert all(kind.name == name for name, kind in own.items())
    assert own["promptfl_sparse"](own["promptfl_sparse"].Hyper(weight=0.5)).hyper.model_dump()["weight"] == 0.5


# What a method's server half gives to clients is what it declares: a client takes nothing else.


SHAPE_PAYLOAD_TENSORS = BackboneShape(
    d_t=16, d_v=16, d_e=16, text_layers=3, vision_layers=3, context_length=77, patch_size=4, mlp_width=64, positions=17,
    heads_v=2, heads_t=2,
)  # fmt: skip


NAMES = ("sun", "anchor", "umbrella")


CLIENTS = tuple(
    pf.ClientInfo(name, "trainer", 5, NAMES, Domain(name=name, description=f"a {name} of a {{}}")) for name in "abc"
)


@pytest.mark.parametrize("name", sorted(METHODS.own()))
def test_payloads_are_as_declared(name: str) -> None:
    method = make_method({"name": name})
    context = pf.ServerContext(TrainingSpec(), SHAPE_PAYLOAD_TENSORS, NAMES, CLIENTS, seed=0, rounds=2)
    state = method.initial_state(context, initial_draws(0))
    state = method.adopt(state, context)
    sizes = known_sizes(method, SHAPE_PAYLOAD_TENSORS, NAMES)
    first = next(iter(method.phases(1, 2)), None)
    for phase in (first, None):
        payload = method.payload(state, phase, CLIENTS[0], context)
        check_payload(payload, method, phase, sizes)
        for tensor_name in payload:
            with pytest.raises(TensorError):
                check_payload(payload | {tensor_name: torch.zeros(1, 2, 3, 4, 5)}, method, phase, sizes)
        others = [method.payload(state, phase, client, context) for client in CLIENTS[1:]]
        same = all(other[key].equal(payload[key]) for other in others for key in payload)
        assert same or not method.one_payload


@pytest.mark.parametrize("name", sorted(METHODS.own()))
def test_one_answer_makes_a_round(name: str, backbone: Backbone) -> None:
    method = make_method({"name": name})
    server = pf.ServerContext(TrainingSpec(), shape_of(backbone), MANY, CLIENTS, seed=0, rounds=4)
    state = method.adopt(method.initial_state(server, initial_draws(0)), server)
    for phase in (phase for phase in method.phases(1, 1) if phase.up):
        sent = method.expected_update(phase, CLIENTS[1], server)
        update = {key: torch.full(shape, 0.5, dtype=getattr(torch, dtype)) for key, (shape, dtype) in sent.items()}
        state = method.aggregate(state, phase, iter([pf.ClientUpdate("b", 1.0, update)]), weighted_mean, server)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


TRAINS_NOBODY = dict.fromkeys(("fedrep", "pfedpg"), "trains nothing, so it has no linear head") | {
    "perfedavg": "needs two batches, and client 'a' has 0 images"
}


@pytest.mark.parametrize("name", sorted({*METHODS.own()} - {"zero_shot"}))
def test_a_client_without_images_trains_in_no_phase(name: str, backbone: Backbone, make_context: Make) -> None:
    method = make_method({"name": name})
    server = pf.ServerContext(TrainingSpec(), shape_of(backbone), MANY, CLIENTS, seed=0, rounds=4)
    state = method.adopt(method.initial_state(server, initial_draws(0)), server)
    context = replace(make_context(0), client="a", domain=CLIENTS[0].domain)
    for phase in method.phases(4, 4):
        with pytest.raises(pf.MethodError, match=TRAINS_NOBODY.get(name, "client 'a' has no training images")):
            method.train(replace(context, phase=phase.name), method.payload(state, phase, CLIENTS[0], server), {})


# What a spec may ask for at level client: filled in, or refused by name with the numbers that make it so.


PRIVACY = {"level": "client", "clip": 0.5, "noise_multiplier": 1.0}


def spec(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "eyes", "method": {"name": "promptfl", "m": 4}, "rounds": 3, "participation": {"min_clients": 50},
        "backbone": {"model": "promptfed-tiny"},
        "aggregation": {"weighting": "uniform"}, "privacy": PRIVACY,
    }  # fmt: skip
    return base | changes


def refused(**changes: Any) -> list[dict[str, str]]:
    with pytest.raises(SpecError) as error:
        resolve_spec(spec(**changes))
    return error.value.errors


UNPROTECTED = [
    ({"method": {"name": "plan"}}, "plan does not combine its updates by a mean in its phase"),
    ({"method": {"name": "zero_shot"}}, "zero_shot sends nothing up: there is nothing to protect"),
    ({"method": {"name": "pfedpg"}}, "pfedpg does not combine its updates by a mean"),
    ({"privacy": {"level": "client", "noise_multiplier": 1.0}}, "give clip, the longest that one client's change"),
    ({"privacy": {"level": "client", "clip": 0.5}}, "give noise_multiplier, or epsilon"),
    ({"aggregation": {"weighting": "samples"}}, "take aggregation.weighting uniform"),
    ({"aggregation": {"weighting": "uniform", "max_weight_share": 0.5}}, "max_weight_share 1"),
    ({"aggregation": {"rule": "median"}}, "take rule mean, no clip_norm"),
    ({"aggregation": {"weighting": "uniform", "clip_norm": 1.0}}, "take rule mean, no clip_norm"),
    ({"privacy": PRIVACY | {"unit": "group"}}, "a whole client is protected here"),
]


@pytest.mark.parametrize(("changes", "said"), UNPROTECTED)
def test_what_cannot_be_protected_so_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    assert any(said in error["detail"] for error in refused(**changes) if error["path"] == "privacy")


def test_poisson_sampling_is_for_this_level_alone() -> None:
    told = refused(privacy={"level": "none"}, participation={"min_clients": 2, "sampling": "poisson"})
    assert told == [{"path": "privacy", "detail": "sampling poisson is for privacy.level client: leave it out"}]


@pytest.mark.extended
def test_delta_and_noise_are_filled_in_once_and_stay() -> None:
    poisson = {"min_clients": 100, "sampling": "poisson", "fraction": 0.2}
    found = resolve_spec(spec(privacy={"level": "client", "clip": 0.5, "epsilon": 6.0}, participation=poisson))
    assert found.privacy.delta == 1e-3
    assert found.privacy.noise_multiplier is not None
    assert spent(found, 3) <= 6.0
    told = costs(found, 3)
    assert told["epsilon"] == spent(found, 3), "of who knows the rounds: a secret sample lowers nothing"
    z = found.privacy.noise_multiplier
    assert told["epsilon"] == epsilon_of([Event("gaussian", 1.0, z, 3)], 1e-3)
    assert told["epsilon_if_secret"] == epsilon_of([Event("gaussian", 0.2, z, 3)], 1e-3)
    assert told["epsilon_replace_one"] == replace_one_epsilon([Event("gaussian", 1.0, z, 3)], 1e-3)
    quieter = found.model_copy(
        update={"privacy": found.privacy.model_copy(update={"noise_multiplier": found.privacy.noise_multiplier - 0.01})}
    )
    assert spent(quieter, 3) > 6.0, "it is the least noise there is"
    assert allowed_rounds(method_for(found), found) is None, "all rounds fit"
    again = resolve_spec(found.model_dump(mode="json"))
    assert again == found
    assert FederationSpec.model_validate(found.model_dump(mode="json")) == found


def test_a_delta_that_publishes_one_client_whole_is_refused_at_creation_and_later() -> None:
    errors = refused(privacy=PRIVACY | {"delta": 0.05})
    assert [error["path"] for error in errors] == ["privacy.noise_multiplier"]
    assert "δ = 0.05 is not between 1e-10 and 1/50, the number of units" in errors[0]["detail"]
    found = resolve_spec(spec())
    check_clients(found, 999)
    with pytest.raises(pf.MethodError, match=r"create the federation with a smaller privacy\.delta"):
        check_clients(found, 1001)


def test_noise_and_a_budget_end_the_rounds_in_time() -> None:
    found = resolve_spec(spec(rounds=20, privacy=PRIVACY | {"noise_multiplier": 4.0, "epsilon": 2.0}))
    allowed = allowed_rounds(method_for(found), found)
    assert allowed is not None
    assert spent(found, allowed) <= 2.0 < spent(found, allowed + 1)


def test_hopeless_noise_is_refused_with_its_numbers_unless_it_is_accepted() -> None:
    context = pf.ServerContext(resolve_spec(spec()).training, BackboneShape(d_t=512, d_e=512), None, (), 0, 25)
    hopeless = spec(
        method={"name": "promptfl", "m": 16}, rounds=25, participation={"min_clients": 10},
        privacy={"level": "client", "clip": 0.5, "noise_multiplier": 2.04},
    )  # fmt: skip
    found = resolve_spec(hopeless)
    method = method_for(found)
    with pytest.raises(pf.MethodError, match=r"on 8,192 numbers over 10 expected clients is r = 18 .* ρ = 3\.7"):
        check_hopeless(method, found, context, 10)
    check_hopeless(method, found, context, 100)  # the same with a hundred
    accepted = resolve_spec(hopeless | {"privacy": hopeless["privacy"] | {"accept_noise": True}})
    check_hopeless(method, accepted, context, 10)


def test_who_is_expected() -> None:
    fixed = resolve_spec(spec(participation={"min_clients": 3, "fraction": 0.5}))
    assert [expected_clients(fixed, count) for count in (3, 11)] == [2.0, 6.0]
    summed = fixed.model_copy(update={"secure_aggregation": SecureAggregationSpec(minimum=4)})
    assert [expected_clients(summed, count) for count in (4, 50)] == [4.0, 25.0]
    poisson = resolve_spec(spec(participation={"min_clients": 50, "fraction": 0.3, "sampling": "poisson"}))
    assert expected_clients(poisson, 55) == pytest.approx(16.5)


# The interface of a method: its defaults, and its optional hooks.


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
