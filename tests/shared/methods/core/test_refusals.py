"""Specs that no method can carry out: each refusal, and the nearest spec that is taken."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.shared.methods import (
    METHODS,
    has_rate,
    make_method,
    method_for,
    needs_class_names,
    resolve_spec,
    runnable,
)
from promptfed.shared.methods.core import costs, refusals
from promptfed.shared.methods.core.interface import MethodError, Phase, ServerContext, TensorSpec
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.privacy.accounting import PrivacyError
from promptfed.shared.spec.spec import BackboneShape, FederationSpec, SpecError, TrainingSpec

SHAPE = BackboneShape(d_t=8, d_v=8, d_e=8, text_layers=1, vision_layers=1, context_length=64)
FL = {"name": "promptfl", "m": 4}
CENTRAL = {
    "privacy": {"level": "client", "clip": 1.0, "noise_multiplier": 1.0, "accept_noise": True},
    "participation": {"min_clients": 9}, "aggregation": {"weighting": "uniform"},
}  # fmt: skip
SAMPLE = {"privacy": {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}}
SECURE = {"secure_aggregation": {"minimum": 4}, "participation": {"min_clients": 4}}
INT8 = {"compression": {"up": "int8"}}
POISSON = {"min_clients": 9, "sampling": "poisson", "fraction": 0.5}
SELECT: dict[str, Any] = {"selection": {}}


def privacy(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return base | {"privacy": base["privacy"] | changes}


TABLE: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    # a mean
    *[(FL, one, None) for one in (CENTRAL, SAMPLE, SECURE, INT8, SELECT)],
    ({"name": "coop"}, INT8, "coop sends nothing up: there is nothing to compress"),
    ({"name": "zero_shot"}, SECURE, "sends nothing up: there is nothing to sum"),
    ({"name": "plan"}, CENTRAL, r"does not combine its updates by a mean in its phase 'prompts': no noise fits"),
    ({"name": "pfedpg"}, SECURE, "by a mean in its phase 'train': they cannot be summed"),
    ({"name": "fedapt"}, INT8 | {"class_names": ["a", "b"]},
     "fedapt gives each client another payload, from which it trains: what is"),
    # noise at the coordinator
    (FL, privacy(CENTRAL, clip=None), "give clip, the longest that one client's change"),
    (FL, privacy(CENTRAL, unit="group"), "unit: group is of level sample"),
    (FL, privacy(CENTRAL, noise_multiplier=None), "give noise_multiplier, or epsilon, from which it follows"),
    (FL, privacy(CENTRAL, evaluation="noisy"), "noisy counts are of level sample"),
    (FL, CENTRAL | {"aggregation": {"weighting": "samples"}}, "take aggregation.weighting uniform"),
    (FL, CENTRAL | {"aggregation": {"weighting": "uniform", "max_weight_share": 0.5}}, "each client counts the"),
    (FL, CENTRAL | {"aggregation": {"weighting": "uniform", "max_weight_share": 1.0}}, None),
    (FL, CENTRAL | {"aggregation": {"rule": "median", "weighting": "uniform"}}, "take rule mean, no clip_norm"),
    (FL, CENTRAL | {"aggregation": {"clip_norm": 1.0, "weighting": "uniform"}}, "take rule mean, no clip_norm"),
    (FL, CENTRAL | SECURE, "noise at the coordinator needs each update"),
    (FL, CENTRAL | {"participation": POISSON}, None),
    ({"name": "fedlp"}, CENTRAL | {"participation": POISSON, "class_names": ["a", "b"]},
     "asks the same clients in several phases of a round"),
    ({"name": "fedlp"}, CENTRAL | {"class_names": ["a", "b"]}, None),
    (FL, {"participation": POISSON}, "sampling poisson is for privacy.level client"),
    (FL, CENTRAL | {"participation": POISSON | {"draw": "public"}}, "leave participation.draw out"),
    # noise at the clients
    (FL, privacy(SAMPLE, clip=None), "give clip, the longest contribution"),
    (FL, privacy(SAMPLE, noise_multiplier=None), "either noise_multiplier or epsilon"),
    (FL, privacy(SAMPLE, epsilon=8.0), "either noise_multiplier or epsilon"),
    (FL, privacy(SAMPLE, noise_multiplier=None, epsilon=8.0), None),
    (FL, privacy(SAMPLE, evaluation="noisy"), None),
    (FL, privacy(SAMPLE, evaluation="noisy", unit="group"), "noisy counts protect single test images"),
    (FL, privacy(SAMPLE, evaluation="noisy") | {"task": "multi_label", "class_names": ["a", "b"]},
     "and with task: multi_label the figure is no count"),
    (FL, privacy(SAMPLE, per_group=2), "per_group is for unit: group"),
    (FL, privacy(SAMPLE, per_group=2, unit="group"), None),
    (FL, privacy(SAMPLE, evaluation_epsilon=0.5), "evaluation_epsilon is for evaluation: noisy"),
    (FL, privacy(SAMPLE, accept_noise=True), "accept_noise is for level: client"),
    (FL, {"privacy": {"clip": 1.0}}, "the level is none, and something else is asked for"),
    (FL, {"privacy": {"evaluation": "withheld"}}, "the level is none"),
    (FL, SECURE | {"privacy": {"evaluation": "withheld"}}, None),
    (FL, SECURE | {"privacy": {"clip": 1.0}}, "the level is none"),
    ({"name": "fedrep"}, SAMPLE, r"cannot be trained at level sample \("),
    # sums
    (FL, SECURE | INT8, "leave compression out"), (FL, SECURE | {"aggregation": {"rule": "median"}}, "take rule mean"),
    (FL, SECURE | {"aggregation": {"clip_norm": 1.0}}, "clip_norm needs each update"),
    (FL, SECURE | {"participation": {"min_clients": 3}}, "raise min_clients to 4"),
    (FL, SECURE | {"participation": {"min_clients": refusals.MOST_CLIENTS}}, None),
    (FL, SECURE | {"participation": {"min_clients": refusals.MOST_CLIENTS + 1}}, "lower participation.min_clients"),
    # idle settings
    (FL, {"training": {"optimizer": "adam", "momentum": 0.5}}, "the optimizer adam has none"),
    (FL, {"training": {"views": 4}}, "images are seen as they are"),
    (FL, {"training": {"views": 4, "augmentation": "crop_flip"}}, None),
    ({"name": "plan"}, {"training": {"views": 4, "augmentation": "crop_flip"}}, "keeps no features"),
    (FL, {"aggregation": {"weighting": "uniform", "max_weight_share": 0.5}}, "all weigh the same"),
    (FL, {"aggregation": {"weighting": "samples", "max_weight_share": 0.5}}, None),
    # classes
    (FL, {"class_names": ["a b", "a_b", "c"]}, "to a text tower these class names are the same: 'a b', 'a_b'; rename"),
    (FL, {"class_names": ["a b", "a_b", "A b", "A_b", "A_B"]}, "are the same: 'a b', 'a_b', 'A b', 'A_b'; rename"),
    (FL, {"class_names": ["a b"]}, "'a b' is the only class to choose from"),
    (FL, {"class_names": ["a b", "b a"]}, None),
    ({"name": "fedrep"}, {"class_names": ["a b", "a_b"]}, None),
    *[({"name": "fedavg"} | one, {"task": "multi_label", "class_names": ["a", "b"]}, said) for one, said in (
        ({}, None), ({"head": "linear"}, "several labels per image need head: text"),
        ({"label_space": "client"}, "need label_space: federation"),
    )],
    ({"name": "fedapt", "class_specific": False}, {}, None),
    ({"name": "fedapt"}, {}, "learns a prompt for every class"),
    ({"name": "fedapt", "label_space": "client"}, {"class_names": ["a", "b"]}, "leave label_space out"),
    # rounds and their choice
    (FL, {"rounds": 0}, "0 rounds evaluate an export"),
    (FL, SELECT | {"retention": "last_round"}, "give retention all"),
    *[(FL, SELECT | one, "leave selection, or privacy") for one in (CENTRAL, SAMPLE, SECURE)],
    (FL, {"stop": {"patience": 2}} | SAMPLE, "leave selection and stop, or privacy"),
    ({"name": "fast_pt"}, SELECT, "the state of fast_pt grows with its clients"),
    *[(FL, {"task": "multi_label", "class_names": ["a", "b"]} | one, said) for one, said in (
        ({"selection": {"metric": "macro_f1"}}, "macro_f1 is not evaluated"),
        ({"selection": {"metric": "accuracy"}}, None),
    )],
    # rules
    ({"name": "coop"}, {"aggregation": {"rule": "median"}}, "the rule median has nothing to work on"),
    ({"name": "coop"}, {"aggregation": {"clip_norm": 1.0}}, "clip_norm has nothing to work on"),
    ({"name": "plan"}, {"aggregation": {"server": {"optimizer": "adam", "learning_rate": 0.1}}},
     "the server optimizer adam cannot take"),
    (FL, {"aggregation": {"server": {"optimizer": "adam", "learning_rate": 0.1}}}, None),
    (FL, {"aggregation": {"rule": "krum", "tolerate": 0.2}, "participation": {"min_clients": 4}},
     "needs at least 5 updates, and a phase may close with 4"),
    (FL, {"aggregation": {"rule": "krum", "tolerate": 0.2}, "participation": {"min_clients": 5}}, None),
    (FL, {"aggregation": {"rule": "multi_krum", "tolerate": 0.4}, "participation": {"min_clients": 14}},
     "at least 15 updates"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "spec", "said"), TABLE)
def test_what_is_refused_and_what_beside_it_is_taken(method: Any, spec: dict[str, Any], said: str | None) -> None:
    raw = {"name": "x", "method": method, "backbone": {"model": "promptfed-tiny"}} | spec
    if said is None:
        assert resolve_spec(raw).method["name"] == method["name"]
    else:
        with pytest.raises(SpecError, match=said):
            resolve_spec(raw)


def needs_classes(context: ServerContext) -> dict[str, int]:
    if context.class_names is None:
        raise MethodError("give class_names")
    return {"classes": len(context.class_names)}


@pytest.mark.parametrize(("method", "spec", "lacks"), [
    ({"name": "fedlp"}, {}, True), ({"name": "fedavg", "head": "linear"}, {}, True), ({"name": "fedavg"}, {}, False),
    ({"name": "fedlp"}, {"class_names": None}, True), ({"name": "fedlp"}, {"class_names": ["a", "b"]}, False),
    ({"name": "fedlp"}, {"class_names": ["a"]}, False), ({"name": "fedlp"}, {"rounds": -1}, False), (FL, {}, False),
    (FL, {"task": "multi_label"}, True), (FL | {"m": 0}, {"task": "multi_label"}, False),
])  # fmt: skip
def test_classes_are_asked_for_where_nothing_else_is_missing(
    method: Any, spec: Any, lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {"name": "x", "method": method, "backbone": {"model": "promptfed-tiny"}} | spec
    assert needs_class_names(raw) is lacks
    # A package's method may say so only where its tensors are made.
    monkeypatch.setattr(PromptFL, "dims", lambda method, context: needs_classes(context))
    assert needs_class_names(raw) is (lacks or method == FL)


def test_stopping_chooses_by_its_metric_unless_the_choice_is_named() -> None:
    raw = {"name": "x", "method": FL}
    stop = raw | {"stop": {"patience": 2, "metric": "macro_f1"}}
    for spec, chosen in ((raw, None), (stop, "macro_f1"), (stop | {"selection": {"metric": "accuracy"}}, "accuracy")):
        found = resolve_spec(spec).selection
        assert (found and found.metric) == chosen


@pytest.mark.parametrize(("tokens", "runs"), [(77, True), (7, True), (6, False)])
def test_methods_are_named_that_the_text_tower_has_room_for(tokens: int, runs: bool) -> None:
    """Four vectors beside the two special tokens and a word."""
    assert ("diprompt" in runnable(SHAPE.model_copy(update={"context_length": tokens}))) is runs


def test_noise_at_the_coordinator_may_follow_from_epsilon_alone() -> None:
    given = privacy(CENTRAL, noise_multiplier=None, epsilon=6.0)
    spec = FederationSpec.model_validate({"name": "x", "method": FL, "backbone": {"model": "promptfed-tiny"}} | given)
    refusals.check_central(make_method(FL), spec)


def test_a_mean_is_of_the_same_real_numbers_of_everybody() -> None:
    """No method of ours asks for others: one of a package may."""

    class Whole(PromptFL):
        def phases(self, round: int, rounds: int) -> Any:
            [phase] = super().phases(round, rounds)
            return (replace(phase, up=(TensorSpec("n", (2,), "int64"),)),)

    class Each(PromptFL):
        def expected_update(self, *given: Any) -> Any:
            return super().expected_update(*given)

    for kind, said in (
        (Whole, "tensors that are no real numbers: so"),
        (Each, "asks clients for different tensors: so"),
    ):
        with pytest.raises(MethodError, match=said):
            refusals.check_one_mean(kind(PromptFL.Hyper()), 3, "sum", "so")


@pytest.mark.parametrize(("names", "template", "m", "positions", "needs"), [
    (None, None, 4, 7, None), (None, None, 4, 6, 7), (["a b c", "d_e_f g"], None, 1, 7, None),
    (["a b c", "d_e_f g"], None, 1, 6, 7), (None, "a photo of a {}", 1, 7, None), (None, "a photo of a {}", 1, 6, 7),
    (None, "a photo of a {}", 1, None, None),
])  # fmt: skip
def test_texts_fit_into_the_tower(
    names: list[str] | None, template: str | None, m: int, positions: int | None, needs: int | None
) -> None:
    """A word is a token at least, and every text has a first and a last one."""
    spec = resolve_spec({"name": "x", "method": FL | {"m": m}, "class_names": names, "template": template})
    if needs is None:
        refusals.check_texts(method_for(spec), spec, positions)
        return
    with pytest.raises(MethodError, match=f"needs at least {needs} tokens with the method's {m} vectors"):
        refusals.check_texts(method_for(spec), spec, positions)
    refusals.check_texts(make_method({"name": "fedrep"}), spec, positions)


def sizes(spec: dict[str, Any], clients: int = 3, shape: BackboneShape = SHAPE) -> None:
    resolved = resolve_spec({"name": "x", "method": FL | {"m": 40}} | spec)
    context = ServerContext(resolved.training, shape, None, (), 0, resolved.rounds)
    refusals.check_sizes(resolved, method_for(resolved), context, clients)


def test_updates_fit_into_limits_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty vectors of eight numbers: 1,280 bytes."""
    for most in (1280, costs.DEFAULT_LIMIT):
        sizes({"admission": {"max_bytes": most}})
    with pytest.raises(MethodError, match=r"has 1,280 bytes, and admission\.max_bytes allows 1,279: leave it out"):
        sizes({"admission": {"max_bytes": 1279}})
    with monkeypatch.context() as patch:
        patch.setattr(costs, "LARGEST", 1280 + costs.HEADER)
        sizes({})
        patch.setattr(costs, "LARGEST", 1279 + costs.HEADER)
        with pytest.raises(MethodError, match="would have 1,280 bytes"):
            sizes({})
    monkeypatch.setattr(refusals, "LARGE", 1280)
    monkeypatch.setattr(refusals, "BYTES_PER_SECOND", 100)
    sizes({"participation": {"deadline_seconds": 26}})
    with pytest.raises(MethodError, match="1,280 bytes down and 1,280 up take 26 s at 1 MB/s"):
        sizes({"participation": {"deadline_seconds": 25.5}})
    monkeypatch.setattr(refusals, "LARGE", 1281)
    sizes({"participation": {"deadline_seconds": 25.5}})
    monkeypatch.setattr(refusals, "MOST_SORTED", 960)
    sizes({"aggregation": {"rule": "median"}})
    sizes({}, 4)
    with pytest.raises(MethodError, match="4 updates of 320 are too many"):
        sizes({"aggregation": {"rule": "median"}}, 4)


def test_a_rate_is_used_unless_the_method_ignores_it() -> None:
    def spec(name: str) -> FederationSpec:
        return FederationSpec.model_construct(method={"name": name})

    unused = [name for name in METHODS.own() if not has_rate(spec(name))]
    assert unused == [name for name in METHODS.own() if "learning_rate" in METHODS[name].ignores]
    assert "fedlp" in unused
    assert "promptfl" not in unused
    assert has_rate(spec("of-no-package")), "nobody can say"


def test_without_rounds_an_export_is_evaluated_and_nobody_trained() -> None:
    spec = resolve_spec({"name": "x", "method": FL})
    export = spec.model_copy(update={"rounds": 0, "continues": object()})
    refusals.check_rounds(export)
    with pytest.raises(MethodError, match="0 rounds evaluate an export on the clients' images: create it --from one"):
        refusals.check_rounds(export.model_copy(update={"continues": None}))
    for name in refusals.OF_TRAINING:
        with pytest.raises(MethodError, match=f"0 rounds train nobody: leave {name} out"):
            refusals.check_rounds(export.model_copy(update={name: object()}))


CONTEXT = ServerContext(TrainingSpec(), SHAPE, ("a", "b", "c"), (), 0, 4)


@pytest.mark.parametrize(("name", "down", "up"), [
    ("promptfl", 4 * 8, 4 * 8), ("fedlp", 3 * 8 + 3, 3 * 8 + 3), ("coop", 0, 0), ("pfedmoap", 4 * 8 * 2, 4 * 8),
    ("zero_shot", 0, 0),
])  # fmt: skip
def test_the_most_that_is_exchanged_in_any_phase(name: str, down: int, up: int) -> None:
    """In numbers of four bytes. FedLP's first phase sends sums of features and takes nothing."""
    method = make_method({"name": name} | ({"m": 4} if name not in ("fedlp", "zero_shot") else {}))
    assert costs.exchanged(method, CONTEXT) == (4 * down, 4 * up)


def numbers(count: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("n", (count,)),)


def staged(round: int, rounds: int) -> tuple[Phase, ...]:
    """The first, second, third and last round have a phase more each; in the second nothing is sent up."""
    first = {1: (Phase("first", (), numbers(2)),), 2: (Phase("second", numbers(7), ()),)}.get(round, ())
    third = (Phase("third", (), numbers(1)),) if round == 3 else ()
    last = (Phase("last", (), numbers(5)),) if round == rounds else ()
    return (*first, *third, Phase("train", numbers(1), numbers(1)), *last)


def test_phases_of_a_first_a_second_and_a_last_round_stand_for_all() -> None:
    method: Any = SimpleNamespace(name="staged", phases=staged, dims=lambda context: {})
    assert [phase.name for phase in costs.distinct_phases(method, 9)] == ["first", "train", "second", "last"]
    by_round = [["first", "train"], ["second", "train"], ["train", "last"]]
    for rounds, wanted in (
        (1, [["first", "train", "last"]]),
        (2, [*by_round[:1], ["second", "train", "last"]]),
        (9, by_round),
    ):
        spec: Any = SimpleNamespace(rounds=rounds)
        assert [[phase.name for phase in phases] for phases in costs._rounds(method, spec)] == wanted
    for rounds, sums in ((0, 0), (1, 2), (2, 3), (3, 5), (9, 12)):
        assert costs.noised_phases(method, rounds, 9) == sums, "two in the first and third, one in the second"
    assert [costs.training_loops(method, rounds) for rounds in (1, 9)] == [3, 12]
    for rounds, up in ((1, 5), (9, 5)):
        assert costs.exchanged(method, replace(CONTEXT, rounds=rounds)) == (4 * 7, 4 * up)
    silent: Any = SimpleNamespace(name="silent", phases=lambda *given: (Phase("look", numbers(1), ()),))
    with pytest.raises(PrivacyError, match="silent sends nothing up: there is nothing to protect"):
        costs.training_loops(silent, 9)


@pytest.mark.parametrize(("down", "up", "seconds"), [(300, 100, 4), (100, 300, 4), (100, 100, None), (301, 100, 5)])
def test_the_larger_way_says_whether_time_is_short(
    down: int, up: int, seconds: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "exchanged", lambda method, context: (down, up))
    monkeypatch.setattr(refusals, "LARGE", 300)
    monkeypatch.setattr(refusals, "BYTES_PER_SECOND", 100)
    if seconds is not None:
        with pytest.raises(MethodError, match=f"{down} bytes down and {up} up take {seconds} s"):
            sizes({"participation": {"deadline_seconds": seconds - 0.5}})
    sizes({"participation": {"deadline_seconds": seconds or 1.5}})
