"""Whole clients protected in a simulation: the same bits again, said to be seeded, in the result and on the card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from promptfed.experiments.simulation.simulation import simulate
from promptfed.export.model_card import _privacy
from promptfed.runtime.processes import Site
from promptfed.shared.clip import FeatureCache, load_backbone, tiny

DATA = "symbols:painting?topic=weather&per_class=4&test_per_class=2&partition=iid&clients=3&client={}"
SITES = [Site(f"site-{k}", DATA.format(k)) for k in range(3)]
SPEC = {
    "name": "simulated", "method": {"name": "promptfl", "m": 4}, "rounds": 2,
    "training": {"learning_rate": 0.02, "batch_size": 4},
    "participation": {"min_clients": 3, "fraction": 0.7, "sampling": "poisson"},
    "aggregation": {"weighting": "uniform"},
    "privacy": {"level": "client", "clip": 0.5, "noise_multiplier": 1.0, "accept_noise": True, "evaluation": "plain"},
    "evaluation": {"every": 2},
}  # fmt: skip


@pytest.mark.extended
def test_no_loss_and_no_accuracy_of_a_protected_client_leaves_it_unless_somebody_asks(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    spec = SPEC | {"rounds": 1, "participation": {"min_clients": 3}}
    spec["privacy"] = {key: value for key, value in SPEC["privacy"].items() if key != "evaluation"}
    done = simulate(spec, SITES, backbone=load_backbone(tiny.MODEL, tiny.PRETRAINED), features=FeatureCache(tmp_path))
    updates = [update for report in done.round_reports for phase in report.phases for update in phase.updates]
    assert [set(update.metrics) for update in updates] == [{"trained_parameters"}] * 3
    stages = [report.evaluation for report in done.round_reports if report.evaluation is not None]
    told = [client for stage in stages for client in stage.clients.values()]
    assert len(told) == 6
    assert all((one.splits, one.zero_shot, one.metrics, one.withheld) == ({}, {}, {}, True) for one in told)


@pytest.mark.slow
def test_a_simulation_repeats_and_says_that_its_noise_guarantees_nothing(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    backbone, features = load_backbone(tiny.MODEL, tiny.PRETRAINED), FeatureCache(tmp_path)
    one, two = (simulate(SPEC, SITES, backbone=backbone, features=features) for _ in range(2))
    assert one.state_hash == two.state_hash
    other = simulate(SPEC | {"seed": 1}, SITES, backbone=backbone, features=features)
    assert other.state_hash != one.state_hash
    found = one.privacy()
    assert found is not None
    assert (found.level, found.unit, found.noise, found.clients) == ("client", "client", "seeded", 3)
    assert found.epsilon_max == one.federation.privacy.epsilon_planned
    assert found.rounds_counted == 2
    assert one.final(), "spec and owner both say plain"
    told = _privacy(found)
    assert "at the level of one whole client of 3" in told
    assert f"ε is {found.epsilon_max:.3g} at δ = 0.01" in told
    assert "this is no guarantee to anybody" in told
    asked = [set(report["phases"][0]["asked"]) for report in one.reports[1:]]
    assert all(names <= {site.name for site in SITES} for names in asked)
