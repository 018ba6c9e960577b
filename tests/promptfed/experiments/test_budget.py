"""A budget of seconds in virtual time: steps by speed, the same bits for a seed, and what depends on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.experiments.simulation.simulation import SimulationOptions, simulate
from promptfed.runtime.services import Site
from promptfed.runtime.speeds import Clock
from promptfed.sdk.errors import CommandError
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone, tiny

DATA = "symbols:painting?topic=weather&per_class=4&test_per_class=1&partition=iid&clients=3&client={}"
SITES = [Site(name, DATA.format(number)) for number, name in enumerate("abc")]
SECONDS = {"a": 1.0, "b": 2.5, "c": 30.0}

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.set_num_threads(1)
    return load_backbone(tiny.MODEL, tiny.PRETRAINED)


def run(folder: Path, backbone: Backbone, clock: bool = True, **training: Any) -> FederationResult:
    spec = {
        "name": "budget",
        "method": {"name": "promptfl", "m": 2},
        "rounds": 3,
        "training": {"learning_rate": 0.02, "batch_size": 2, **training},
        "seed": 5,
    }
    folder.mkdir()
    trace = folder / "trace.csv"
    trace.write_text("client,seconds\n" + "".join(f"{name},{seconds}\n" for name, seconds in SECONDS.items()))
    options = SimulationOptions(clock=Clock(speeds=f"trace:{trace}") if clock else None)
    features = FeatureCache(folder / "features")
    return simulate(spec, SITES, backbone=backbone, features=features, options=options, pool=2)


def test_each_client_takes_the_steps_that_fit_into_its_seconds(tmp_path: Path, backbone: Backbone) -> None:
    one, two = (run(tmp_path / name, backbone, budget={"seconds": 10.0}) for name in ("one", "two"))
    assert one.state_hash == two.state_hash
    for report in one.reports[1:]:
        assert {each["client"]: each["steps"] for each in report["phases"][0]["updates"]} == {"a": 10, "b": 4, "c": 1}


def test_seconds_without_a_clock_are_refused(tmp_path: Path, backbone: Backbone) -> None:
    with pytest.raises(CommandError, match=r"training\.budget\.seconds: how many steps fit depends on this machine"):
        run(tmp_path / "run", backbone, clock=False, budget={"seconds": 10.0})
