"""Specs: defaults of the method, dotted paths in refusals, nothing coerced."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import BaseModel

from promptfed.shared.methods import METHODS, UnknownMethod, describe, resolve_spec
from promptfed.shared.spec import spec_hints
from promptfed.shared.spec.spec import FederationSpec, SpecError, merged

GOOD: dict[str, Any] = {"name": "eyes-1", "method": {"name": "promptfl"}}

SAMPLE = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}


def test_what_is_omitted_takes_the_defaults() -> None:
    spec = resolve_spec(GOOD)
    assert spec.method == {"name": "promptfl", "label_space": "federation", "m": 16, "context_init": None}
    assert spec.training.optimizer == "sgd"
    assert (spec.training.momentum, spec.training.weight_decay) == (0.9, 5e-4)
    assert resolve_spec({"name": "z", "method": {"name": "zero_shot"}}).rounds == 1
    assert resolve_spec({"name": "z", "method": {"name": "zero_shot"}, "rounds": 2}).rounds == 2


def test_a_resolved_spec_resolves_to_itself() -> None:
    spec = resolve_spec(GOOD | {"training": {"epochs": 3}, "class_names": ["a", "b"]})
    assert resolve_spec(spec.model_dump()) == spec


def test_rules_other_than_the_mean_weigh_all_alike_unless_told_otherwise() -> None:
    def aggregation(**given: Any) -> Any:
        return resolve_spec(GOOD | {"aggregation": given}).aggregation

    assert (aggregation().weighting, aggregation(clip_norm=1).weighting) == ("samples", "samples")
    assert aggregation(rule="median").weighting == "uniform"
    assert aggregation(rule="median", weighting="samples").weighting == "samples"
    assert (aggregation(rule="trimmed_mean").tolerate, aggregation(rule="median").tolerate) == (0.2, None)
    assert (
        resolve_spec(GOOD | {"aggregation": {"rule": "trimmed_mean"}}).model_dump()
        == resolve_spec(resolve_spec(GOOD | {"aggregation": {"rule": "trimmed_mean"}}).model_dump()).model_dump()
    )


@pytest.mark.parametrize(
    ("clients", "quorum", "tolerate", "possible"),
    [
        (5, 1.0, 0.2, True),
        (4, 1.0, 0.2, False),
        (10, 0.5, 0.2, True),
        (10, 0.4, 0.2, False),
        (30, 1.0, 0.45, True),
        (29, 1.0, 0.45, False),
    ],
)
def test_krum_takes_as_many_answers_as_its_condition_needs(
    clients: int, quorum: float, tolerate: float, possible: bool
) -> None:
    raw = GOOD | {
        "participation": {"min_clients": clients, "quorum": quorum},
        "aggregation": {"rule": "krum", "tolerate": tolerate},
    }
    if possible:
        assert resolve_spec(raw).aggregation.tolerate == tolerate
    else:
        with pytest.raises(SpecError, match=r"raise participation\.min_clients"):
            resolve_spec(raw)


def test_methods_whose_phases_are_means_take_any_rule() -> None:
    taking = set()
    for name in METHODS.own():
        raw = {"name": "r", "method": {"name": name}, "aggregation": {"rule": "median"}}
        try:
            resolve_spec(raw)
        except SpecError:
            continue
        taking.add(name)
    assert {"promptfl", "promptfl_prox", "fedpgp", "fedtpg", "fedclip", "fedkgcoop", "fedcocoop"} <= taking
    assert not {"plan", "pfedpg", "fast_pt", "coop", "zero_shot"} & taking
    resolve_spec({"name": "r", "method": {"name": "fast_pt", "prompts": "global"}, "aggregation": {"rule": "median"}})


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        ({"colour": 1}, "colour", "unknown key"),
        ({"rounds": -1}, "rounds", "greater than or equal to 0"),
        ({"rounds": 0}, "rounds", "0 rounds evaluate an export"),
        ({"rounds": "3"}, "rounds", "integer"),
        ({"rounds": 2.5}, "rounds", "integer"),
        ({"rounds": True}, "rounds", "integer"),
        ({"training": {"epochs": 0}}, "training.epochs", "greater than or equal to 1"),
        ({"training": {"lr": 1.0}}, "training.lr", "unknown key"),
        ({"training": {"learning_rate": float("nan")}}, "training.learning_rate", "finite"),
        ({"training": 3}, "training", "mapping"),
        ({"participation": {"quorum": 1.5}}, "participation.quorum", "less than or equal to 1"),
        ({"method": {"name": "promptfk"}}, "method.name", "did you mean 'promptfl'"),
        ({"method": {"name": "promptfl", "m": 0}}, "method.m", "greater than or equal to 1"),
        ({"method": {"name": "promptfl", "mu": 1.0}}, "method.mu", "unknown key"),
        ({"method": {"name": "promptfl", "context_init": "  "}}, "method", "context_init"),
        ({"method": {}}, "method", "needs a 'name'"),
        ({"method": "promptfl"}, "method", "mapping"),
        ({"name": "a b"}, "name", "letters, digits"),
        ({"template": "a photo"}, "template", "exactly once"),
        ({"class_names": []}, "class_names", "at least one"),
        ({"class_names": ["a", "b", "a"]}, "class_names", "twice: a"),
        ({"secure_aggregation": {}}, "secure_aggregation", "raise min_clients to 3"),
        ({"privacy": {"epsilon": 1.0}}, "privacy", "level: sample"),
        ({"privacy": SAMPLE | {"clip": None}}, "privacy", "give clip"),
        ({"privacy": SAMPLE | {"epsilon": 1.0}}, "privacy", "either noise_multiplier or epsilon"),
        ({"privacy": SAMPLE | {"noise_multiplier": None}}, "privacy", "either noise_multiplier or epsilon"),
        ({"privacy": SAMPLE | {"noise_multiplier": 0.1}}, "privacy.noise_multiplier", "greater than or equal to 0.3"),
        ({"privacy": SAMPLE | {"level": "client"}}, "privacy", "take aggregation.weighting uniform"),
        ({"privacy": SAMPLE | {"unit": "group", "evaluation": "noisy"}}, "privacy", "noisy counts protect single test"),
        ({"task": "multi_label", "privacy": SAMPLE | {"evaluation": "noisy"}}, "privacy", "the figure is no count"),
        ({"privacy": SAMPLE, "method": {"name": "plan"}}, "privacy", "aggregators have millions"),
        ({"privacy": SAMPLE, "method": {"name": "zero_shot"}}, "privacy", "it trains nothing"),
        ({"aggregation": {"rule": "best"}}, "aggregation.rule", "'mean', 'median', 'trimmed_mean'"),
        ({"aggregation": {"tolerate": 0.1}}, "aggregation.tolerate", "the rule mean takes none"),
        ({"aggregation": {"rule": "median", "tolerate": 0.1}}, "aggregation.tolerate", "the rule median takes none"),
        ({"aggregation": {"rule": "krum", "tolerate": 0.5}}, "aggregation.tolerate", "less than 0.5"),
        ({"aggregation": {"clip_norm": 0}}, "aggregation.clip_norm", "a number above 0, 'median' or null"),
        ({"aggregation": {"clip_norm": "mean"}}, "aggregation.clip_norm", "a number above 0, 'median' or null"),
        ({"aggregation": {"rule": "krum"}}, "aggregation", "needs at least 5 updates, and a phase may close with 1"),
        (
            {"aggregation": {"rule": "multi_krum", "tolerate": 0.1}, "participation": {"min_clients": 5}},
            "aggregation",
            "at least 10 updates",
        ),
        (
            {"aggregation": {"rule": "median"}, "method": {"name": "plan"}},
            "aggregation",
            "plan does not combine its updates",
        ),
        ({"aggregation": {"clip_norm": 1}, "method": {"name": "pfedpg"}}, "aggregation", "clip_norm cannot take"),
        ({"aggregation": {"rule": "krum"}, "method": {"name": "coop"}}, "aggregation", "coop sends nothing up"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"backbone": {"fingerprint": "sha256:12"}}, "backbone.fingerprint", "pattern"),
    ],
)
def test_refusals_name_the_path(change: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_spec(GOOD | change)
    assert path in {error["path"] for error in caught.value.errors}
    assert says in str(caught.value)


def test_every_offence_is_listed_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        resolve_spec(GOOD | {"rounds": -1, "colour": 1, "training": {"epochs": 0}})
    assert {error["path"] for error in caught.value.errors} == {"rounds", "colour", "training.epochs"}


def test_missing_method_is_named() -> None:
    with pytest.raises(SpecError, match="method"):
        resolve_spec({"name": "a"})


def test_merged_goes_section_by_section() -> None:
    assert merged({"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}, "c": 4}) == {"a": {"x": 1, "y": 3}, "b": 1, "c": 4}


@pytest.mark.parametrize("name", sorted(METHODS.own()))
def test_every_method_describes_itself(name: str) -> None:
    found = describe(name)
    assert found["name"] == name
    assert found["summary"].endswith(".")
    assert found["paper"]
    for key, schema in found["hyperparameters"]["properties"].items():
        assert "default" in schema, f"{key} has no default"
        assert schema.get("description"), f"{key} is not described"
    state = {tensor["name"] for tensor in found["state"]}
    if name in ("promptfl", "promptfl_prox"):
        assert state == {"context"}
        assert found["phases"][0]["up"][0]["shape"] == ["m", "d_t"]


@pytest.mark.parametrize(
    ("change", "path", "near"),
    [
        ({"round": 3}, "round", "rounds"),
        ({"training": {"lr": 1.0}}, "training.lr", "learning_rate"),
        ({"training": {"epoch": 1}}, "training.epoch", "epochs"),
        ({"training": {"fraction": 1}}, "training.fraction", "participation.fraction"),
        ({"epochs": 2}, "epochs", "training.epochs"),
        ({"backbone": {"shape": {"d_e": 8, "patchsize": 4}}}, "backbone.shape.patchsize", "patch_size"),
        ({"method": {"name": "promptfl", "contextinit": "a"}}, "method.contextinit", "context_init"),
        ({"method": {"name": "promptfl", "learning_rate": 1}}, "method.learning_rate", "training.learning_rate"),
        ({"method": {"name": "promptfl", "lr": 1}}, "method.lr", "training.learning_rate"),
    ],
)
def test_an_unknown_key_suggests_the_one_that_was_meant(change: dict[str, Any], path: str, near: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_spec({"name": "r", "method": {"name": "promptfl"}} | change)
    assert caught.value.errors == [{"path": path, "detail": f"unknown key; did you mean {near!r}?"}]


def test_a_removed_name_is_refused_in_one_line_with_its_release() -> None:
    named = {"name": "r", "method": {"name": "promptfl"}}
    for change, path in (
        ({"schedule": {"kind": "buffered"}}, "schedule"),
        ({"training": {"budget": {"steps": 3}}}, "training.budget"),
        ({"method": {"name": "promptfl", "pair": True}}, "method.pair"),
    ):
        with pytest.raises(SpecError) as caught:
            resolve_spec(named | change)
        assert caught.value.errors == [{"path": path, "detail": "unknown key; it was removed in 0.4.0"}]
    with pytest.raises(SpecError) as caught:
        resolve_spec({"name": "r", "method": {"name": "dpfpl"}})
    detail = "there is no method 'dpfpl'; it was removed in 0.4.0; `promptfed methods` lists them"
    assert caught.value.errors == [{"path": "method.name", "detail": detail}]


def test_what_is_listed_as_removed_is_not_there() -> None:
    assert not spec_hints.METHODS & set(METHODS)
    for key in spec_hints.KEYS:
        *parents, name = key.split(".")
        model: Any = FederationSpec
        for parent in parents if parents != ["method"] else ():
            kind = model.model_fields[parent].annotation
            (model,) = (one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel))
        assert name not in (model.model_fields if parents != ["method"] else METHODS["promptfl"].Hyper.model_fields)


def test_a_key_that_is_like_no_other_suggests_nothing() -> None:
    with pytest.raises(SpecError) as caught:
        resolve_spec({"name": "r", "method": {"name": "promptfl"}, "colour": 1})
    assert caught.value.errors == [{"path": "colour", "detail": "unknown key"}]


def test_all_that_is_wrong_is_told_at_once() -> None:
    raw = {
        "name": "a b",
        "secure_aggregation": {"threshold": 0.5},
        "rounds": -1,
        "training": {"epoch": 1},
        "method": {"name": "promptfl", "m": 0, "mu": 1},
    }
    with pytest.raises(SpecError) as caught:
        resolve_spec(raw)
    paths = [error["path"] for error in caught.value.errors]
    assert paths == ["name", "rounds", "training.epoch", "secure_aggregation.threshold", "method.m", "method.mu"]
    with pytest.raises(UnknownMethod) as unknown:
        resolve_spec({"name": "r", "method": {"name": "promptfk"}, "rounds": -1})
    assert [error["path"] for error in unknown.value.errors] == ["method.name", "rounds"]
    with pytest.raises(SpecError) as checks:
        resolve_spec({"name": "r", "method": {"name": "coop", "context_init": " "}, "aggregation": {"rule": "median"}})
    assert [error["path"] for error in checks.value.errors] == ["method", "aggregation"]


def test_a_rate_that_a_sweep_found_is_the_default_of_its_method_and_backbone_alone() -> None:
    def rate(method: str, **spec: Any) -> float:
        raw = {"name": "a", "method": {"name": method}, "class_names": ["a", "b"], **spec}
        return resolve_spec(raw).training.learning_rate

    assert rate("promptfl") == 0.1
    assert rate("promptfl", training={"epochs": 2}) == 0.1
    assert rate("promptfl", training={"learning_rate": 0.002}) == 0.002
    assert rate("promptfl", training={"optimizer": "adam"}) == 0.002  # it was not swept with
    assert rate("promptfl", backbone={"model": "ViT-B-16", "pretrained": "openai"}) == 0.002
    assert rate("promptfl", backbone={"model": "promptfed-tiny", "pretrained": "random"}) == 0.002
    on_vit = {"model": "ViT-B-16", "pretrained": "openai"}
    for method, paper, embedded in (
        ("fedpgp", 0.001, 0.01),
        ("coop", 0.002, 0.01),
        ("fedvpt", 0.002, 0.64),  # visual prompts
        ("fedclip", 5e-5, 5e-3),  # Adam
        ("fedlora", 2e-4, 0.02),  # AdamW
        ("pfedpg", 0.25, 0.25),  # large already
        ("fedavg", 1e-5, 1e-4),  # the pretrained weights themselves
        ("perfedavg", 1e-3, 1e-3),  # the same with SGD
        ("fedlp", 0.002, 0.002),  # without a rate
        ("fedtaskres", 0.1, 0.1),  # relative to the features' width
    ):
        assert (rate(method, backbone=on_vit), rate(method)) == (paper, embedded)
    on_emoji = {"model": "promptfed-emoji", "pretrained": "embedded"}
    assert (rate("fedpgp", backbone=on_emoji), rate("fedclip", backbone=on_emoji)) == (0.001, 5e-3)
    assert (rate("coop", backbone=on_emoji), rate("fedmaple", backbone=on_emoji)) == (0.002, 0.035)
    resolved = resolve_spec({"name": "a", "method": {"name": "promptfl"}})
    assert resolve_spec(resolved.model_dump(mode="json")) == resolved


def test_a_method_tells_the_rates_that_its_specs_take_by_backbone() -> None:
    told = {name: describe(name)["swept_rates"] for name in METHODS.own()}
    assert told["promptfl"], "a sweep has found one"
    for name, rates in told.items():
        for one in rates:
            backbone = {"model": one["model"], "pretrained": one["pretrained"]}
            raw = {"name": "r", "method": {"name": name}, "backbone": backbone, "class_names": ["a", "b"]}
            spec = resolve_spec(raw)
            assert spec.training.learning_rate == one["learning_rate"]
