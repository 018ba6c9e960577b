"""Each method with each family of backbones: those that are said to run do, in a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.backbones import methods_for
from promptfed.runtime.services import Site
from promptfed.shared.clip import Backbone
from promptfed.shared.data import open_source
from promptfed.shared.methods import METHODS
from tests.support.families import MODELS, small_family

FEW = ("ViT-B-16-SigLIP", "EVA02-B-16")  # of the second tier
DATA = "symbols:{}?topic=faces&per_class=2&test_per_class=1"


def assert_runs(name: str, backbone: Backbone) -> None:
    """One round of two clients, and the evaluation."""
    options: dict[str, Any] = {"m": 5} if "m" in METHODS[name].Hyper.model_fields else {}
    spec = {
        "name": "family",
        "method": {"name": name} | options,
        "rounds": 1,
        "backbone": {"model": backbone.model_name, "pretrained": "random"},
        "class_names": list(open_source(DATA.format("neon")).class_names),
        "training": {"batch_size": 8},
        "participation": {"min_clients": 2},
    }
    result = simulate(spec, [Site("a", DATA.format("neon")), Site("b", DATA.format("sketch"))], backbone=backbone)
    assert result.round == 1


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=pytest.mark.extended if model in FEW else pytest.mark.slow) for model in MODELS]
)
def test_methods_that_are_said_to_run_do(model: str, tmp_path: Path) -> None:
    backbone = small_family(model, tmp_path)
    able, refused = methods_for(backbone)
    assert set(able) | set(refused) == set(METHODS)
    failed = {}
    for name in able:
        try:
            assert_runs(name, backbone)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    assert not failed
