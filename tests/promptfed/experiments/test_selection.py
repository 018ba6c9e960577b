"""The best round on held-out training images becomes the result, and the test images are used once."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import promptfed
from promptfed.client_service.training.data import held_out
from promptfed.sdk.client import CommandError
from promptfed.shared.data import open_source
from promptfed.shared.tensors.torch_tensors import decode
from tests.support import exports
from tests.support.own_images import SHAPES, write_folder

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
