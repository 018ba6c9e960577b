"""A federation whose updates nobody sees: in one process, to the same state as in the clear."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from promptfed.experiments.simulation import simulate
from promptfed.runtime.services import Site
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone, tiny

DATA = "symbols:painting?topic=weather&per_class=4&test_per_class=2&partition=iid&clients=4&client={}"
SITES = [Site(f"site-{k}", DATA.format(k)) for k in range(4)]


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.set_num_threads(1)
    return load_backbone(tiny.MODEL, tiny.PRETRAINED)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return FeatureCache(tmp_path_factory.mktemp("features"))


def spec(method: str = "promptfl", **changes: Any) -> dict[str, Any]:
    return {
        "name": "summed",
        "method": {"name": method, "m": 4},
        "rounds": 2,
        "training": {"learning_rate": 0.02, "batch_size": 4},
        "participation": {"min_clients": 4},
        "seed": 3,
    } | changes


@pytest.mark.parametrize("method", ["promptfl", "fedpgp"])
def test_the_state_is_that_of_the_mean_in_the_clear(method: str, backbone: Backbone, features: FeatureCache) -> None:
    def run(**changes: Any) -> Any:
        return simulate(spec(method, **changes), SITES, backbone=backbone, features=features)

    clear, summed = run(), run(secure_aggregation={"threshold": 0.7})
    assert summed.federation.state == "finished"
    for name, tensor in clear.state.items():
        assert (summed.state[name] - tensor).abs().max() < 1e-6, name
    assert run(secure_aggregation={"threshold": 0.7}).state_hash == summed.state_hash, "masks cancel"
