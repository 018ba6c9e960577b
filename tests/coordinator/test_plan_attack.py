"""One long update in PLAN's aggregators is refused by default."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.sdk.result import FederationResult
from promptfed.shared.methods.core.interface import TrainResult
from promptfed.shared.methods.plan import Plan

SITES = {"alice": "painting", "bob": "sketch", "carol": "neon", "mallory": "quickdraw"}
NORM = 1000.0


@pytest.fixture(autouse=True)
def mallory_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In round 1 mallory's change of the aggregators has norm 1,000, in a random direction."""
    honest = Plan._train_aggregators

    def attacked(self: Plan, context: Any, towers: Any, payload: Any) -> TrainResult:
        result = honest(self, context, towers, payload)
        if context.client == "mallory" and context.round == 1:
            generator = torch.Generator().manual_seed(0)
            step = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in result.update.items()}
            norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in step.values()))
            result.update.update({name: payload[name] + step[name] * NORM / norm for name in step})
        return result

    monkeypatch.setattr(Plan, "_train_aggregators", attacked)


def run(folder: Path, **spec: Any) -> FederationResult:
    """Three honest clients and mallory."""
    sites = [Site(name, f"symbols:{style}?topic=weather&shots=2") for name, style in SITES.items()]
    base = {"name": "attacked", "method": {"name": "plan"}, "training": {"learning_rate": 0.02}}
    return simulate({**base, "participation": {"quorum": 0.5}, **spec}, sites, folder=folder)


def test_a_change_of_norm_1000_is_refused_and_the_federation_goes_on(tmp_path: Path) -> None:
    result = run(tmp_path, rounds=2)
    assert result.status["state"] == "finished"
    phases = next(report for report in result.reports if report["round"] == 1)["phases"]
    counted = [[one["client"] for one in phase["updates"] if one["verdict"] == "counted"] for phase in phases[:2]]
    assert counted == [["alice", "bob", "carol", "mallory"], ["alice", "bob", "carol"]]
