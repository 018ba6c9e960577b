"""Trials before round 1 with real clients: what is chosen, what it costs, and clients that are started again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.client_service.exits import Exit
from promptfed.client_service.http.sent_log import read_sent
from promptfed.client_service.joining.parts import Parts
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.settings import make_settings
from promptfed.client_service.worker import Worker
from promptfed.coordinator.operations import tuning
from promptfed.experiments.cluster.run import OnRay, simulate_on_ray
from promptfed.experiments.simulation import workers
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.services import Site
from promptfed.sdk.errors import CommandError
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone, tiny
from promptfed.shared.data import open_source
from promptfed.testing.coordinator import local_coordinator
from tests.support.coordinators import InThread, in_thread
from tests.support.waiting import PATIENCE

DATA = "symbols:neon?topic=weather&per_class=8&test_per_class=2&partition=iid&clients=2&client={}"
SITES = [Site(f"site-{k}", DATA.format(k)) for k in range(2)]
PRIVACY = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0, "evaluation": "noisy", "evaluation_epsilon": 5.0}


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.set_num_threads(1)
    return load_backbone(tiny.MODEL, tiny.PRETRAINED)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return FeatureCache(tmp_path_factory.mktemp("features"))


def spec(**changes: Any) -> dict[str, Any]:
    """Two rates: with the spec's own nothing moves."""
    candidate = {"method": {"name": "fedtaskres"}, "training": {"learning_rate": 0.1}}
    return {
        "name": "tuned",
        "method": {"name": "fedtaskres"},
        "class_names": list(open_source(DATA.format(0)).class_names),
        "rounds": 1,
        "training": {"learning_rate": 1e-9, "batch_size": 4, "epochs": 2},
        "participation": {"min_clients": 2},
        "tuning": {"candidates": [candidate], "rounds": 2, "held_out": 0.25},
        "seed": 3,
    } | changes


def test_trials_without_accuracies_say_why_there_is_no_federation(backbone: Backbone, features: FeatureCache) -> None:
    """Under a floor of 10, a quarter of few images tells nothing."""
    sites = [Site(site.name, site.data, floor=10) for site in SITES]
    with pytest.raises(CommandError, match="no candidate could be compared: no accuracy was sent"):
        simulate(spec(), sites, backbone=backbone, features=features)


@pytest.mark.parametrize("pool", [1, 2])
def test_the_candidate_that_learns_is_chosen(
    backbone: Backbone, features: FeatureCache, tmp_path: Path, pool: int
) -> None:
    found = simulate(spec(), SITES, folder=tmp_path, backbone=backbone, features=features, pool=pool)
    assert (found.federation.state, found.federation.spec.tuning.chosen) == ("finished", 1)
    assert found.federation.spec.training.learning_rate == 0.1
    still, learned = found.federation.trials
    assert learned.accuracy > still.accuracy
    images = {name: len(open_source(DATA.format(k)).train) for k, name in enumerate(("site-0", "site-1"))}
    tests = {name: len(open_source(DATA.format(k)).test) for k, name in enumerate(("site-0", "site-1"))}
    with local_coordinator(tmp_path / "coordinator") as coordinator:
        for trial in (still, learned):
            clients = coordinator.get(f"{trial.federation}/clients")["clients"]
            last = coordinator.get(f"{trial.federation}/rounds/2")["evaluation"]["clients"]
            for client in clients:
                held = last[client["name"]]["splits"]["test"]["num_samples"]
                assert held + client["num_samples"] == images[client["name"]], "all are training images"
        own = found.reports[-1]["evaluation"]["clients"]
        assert {name: own[name]["splits"]["test"]["num_samples"] for name in own} == tests


def test_the_result_is_that_of_the_chosen_method_alone(
    backbone: Backbone, features: FeatureCache, tmp_path: Path
) -> None:
    tuned = simulate(spec(), SITES, folder=tmp_path / "tuned", backbone=backbone, features=features)
    alone = spec(training={"learning_rate": 0.1, "batch_size": 4, "epochs": 2})
    del alone["tuning"]
    assert simulate(alone, SITES, backbone=backbone, features=features).state_hash == tuned.state_hash


@pytest.mark.parametrize("change", [{"rounds": 50}, {"held_out": 0.1}, {"seed": 4}, {"method": {"name": "fedclip"}}])
def test_a_trial_that_nobody_agreed_to_is_declined(
    backbone: Backbone, features: FeatureCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    made = tuning.trial_of
    monkeypatch.setattr(tuning, "trial_of", lambda *about: made(*about) | change)
    with pytest.raises(CommandError, match="not joined"):
        simulate(spec(), SITES, folder=tmp_path, backbone=backbone, features=features)


@pytest.fixture
def ledgers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Ledger]:
    """The ledger of each simulated client, in a file."""
    made: list[Ledger] = []

    def in_a_file(path: None) -> Ledger:
        made.append(Ledger(tmp_path / f"{len(made)}.jsonl"))
        return made[-1]

    monkeypatch.setattr(workers, "Ledger", in_a_file)
    return made


def test_each_trial_is_charged_to_the_ledger(
    backbone: Backbone, features: FeatureCache, tmp_path: Path, ledgers: list[Ledger]
) -> None:
    found = simulate(
        spec(privacy=PRIVACY),
        SITES,
        folder=tmp_path / "run",
        backbone=backbone,
        features=features,
    )
    trials = [trial.federation for trial in found.federation.trials]
    for ledger in ledgers:
        spends = ledger.spends()
        trained = [spend.federation for spend in spends if spend.events[0].mechanism == "gaussian"]
        assert trained == [trials[0]] * 2 + [trials[1]] * 2 + ["tuned"]
        counted = [(spend.federation, spend.split) for spend in spends if spend.events[0].mechanism == "laplace"]
        assert counted[:4] == [(trials[0], "train")] * 2 + [(trials[1], "train")] * 2, "held-out images train later"
        assert {part for name, part in counted if name == "tuned"} == {"test"}
        assert spends[-1].epsilon == pytest.approx(ledger.epsilon(spends[-1].split))


async def play(coordinator: InThread, folder: Path, shared: dict[str, Any], stop_at: int | None) -> str:
    """The state hash of a tuned federation. The first of two clients is stopped in trial ``stop_at``, and returns."""
    raw = spec(name=f"stopped-{stop_at}", start="when_ready")
    federation = str(coordinator.post("/v1/federations", raw, status=201)["id"])
    token = coordinator.token(federation)

    policy = folder / f"{stop_at}.yaml"
    policy.write_text(f"version: 1\nallow: {{federations: [stopped-{stop_at}]}}\nmetrics: {{floor: 1}}\n")

    def worker(number: int) -> Worker:
        settings = make_settings(
            coordinator=coordinator.url,
            federation=federation,
            name=f"site-{number}",
            data=DATA.format(number),
            state_dir=folder / f"{stop_at}-{number}",
            device="cpu",
            policy=policy,
        )
        return Worker(settings, Parts(enrolment_token=token, **shared))

    def has_come() -> bool:
        trials = coordinator.get(federation).get("trials", [])
        return stop_at is not None and len(trials) > stop_at and trials[stop_at]["round"] >= 1

    first, second = worker(0), worker(1)
    running = [asyncio.create_task(first.run()), asyncio.create_task(second.run())]
    if stop_at is not None:
        end = time.monotonic() + PATIENCE
        while not await asyncio.to_thread(has_come):
            assert time.monotonic() < end
            assert not any(task.done() for task in running)
        first.stop()
        assert await running[0] is Exit.OK
        running[0] = asyncio.create_task(worker(0).run())
    assert await asyncio.gather(*running) == [Exit.OK, Exit.OK]
    view = await asyncio.to_thread(coordinator.get, federation)
    assert (view["state"], view["spec"]["tuning"]["chosen"]) == ("finished", 1)
    return str(view["state_hash"])


def test_a_client_that_is_started_again_goes_on_with_its_trial(
    backbone: Backbone, features: FeatureCache, tmp_path: Path
) -> None:
    shared = {"backbone": backbone, "features": features}
    with in_thread(tmp_path / "coordinator") as coordinator:
        hashes = {asyncio.run(play(coordinator, tmp_path, shared, stop_at)) for stop_at in (None, 0, 1)}
    assert len(hashes) == 1
    assert sorted(path.name for path in (tmp_path / "0-0" / "trials").iterdir()) == ["1-1", "1-2"]
    sent, wrong = read_sent(tmp_path / "None-0")
    assert wrong is None
    assert [line["what"] for line in sent].count("update") == 2 + 2 + 1, "one record of all trials and rounds"


def test_crews_on_a_cluster_refuse_it() -> None:
    with pytest.raises(CommandError, match="tuning: crews take part in one federation only"):
        simulate_on_ray(spec(), SITES, OnRay())
