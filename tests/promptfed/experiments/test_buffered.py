"""Asynchronous rounds of real clients: with a buffer of all of them, the states and accuracies of plain rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.experiments.simulation.simulation import SimulationOptions, simulate
from promptfed.runtime.services import Site
from promptfed.runtime.speeds import Clock
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone, tiny

DATA = "symbols:{}?topic=weather&per_class=4&test_per_class=2&partition=iid&clients=2&client={}"
SITES = [Site("north", DATA.format("painting", 0)), Site("south", DATA.format("painting", 1))]
SITES += [Site("east", DATA.format("neon", 0)), Site("west", DATA.format("neon", 1))]
PRIVATE = {"level": "sample", "clip": 1.0, "noise_multiplier": 2.0}

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.set_num_threads(1)
    return load_backbone(tiny.MODEL, tiny.PRETRAINED)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return FeatureCache(tmp_path_factory.mktemp("features"))


def run(
    folder: Path, backbone: Backbone, features: FeatureCache, method: str, clock: Clock | None = None, **changes: Any
) -> FederationResult:
    spec = {
        "name": "rounds",
        "method": {"name": method},
        "rounds": 2,
        "training": {"learning_rate": 0.02, "batch_size": 4},
        "evaluation": {"every": 2},
        "seed": 5,
        **changes,
    }
    options = SimulationOptions(clock=clock)
    return simulate(spec, SITES, folder=folder, backbone=backbone, features=features, options=options)


@pytest.mark.parametrize(
    ("method", "changes"),
    [("promptfl", {}), ("fedpgp", {}), ("fedclip", {}), ("fedlora", {}), ("promptfl", {"privacy": PRIVATE})],
)
def test_a_buffer_of_all_clients_is_a_plain_round(
    method: str, changes: dict[str, Any], backbone: Backbone, features: FeatureCache, tmp_path: Path
) -> None:
    plain = run(tmp_path / "plain", backbone, features, method, **changes)
    schedule = {"kind": "buffered", "buffer": len(SITES)}
    buffered = run(tmp_path / "buffered", backbone, features, method, schedule=schedule, **changes)
    assert buffered.state_hash == plain.state_hash
    last = [result.reports[-1]["evaluation"]["clients"] for result in (plain, buffered)]
    told = [{name: one["splits"] for name, one in clients.items()} for clients in last]
    assert told[0] == told[1]


def test_a_smaller_buffer_uses_every_client(backbone: Backbone, features: FeatureCache, tmp_path: Path) -> None:
    schedule = {"kind": "buffered", "buffer": 2}
    changes: dict[str, Any] = {"rounds": 6, "evaluation": {"every": 6}, "schedule": schedule}
    result = run(tmp_path / "run", backbone, features, "fedpgp", Clock(speeds="lognormal", slowest=2), **changes)
    counted = [[one["client"] for one in report["phases"][0]["counted"]] for report in result.reports[1:]]
    assert [len(names) for names in counted] == [2] * 6
    assert {name for names in counted for name in names} == {site.name for site in SITES}
