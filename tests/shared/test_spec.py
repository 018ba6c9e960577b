"""Specs: defaults of the method, dotted paths in refusals, nothing coerced."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from promptfed.experiments.bench.tuning import Rung, grid, ranked, rungs, survivors
from promptfed.shared.methods import METHODS, UnknownMethod, describe, resolve_spec
from promptfed.shared.spec.spec import FederationSpec, SpecError, TrainingSpec, check_class_names, merged, parse_spec
from promptfed.shared.versions import RELEASE, VERSION, OtherVersion, expect_ours

GOOD: dict[str, Any] = {"name": "eyes-1", "method": {"name": "promptfl"}}


SAMPLE = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}


def test_what_is_omitted_takes_the_defaults() -> None:
    spec = resolve_spec(GOOD | {"backbone": {"model": "promptfed-tiny"}})
    assert spec.method == {"name": "promptfl", "label_space": "federation", "m": None, "context_init": None}
    assert spec.training.optimizer == "sgd"
    assert (spec.training.momentum, spec.training.weight_decay) == (0.9, 5e-4)
    assert resolve_spec({"name": "z", "method": {"name": "zero_shot"}}).rounds == 1
    assert resolve_spec({"name": "z", "method": {"name": "zero_shot"}, "rounds": 2}).rounds == 2


def test_a_resolved_spec_resolves_to_itself() -> None:
    for change in (
        {},
        {"training": {"epochs": 3}, "class_names": ["a", "b"]},
        {"aggregation": {"rule": "trimmed_mean"}},
    ):
        spec = resolve_spec(GOOD | change)
        assert resolve_spec(spec.model_dump(mode="json")) == spec


def test_rules_other_than_the_mean_weigh_all_alike_unless_told_otherwise() -> None:
    def aggregation(**given: Any) -> Any:
        return resolve_spec(GOOD | {"aggregation": given}).aggregation

    assert (aggregation().weighting, aggregation(clip_norm=1).weighting) == ("samples", "samples")
    assert aggregation(rule="median").weighting == "uniform"
    assert aggregation(rule="median", weighting="samples").weighting == "samples"
    assert (aggregation(rule="trimmed_mean").tolerate, aggregation(rule="median").tolerate) == (0.2, None)


CROPPED = {"augmentation": "crop_flip"}
OTHER_SCHEDULE = next(one for one in ("constant", "cosine") if one != TrainingSpec().schedule)
IDLE = [
    ("promptfl", {"training": {"views": 3}}, {"training": CROPPED | {"views": 3}}),
    ("fedvpt", {"training": CROPPED | {"views": 3}}, {"training": CROPPED}),
    ("promptfl", {"training": {"optimizer": "adam", "momentum": 0.5}}, {"training": {"momentum": 0.5}}),
    ("fedclip", {"training": {"momentum": 0.5}}, {"training": {"optimizer": "sgd", "momentum": 0.5}}),
    *[("fedlp", {"training": {name: value}}, {"training": {"epochs": 3}}) for name, value in (
        ("batch_size", 8), ("optimizer", "adam"), ("learning_rate", 0.1), ("momentum", 0.5), ("weight_decay", 0.1),
        ("schedule", OTHER_SCHEDULE),
    )],
    ("perfedavg", {"training": {"weight_decay": 0.1}}, {"training": {"weight_decay": 0.0}}),
    *[("zero_shot", {"training": {name: value}}, {}) for name, value in (
        ("epochs", 3), ("learning_rate", 0.1), ("augmentation", "crop_flip"),
    )],
    ("promptfl", {"privacy": SAMPLE | {"per_group": 3}}, {"privacy": SAMPLE | {"unit": "group", "per_group": 3}}),
    ("promptfl", {"privacy": SAMPLE | {"evaluation_epsilon": 0.2}},
     {"privacy": SAMPLE | {"evaluation": "noisy", "evaluation_epsilon": 0.2}}),
    ("promptfl", {"privacy": SAMPLE | {"accept_noise": True}}, {"privacy": SAMPLE}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "idle", "used"), IDLE)
def test_what_has_no_effect_with_the_others_is_refused(method: str, idle: dict[str, Any], used: dict[str, Any]) -> None:
    base = {"name": "x", "method": {"name": method}, "class_names": ["a", "b"]}
    with pytest.raises(SpecError, match=r"(has no effect here \(.*\)|is for .*): leave it out|; leave it out"):
        resolve_spec(base | idle)
    resolve_spec(resolve_spec(base | used).model_dump(mode="json"))


KRUM = [
    (5, 1.0, 0.2, True), (4, 1.0, 0.2, False), (10, 0.5, 0.2, True), (10, 0.4, 0.2, False), (30, 1.0, 0.45, True),
    (29, 1.0, 0.45, False),
]  # fmt: skip


@pytest.mark.parametrize(("clients", "quorum", "tolerate", "possible"), KRUM)
def test_krum_takes_as_many_answers_as_it_needs(clients: int, quorum: float, tolerate: float, possible: bool) -> None:
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


REFUSED = [
    ({"rounds": -1}, "rounds", "greater than or equal to 0"), ({"rounds": 0}, "rounds", "0 rounds evaluate an export"),
    ({"rounds": "3"}, "rounds", "integer"), ({"rounds": 2.5}, "rounds", "integer"),
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
    ({"method": {}}, "method", "needs a 'name'"), ({"method": "promptfl"}, "method", "mapping"),
    ({"name": "a b"}, "name", "letters, digits"), ({"template": "a photo"}, "template", "exactly once"),
    ({"class_names": []}, "class_names", "at least one"),
    ({"class_names": ["a", "b", "a"]}, "class_names", "twice: a"),
    ({"class_names": ["a", "b\u202ec"]}, "class_names.1", "has \\u202e"),
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
        {"aggregation": {"rule": "multi_krum", "tolerate": 0.1}, "participation": {"min_clients": 5}}, "aggregation",
        "at least 10 updates",
    ),
    (
        {"aggregation": {"rule": "median"}, "method": {"name": "plan"}}, "aggregation",
        "plan does not combine its updates",
    ), ({"aggregation": {"clip_norm": 1}, "method": {"name": "pfedpg"}}, "aggregation", "clip_norm cannot take"),
    ({"aggregation": {"rule": "krum"}, "method": {"name": "coop"}}, "aggregation", "coop sends nothing up"),
    ({"seed": -1}, "seed", "greater than or equal to 0"),
    ({"backbone": {"fingerprint": "sha256:12"}}, "backbone.fingerprint", "pattern"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "path", "says"), REFUSED)
def test_refusals_name_the_path(change: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_spec(GOOD | change)
    assert path in {error["path"] for error in caught.value.errors}
    assert says in str(caught.value)


def test_what_is_no_spec_at_all_is_said_of_the_whole() -> None:
    with pytest.raises(ValidationError) as caught:
        FederationSpec.model_validate("promptfl")
    assert [error["path"] for error in SpecError.from_validation(caught.value).errors] == ["(spec)"]


@pytest.mark.parametrize(("names", "says"), [
    ([], "is empty: name"), (["a", "b\u202e"], "has \\u202e"), (list("abcdefabcdef"), "a class twice: a, b, c, d, e$"),
])  # fmt: skip
def test_a_list_of_classes_is_refused_by_what_is_wrong_with_it(names: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("\\", "\\\\")):
        check_class_names(names)


@pytest.mark.parametrize(("change", "figure", "evaluations"), [
    ({}, "Accuracy", "plain"), ({"task": "multi_label"}, "Mean average precision", "plain"),
    ({"secure_aggregation": {}}, "Accuracy", "withheld"), ({"privacy": SAMPLE}, "Accuracy", "withheld"),
    ({"secure_aggregation": {}, "privacy": {"evaluation": "plain"}}, "Accuracy", "plain"),
    ({"privacy": {"evaluation": "noisy"}}, "Accuracy", "noisy"),
])  # fmt: skip
def test_what_an_evaluation_tells_and_whether_it_leaves_a_site(change: Any, figure: str, evaluations: str) -> None:
    spec = parse_spec(GOOD | change)
    assert (spec.figure, spec.evaluations) == (figure, evaluations)


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


MISSPELT = [
    ({"colour": 1}, "colour", None),
    ({"round": 3}, "round", "rounds"),
    ({"training": {"lr": 1.0}}, "training.lr", "learning_rate"),
    ({"training": {"epoch": 1}}, "training.epoch", "epochs"),
    ({"training": {"fraction": 1}}, "training.fraction", "participation.fraction"),
    ({"epochs": 2}, "epochs", "training.epochs"),
    ({"backbone": {"shape": {"d_e": 8, "patchsize": 4}}}, "backbone.shape.patchsize", "patch_size"),
    ({"method": {"name": "promptfl", "contextinit": "a"}}, "method.contextinit", "context_init"),
    ({"method": {"name": "promptfl", "learning_rate": 1}}, "method.learning_rate", "training.learning_rate"),
    ({"method": {"name": "promptfl", "lr": 1}}, "method.lr", "training.learning_rate"),
]


@pytest.mark.parametrize(("change", "path", "near"), MISSPELT)
def test_an_unknown_key_suggests_the_one_that_was_meant(change: dict[str, Any], path: str, near: str | None) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_spec({"name": "r", "method": {"name": "promptfl"}} | change)
    meant = f"did you mean {near!r}?" if near else f"promptfed {RELEASE} has none of this name"
    assert caught.value.errors == [{"path": path, "detail": f"unknown key; {meant}"}]


def test_an_unknown_method_is_refused_with_this_release() -> None:
    with pytest.raises(SpecError) as caught:
        resolve_spec({"name": "r", "method": {"name": "dpfpl"}})
    detail = f"there is no method 'dpfpl'; promptfed {RELEASE} has none of this name, `promptfed methods` lists them"
    assert caught.value.errors == [{"path": "method.name", "detail": detail}]


def test_all_that_is_wrong_is_told_at_once() -> None:
    raw = {
        "name": "a b", "secure_aggregation": {"threshold": 0.5}, "rounds": -1, "training": {"epoch": 1},
        "method": {"name": "promptfl", "m": 0, "mu": 1},
    }  # fmt: skip
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
        tiny = {"backbone": {"model": "promptfed-tiny"}}
        raw = {"name": "a", "method": {"name": method}, "class_names": ["a", "b"], **tiny, **spec}
        return resolve_spec(raw).training.learning_rate

    assert rate("promptfl") == 0.02
    assert rate("promptfl", training={"epochs": 2}) == 0.02
    on_photo = {"model": "promptfed-photo", "pretrained": "embedded"}
    assert (rate("promptfl", backbone=on_photo), rate("pfedmoap", backbone=on_photo)) == (0.003, 0.6)
    assert rate("fedtpg", backbone=on_photo) == 0.03  # a generator's weights, no words
    assert rate("promptfl", training={"learning_rate": 0.002}) == 0.002
    assert rate("promptfl", training={"optimizer": "adam"}) == 0.002  # it was not swept with
    assert rate("promptfl", backbone={"model": "ViT-B-16", "pretrained": "openai"}) == 0.002
    assert rate("promptfl", backbone={"model": "promptfed-tiny", "pretrained": "random"}) == 0.002
    on_vit = {"model": "ViT-B-16", "pretrained": "openai"}
    for method, paper, embedded in (
        ("fedpgp", 0.001, 0.003),  # Adam
        ("promptfolio", 0.002, 0.003),  # Adam
        ("coop", 0.002, 0.02),
        ("fedkgcoop", 0.002, 0.01),
        ("fedvpt", 0.002, 0.64),  # visual prompts
        ("fedclip", 4e-4, 0.002),  # 0.2/d_e
        ("fedlora", 2e-4, 0.02),  # AdamW
        ("pfedpg", 0.25, 0.25),  # large already
        ("fedavg", 1e-5, 1e-4),  # the pretrained weights themselves
        ("perfedavg", 1e-3, 1e-3),  # the same with SGD
        ("fedlp", 0.002, 0.002),  # without a rate
        ("fedtaskres", 0.03, 0.15),  # 1.5 logits
        ("fedclipadapter", 0.1, 0.1),  # relative to the features' width
    ):
        assert (rate(method, backbone=on_vit), rate(method)) == (paper, embedded)
    on_emoji = {"model": "promptfed-emoji", "pretrained": "embedded"}
    assert (rate("fedpgp", backbone=on_emoji), rate("fedclip", backbone=on_emoji)) == (0.001, 0.002)
    assert (rate("coop", backbone=on_emoji), rate("fedmaple", backbone=on_emoji)) == (0.002, 0.035)


def test_a_method_tells_the_rates_that_its_specs_take_by_backbone() -> None:
    told = {name: describe(name)["swept"] for name in METHODS.own()}
    assert told["promptfl"], "a sweep has found one"
    for name, swept in told.items():
        for one in swept:
            backbone = {"model": one["model"], "pretrained": one["pretrained"]}
            raw = {"name": "r", "method": {"name": name}, "backbone": backbone, "class_names": ["a", "b"]}
            spec = resolve_spec(raw)
            assert spec.training.model_copy(update=one["training"]) == spec.training


@pytest.mark.parametrize(
    ("method", "backbone", "given"),
    [("promptfl", "photo", 0.002), ("fedpgp", "photo", 0.001), ("fedpgp", "tiny", 0.001)],
)
def test_words_train_by_adam_where_sgd_failed_unless_the_spec_names_rate_or_optimizer(
    method: str, backbone: str, given: float
) -> None:
    def training(**named: Any) -> TrainingSpec:
        model = {"model": f"promptfed-{backbone}", "pretrained": "embedded"}
        raw = {"name": "a", "method": {"name": method}, "class_names": ["a", "b"], "backbone": model}
        return resolve_spec({**raw, "training": named}).training

    one = training()
    assert (one.optimizer, one.learning_rate, one.batch_size, one.epochs) == ("adam", 0.003, 256, 20)
    assert training(epochs=3) == one.model_copy(update={"epochs": 3})
    sgd = training(learning_rate=0.02)
    assert (sgd.optimizer, sgd.learning_rate, sgd.batch_size, sgd.epochs) == ("sgd", 0.02, 32, 5)
    assert training(momentum=0.8) == sgd.model_copy(update={"momentum": 0.8, "learning_rate": given})
    assert training(optimizer="adamw") == sgd.model_copy(update={"optimizer": "adamw", "learning_rate": given})


@pytest.mark.parametrize(
    ("method", "m", "optimizer", "rate"),
    [
        ("fedpgp", None, "adam", 0.003),
        ("fedpgp", 16, "sgd", 0.01),
        ("promptfolio", None, "adam", 0.003),
        ("promptfolio", 16, "sgd", 0.02),
    ],
)
def test_vectors_from_random_numbers_train_by_sgd(method: str, m: int | None, optimizer: str, rate: float) -> None:
    model = {"model": "promptfed-tiny", "pretrained": "embedded"}
    raw = {"name": "a", "method": {"name": method, "m": m}, "class_names": ["a", "b"], "backbone": model}
    training = resolve_spec(raw).training
    assert (training.optimizer, training.learning_rate) == (optimizer, rate)


# Successive halving: rungs, survivors and grids of rates.


def test_a_rung_has_a_third_of_the_candidates_and_twice_the_rounds() -> None:
    assert rungs(18, 20) == (Rung(18, 5), Rung(6, 10), Rung(2, 20))
    assert rungs(27, 27, last=1) == (Rung(27, 4), Rung(9, 7), Rung(3, 14), Rung(1, 27))
    assert rungs(2, 10) == (Rung(2, 10),)
    assert rungs(18, 2) == (Rung(18, 1), Rung(6, 1), Rung(2, 2))
    for numbers in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            rungs(numbers[0], numbers[1], last=numbers[2])


@given(st.integers(1, 300), st.integers(1, 500), st.integers(1, 5))
def test_rungs_lead_from_all_candidates_to_all_rounds(candidates: int, rounds: int, last: int) -> None:
    steps = rungs(candidates, rounds, last=last)
    assert (steps[0].candidates, steps[-1].rounds) == (candidates, rounds)
    assert steps[-1].candidates <= max(last, 1)
    for before, after in pairwise(steps):
        assert after.candidates < before.candidates
        assert 1 <= before.rounds <= after.rounds


def test_the_best_survive_and_the_default_always() -> None:
    scores = {"a": 0.1, "b": 0.9, "c": 0.5, "d": 0.9}
    assert ranked(scores) == ["b", "d", "c", "a"]
    assert survivors(scores, 3, "c") == ["b", "d", "c"]
    assert survivors(scores, 2, "a") == ["b", "a"]
    assert survivors(scores, 1, "a") == ["a"]
    assert survivors(scores, 9, "a") == ["b", "d", "c", "a"]
    with pytest.raises(ValueError, match="default"):
        survivors(scores, 2, "e")


def test_of_a_group_only_some_survive_beside_the_default() -> None:
    scores = {"a1": 0.9, "a2": 0.8, "a3": 0.7, "b1": 0.1}
    assert survivors(scores, 3, "b1", group=lambda key: key[0]) == ["a1", "a2", "b1"]
    assert survivors(scores, 2, "a1", group=lambda key: key[0], most=1) == ["a1", "b1"]
    assert survivors(scores, 4, "a3", group=lambda key: key[0], most=1) == ["a1", "b1", "a3"]


@given(st.floats(1e-6, 10), st.integers(1, 4))
def test_a_grid_covers_four_decades_around_its_centre(centre: float, per_decade: int) -> None:
    rates = grid(centre, per_decade=per_decade)
    assert rates[0] < rates[len(rates) // 2] < rates[-1]
    assert rates[len(rates) // 2] == centre
    assert math.log10(rates[-1] / rates[0]) >= 4 - 0.05
    assert len(rates) == 4 * per_decade + 1
    assert grid(0.002) == (2e-5, 2e-4, 2e-3, 2e-2, 0.2)


# Which version of the protocol a peer tells, and what it is told if that is another one.


@pytest.mark.parametrize("told", [None, str(VERSION)])
def test_the_own_version_is_taken_and_silence_is_not_judged(told: str | None) -> None:
    expect_ours(told, "the client", "this coordinator")


@pytest.mark.parametrize("told", ["", "1-2", "1-3", str(VERSION - 1), "x", "1-2-3", f" {VERSION}"])
def test_an_older_peer_is_to_be_updated(told: str) -> None:
    number = int(told[-1]) if told in ("1-2", "1-3") or told.isdecimal() else 0
    with pytest.raises(OtherVersion, match=rf"^the client speaks version {number} of .*: update the client$"):
        expect_ours(told, "the client", "this coordinator")


@pytest.mark.parametrize("told", [str(VERSION + 1), f"1-{VERSION + 1}"])
def test_a_newer_peer_is_ahead_of_this_side(told: str) -> None:
    with pytest.raises(OtherVersion, match=rf"speaks version {VERSION + 1} .*: update this coordinator$"):
        expect_ours(told, "the client", "this coordinator")
