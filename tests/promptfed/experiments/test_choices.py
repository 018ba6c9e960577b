"""The choice of clients in a simulation: the same seed gives the same bits, and consent names what is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.services import Site
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone, tiny

DATA = "symbols:{}?topic=weather&per_class=4&test_per_class=2&partition=iid&clients=2&client={}"
SITES = [
    Site(f"{style}-{part}", DATA.format(style, part)) for style in ("painting", "neon", "chalk") for part in (0, 1)
]

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.set_num_threads(1)
    return load_backbone(tiny.MODEL, tiny.PRETRAINED)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return FeatureCache(tmp_path_factory.mktemp("features"))


def run(folder: Path, backbone: Backbone, features: FeatureCache, method: str, **part: Any) -> FederationResult:
    spec = {
        "name": "choices",
        "method": {"name": method},
        "rounds": 4,
        "training": {"learning_rate": 0.02, "batch_size": 4},
        "participation": {"fraction": 0.5, "draw": "public", **part},
        "evaluation": {"every": 4},
        "seed": 5,
    }
    return simulate(spec, SITES, folder=folder, backbone=backbone, features=features)


@pytest.mark.parametrize(
    ("method", "choice"), [("promptfl", "oort"), ("fedpgp", "oort"), ("fedclip", "power_of_choice")]
)
def test_the_same_seed_gives_the_same_choices_and_bits(
    method: str, choice: str, backbone: Backbone, features: FeatureCache, tmp_path: Path
) -> None:
    one, two = (run(tmp_path / name, backbone, features, method, choice=choice) for name in ("one", "two"))
    assert one.state_hash == two.state_hash
    phases = [[report["phases"][0] for report in result.reports[1:]] for result in (one, two)]
    assert [phase["choice"] for phase in phases[0]] == [phase["choice"] for phase in phases[1]]
    for phase in phases[0]:
        assert set(phase["choice"]) == set(phase["asked"])
        for update in phase["updates"]:
            told = update["metrics"].get("squared_losses")
            assert (told is not None and told > 0) if choice == "oort" else told is None
    assert "of 6 candidates" in str(phases[0]) if choice == "power_of_choice" else "utility" in str(phases[0])
