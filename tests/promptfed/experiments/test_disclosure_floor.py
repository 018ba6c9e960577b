"""What leaves sites with a disclosure floor, in whole federations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from promptfed.client_service.privacy.noisy_counts import coded_accuracy, lowest
from promptfed.client_service.privacy.policy import FLOOR
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from tests.support import exports
from tests.support.own_images import SHAPES, write_folder

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
