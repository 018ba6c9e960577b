"""A federation whose updates nobody sees: in one process, to the same state as in the clear."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import promptfed
from promptfed.client_service.privacy.ledger import BudgetExhausted, Ledger
from promptfed.client_service.privacy.noisy_counts import coded_accuracy, lowest
from promptfed.client_service.privacy.policy import FLOOR
from promptfed.client_service.privacy.secure import SecureWork
from promptfed.client_service.training.data import held_out
from promptfed.client_service.training.trainer import TaskWork
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.sdk.client import CommandError
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import DataError, open_source
from promptfed.shared.methods.core.interface import MethodError, TrainResult
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.tensors.torch_tensors import decode
from tests.support import exports
from tests.support.own_images import SHAPES, write_folder

DATA = "symbols:painting?topic=weather&per_class=4&test_per_class=2&partition=iid&clients=4&client={}"


SITES = [Site(f"site-{k}", DATA.format(k)) for k in range(4)]


def spec(method: str = "promptfl", **changes: Any) -> dict[str, Any]:
    return {
        "name": "summed", "method": {"name": method, "m": 4}, "rounds": 2,
        "training": {"learning_rate": 0.02, "batch_size": 4}, "participation": {"min_clients": 4}, "seed": 3,
    } | changes  # fmt: skip


@pytest.mark.parametrize("method", ["promptfl", "fedpgp"])
def test_the_state_is_that_of_the_mean_in_the_clear(method: str, backbone: Backbone, features: FeatureCache) -> None:
    def run(**changes: Any) -> Any:
        return simulate(spec(method, **changes), SITES, backbone=backbone, features=features)

    clear, summed = run(), run(secure_aggregation={"threshold": 0.7})
    assert summed.federation.state == "finished"
    for name, tensor in clear.state.items():
        assert (summed.state[name] - tensor).abs().max() < 1e-6, name
    assert run(secure_aggregation={"threshold": 0.7}).state_hash == summed.state_hash, "masks cancel"


PRIVACY = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0, "delta": 1e-3}


def test_noise_for_records_gives_the_state_of_noise_in_clear(backbone: Backbone, features: FeatureCache) -> None:
    def run(**changes: Any) -> Any:
        return simulate(spec(rounds=1, privacy=PRIVACY, **changes), SITES, backbone=backbone, features=features)

    clear, summed = run(), run(secure_aggregation={"threshold": 0.7})
    for name, tensor in clear.state.items():
        assert (summed.state[name] - tensor).abs().max() < 1e-6, name
    spent, told = clear.privacy(), summed.privacy()
    assert told == spent
    assert (told.clients, told.noise, told.rounds_counted) == (4, "seeded", 1)
    assert summed.sums().smallest_sum == 4
    assert all(phase.updates == [] for report in summed.round_reports for phase in report.phases)


@pytest.mark.slow
def test_a_change_that_its_data_set_can_no_longer_afford_does_not_leave(
    backbone: Backbone, features: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted before its masked vector is sent; the others' sum is opened, and the next round is as usual."""
    spend, refused = Ledger.spend, []

    def spend_but_once(ledger: Ledger, *about: Any) -> bool:
        if not refused:
            refused.append(ledger)
            raise BudgetExhausted("another federation was faster")
        return spend(ledger, *about)

    monkeypatch.setattr(Ledger, "spend", spend_but_once)
    wanted = spec(privacy=PRIVACY, secure_aggregation={"threshold": 0.7})
    result = simulate(wanted, SITES, backbone=backbone, features=features)
    first, second = (report.phases[0] for report in result.round_reports[1:])
    assert [one.type for one in first.failed] == ["privacy-budget-exhausted"]
    assert [one.answered for one in first.secure.steps[:3]] == [4, 4, 3]
    assert (first.secure.sum_clients, second.secure.sum_clients) == (3, 4)
    assert len(refused[0].spends()) == 1


@pytest.mark.parametrize(("told", "withheld"), [(None, True), ("withheld", True), ("plain", False)])
def test_accuracies_stay_with_the_sites_unless_the_spec_says_otherwise(
    told: str | None, withheld: bool, backbone: Backbone, features: FeatureCache
) -> None:
    referee = Site("referee", DATA.format(0).replace("painting", "neon"), role="evaluator")
    wanted = spec(rounds=1, secure_aggregation={}, privacy={"evaluation": told} if told else {})
    result = simulate(wanted, [*SITES, referee], backbone=backbone, features=features)
    clients = result.reports[1]["evaluation"]["clients"]
    assert {name: one["withheld"] for name, one in clients.items()} == {
        **dict.fromkeys((site.name for site in SITES), withheld),
        "referee": False,
    }, "an evaluator's own test set is its owner's"
    assert all((one["splits"] == {}) is one["withheld"] for one in clients.values())
    assert all(one["metrics"] == {} and one["zero_shot"] == {} for one in clients.values() if one["withheld"])
    assert result.reports[1]["phases"][0]["metrics"] == {}


PROTECTED = {"level": "sample", "clip": 0.3, "noise_multiplier": 4.0}


def under_noise(
    monkeypatch: pytest.MonkeyPatch, own: Callable[[Any, dict[str, Tensor]], dict[str, Tensor]], *given: Any
) -> Any:
    """One round of protected training, where ``own`` of context and payload is what site-0 trains."""
    train = PromptFL.train

    def patched(self: PromptFL, context: Any, payload: Any, private: Any) -> TrainResult:
        if context.client == "site-0":
            own(context, payload)
        return train(self, context, payload, private)

    monkeypatch.setattr(PromptFL, "train", patched)
    wanted = spec(rounds=1, privacy=PROTECTED, participation={"min_clients": 4, "quorum": 0.75}, secure_aggregation={})
    return simulate(wanted, SITES, backbone=given[0], features=given[1])


def _raise(error: Exception) -> Any:
    raise error


UNREADABLE = DataError("image 17 cannot be read")


DIVERGED = MethodError("the tensor 'context' does not converge")


WRONG = ValueError("record 17 has label 3")


@pytest.mark.parametrize(("when", "error"), [
    ("images", UNREADABLE), ("preparing", DIVERGED), ("training", DIVERGED), ("training", WRONG),
    ("keeping", MemoryError("too many images of class 3")),
])  # fmt: skip
def test_under_protection_the_coordinator_is_not_told_why_training_failed(
    when: str, error: Exception, backbone: Backbone, features: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing: list[int] = []

    def fail_once(self: Any, *given: Any) -> Any:
        evaluates = {"images": lambda: given[2].split()[1] == "0", "preparing": lambda: given[1].round == 0}
        if not failing and not evaluates.get(when, bool)():  # round 0 is only evaluated
            failing.append(1)
            raise error
        return original(self, *given)

    where = {
        "images": (TaskWork, "_train_split"),
        "preparing": (TaskWork, "_prepared"),
        "keeping": (SecureWork, "keep"),
    }.get(when)
    if where is not None:
        original = getattr(*where)
        monkeypatch.setattr(*where, fail_once)

    def own(context: Any, payload: dict[str, Tensor]) -> dict[str, Tensor]:
        return _raise(error) if when == "training" else dict(payload)

    phase = under_noise(monkeypatch, own, backbone, features).round_reports[1].phases[0]
    assert [(one.type, one.detail) for one in phase.failed] == [
        ("training-failed", "protected training failed; this client's own log says why")
    ]


@pytest.mark.parametrize("error", [DIVERGED, WRONG])
def test_under_protection_the_coordinator_is_not_told_why_evaluation_failed(
    error: Exception, backbone: Backbone, features: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TaskWork, "_serve", lambda *given: _raise(error))
    said = "evaluation-failed: protected evaluation failed; this client's own log says why$"
    with pytest.raises(CommandError, match=said):
        under_noise(monkeypatch, lambda context, payload: dict(payload), backbone, features)


# What leaves sites with a disclosure floor, in whole federations.


SPEC = {
    "name": "floor", "method": {"name": "promptfl", "m": 2}, "class_names": list(SHAPES), "rounds": 2,
    "participation": {"min_clients": 2},
}  # fmt: skip


def federation(folder: Path, each: dict[str, int], floor: int, **more: Any) -> Any:
    sites = [
        Site(name, f"folder:{write_folder(folder / name, seed=9 * number, each=count)}", floor=floor)
        for number, (name, count) in enumerate(each.items())
    ]
    return simulate(SPEC | more, sites, backbone=exports.backbone())


def test_sites_with_a_floor_tell_ranges(tmp_path: Path) -> None:
    each = {"large": 29, "small": 12}  # of each class, a fifth to test on
    exact, floored = (federation(tmp_path / str(floor), each, floor) for floor in (1, FLOOR))
    assert [client.num_samples for client in exact.clients] == [92, 40]
    assert [client.num_samples for client in floored.clients] == [90, 40]
    for ours, theirs in zip(floored.reports, exact.reports, strict=True):
        told, known = (report["evaluation"]["clients"] for report in (ours, theirs))
        assert told["small"]["splits"] == told["small"]["zero_shot"] == {}
        assert set(told["large"]["splits"]) == {"test"}
        for name in ("splits", "zero_shot"):
            mine, own = told["large"][name]["test"], known["large"][name]["test"]
            assert mine["num_samples"] == own["num_samples"] - 4 == 20
            assert abs(mine["accuracy"] - own["accuracy"]) < 0.25
            assert "macro_f1" not in mine
            assert ("macro_f1" in own) is (name == "splits")
    assert [told.num_samples for told in floored.accuracies()] == [20] * 3


def test_fractions_of_training_images_stay_at_a_site_with_a_floor(tmp_path: Path) -> None:
    for floor in (1, FLOOR):
        method = {"name": "diprompt", "m": 2, "candidates": ["a photo of a {}.", "a drawing of a {}."]}
        run = federation(tmp_path / str(floor), {"a": 8, "b": 8}, floor, rounds=1, method=method)
        told = run.reports[-1]["phases"][0]["updates"][0]["metrics"]
        assert "loss" in told
        assert ("domain_share_0" in told) is (floor == 1)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_hundred_federations_tell_no_small_count(tmp_path: Path, part: int) -> None:
    """An attacker with everything that sites sent narrows no count below the floor."""
    tried = 0
    for seed in range(10 * part, 10 * part + 10):
        draws = np.random.default_rng(seed)
        each = {name: int(draws.integers(9, 40)) for name in ("a", "b")}
        classes = int(draws.integers(2, len(SHAPES) + 1))
        folder = tmp_path / str(seed)
        names = list(SHAPES[:classes])
        data = {
            name: f"folder:{write_folder(folder / name, dict.fromkeys(names, count), seed=seed)}"
            for name, count in each.items()
        }
        spec = SPEC | {"class_names": names, "seed": seed}
        exact, told = (
            simulate(spec, [Site(name, uri, floor=floor) for name, uri in data.items()], backbone=exports.backbone())
            for floor in (1, FLOOR)
        )
        for ours, theirs in zip(told.reports, exact.reports, strict=True):
            tried += _attack_accuracies(ours["evaluation"]["clients"], theirs["evaluation"]["clients"])
    assert tried > 0, "some answers were few"


def _attack_accuracies(told: dict[str, Any], exact: dict[str, Any]) -> int:
    """How many answers were few, and could be any number below the floor for each number of images."""
    tried = 0
    for name, client in told.items():
        for kind in ("splits", "zero_shot"):
            assert set(client[kind]) <= set(exact[name][kind])
            for split, result in client[kind].items():
                own = exact[name][kind][split]
                count = own["num_samples"]
                right = round(own["accuracy"] * count)
                few = {"right": right, "wrong": count - right}
                possible = [
                    k for k in range(count + 1) if _answer(k, count) == (result["accuracy"], result["num_samples"])
                ]
                for what, number in few.items():
                    if number < FLOOR:
                        tried += 1
                        could = {k if what == "right" else count - k for k in possible}
                        assert could >= set(range(FLOOR))
    return tried


def _answer(right: int, count: int) -> tuple[float, int] | None:
    told = coded_accuracy(right, count, FLOOR)
    return None if told is None else (told, lowest(count, FLOOR))


# The best round on held-out training images becomes the result, and the test images are used once.


ROUNDS = 3


TRAINING = {"learning_rate": 0.2, "epochs": 2, "batch_size": 4}  # so fast that the best round is not the last one


METHOD = {"name": "fedpgp", "m": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    return {name: f"folder:{write_folder(folder / name, seed=seed, each=8)}" for seed, name in enumerate(("a", "b"))}


def run(method: dict[str, Any], data: dict[str, str], **more: Any) -> promptfed.Result:
    options = {"rounds": ROUNDS, "class_names": list(SHAPES), "training": TRAINING, "selection": {"share": 0.25}}
    return promptfed.run(method, data, backbone=exports.backbone(), **(options | more))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "selected"


@pytest.fixture(scope="module")
def selected(data: dict[str, str], folder: Path) -> promptfed.Result:
    return run(METHOD, data, folder=folder)


def test_the_result_is_the_best_rounds(selected: promptfed.Result, tmp_path: Path) -> None:
    result = selected.taken
    view = result.federation.selection
    assert view is not None
    assert (view.metric, view.split, view.share, view.compared) == ("accuracy", "validation", 0.25, ROUNDS + 1)
    assert result.round == view.round
    by_round = {
        report["round"]: [client["splits"] for client in report["evaluation"]["clients"].values()]
        for report in result.reports
    }
    for round, splits in by_round.items():
        mean = fmean(split["validation"]["accuracy"] for split in splits)
        assert mean <= view.value + 1e-12
        assert (mean == pytest.approx(view.value)) or round != view.round
        # Test images are looked at once: with the state of the chosen round.
        assert all(set(split) == {"validation", *(["test"] if round == view.round else [])} for split in splits)
    selected.export(tmp_path / "export")
    card = json.loads((tmp_path / "export" / "card.json").read_text())
    assert card["round"] == view.round
    assert card["selection"]["value"] == view.value
    assert "the best of 4 by a mean accuracy" in (tmp_path / "export" / "card.md").read_text()
    assert card["accuracy"]["mean"]["trainer"]["adapted"] > 0


def test_held_out_images_are_those_of_the_shared_function(selected: promptfed.Result, data: dict[str, str]) -> None:
    source = open_source(data["a"])
    apart = held_out(source, 0.25, selected.taken.spec["seed"])
    [evaluation] = [
        client
        for report in selected.taken.reports[:1]
        for name, client in report["evaluation"]["clients"].items()
        if name == "a"
    ]
    assert evaluation["splits"]["validation"]["num_samples"] == len(apart.test)
    assert [client.num_samples for client in selected.taken.clients] == [len(apart.train)] * 2


def test_personalised_clients_end_with_the_private_state_of_the_chosen_round(
    selected: promptfed.Result, folder: Path, data: dict[str, str], tmp_path: Path
) -> None:
    view = selected.taken.federation.selection
    assert view is not None
    assert 0 < view.round < ROUNDS
    # The same federation without selection, which ends with that round and trains on the same images.
    seed = selected.taken.spec["seed"]
    apart = {name: held_out(open_source(uri), 0.25, seed) for name, uri in data.items()}
    run(METHOD, apart, folder=tmp_path / "short", rounds=view.round, selection=None)
    run(METHOD, apart, folder=tmp_path / "long", selection=None)
    for name in data:
        chosen, short, longer = (
            decode((place / f"client-{name}" / "committed.safetensors").read_bytes())[0]
            for place in (folder, tmp_path / "short", tmp_path / "long")
        )
        assert chosen.keys() == short.keys() != set()
        assert all(bool((chosen[key] == short[key]).all()) for key in chosen)
        assert any(bool((chosen[key] != longer[key]).any()) for key in chosen)
        assert [path.name for path in (folder / f"client-{name}").glob("round-*")] == [
            f"round-{view.round}.safetensors"
        ]


def test_a_selection_under_protection_is_refused_with_a_reason(data: dict[str, str]) -> None:
    for more, text in (
        ({"privacy": {"level": "sample", "clip": 1.0, "noise_multiplier": 1.0}}, "protection withholds"),
        ({"secure_aggregation": {}}, "protection withholds"),
        ({"retention": "last_round"}, "give retention all"),
    ):
        with pytest.raises(CommandError, match=text):
            run({"name": "promptfl", "m": 2}, data, **more)
