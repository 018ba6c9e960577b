"""FLAME: who is accepted, how far, and noise that nobody outside can compute."""

from __future__ import annotations

import json
from itertools import permutations
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from promptfed.coordinator.aggregation import flame
from promptfed.coordinator.aggregation.rules import Rule
from promptfed.shared.methods import resolve_spec
from promptfed.shared.methods.core.interface.base import ClientUpdate
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.spec.spec_aggregation import AggregationSpec
from promptfed.testing.clients import spec, trained, update_body
from tests.support.coordinators import InThread, in_thread

SEED = flame.seed_of("ab" * 32, 1, "train")


def rule_of(base: Tensor, seed: bytes | None = SEED, **given: Any) -> Rule:
    return Rule(AggregationSpec.model_validate({"rule": "flame"} | given), {"context": base}, seed)


def updates_of(rows: Tensor, names: list[str] | None = None) -> list[ClientUpdate]:
    names = names or [f"c{number}" for number in range(len(rows))]
    return [ClientUpdate(name, 1 / len(rows), {"context": row}) for name, row in zip(names, rows, strict=True)]


def literal(base: Tensor, rows: Tensor, of: str) -> tuple[Tensor, set[int]]:
    """B1 to B4 with loops: every threshold is tried, and components are found by walking."""
    changes = [row.double() - base.double() for row in rows]
    vectors = [row.double() for row in rows] if of == "models" else changes
    count = len(rows)

    def distance(i: int, j: int) -> float:
        lengths = float(vectors[i].norm() * vectors[j].norm())
        return 1 - float(vectors[i] @ vectors[j]) / lengths if lengths else 1.0

    chosen: set[int] = set()
    for limit in sorted({distance(i, j) for i in range(count) for j in range(i)}):
        for start in range(count):
            reached = {start}
            while more := {j for i in reached for j in range(count) if i != j and distance(i, j) <= limit} - reached:
                reached |= more
            if len(reached) >= count // 2 + 1:
                chosen = reached
        if chosen:
            break
    lengths = sorted(float(change.norm()) for change in changes)
    middle = (lengths[(count - 1) // 2] + lengths[count // 2]) / 2
    clipped = [changes[i] * min(1.0, middle / float(changes[i].norm())) for i in sorted(chosen)]
    return base.double() + torch.stack(clipped).mean(0), chosen


@pytest.mark.parametrize("of", ["models", "updates"])
@pytest.mark.parametrize("count", [3, 4, 5, 8, 11])
def test_it_is_the_algorithm_written_out(count: int, of: str) -> None:
    draws = torch.Generator().manual_seed(count)
    base = torch.randn(6, generator=draws)
    rows = base + torch.randn(count, 6, generator=draws) * torch.rand(count, 1, generator=draws)
    rule = rule_of(base, flame_noise=0.0, flame_of=of)
    found = rule(updates_of(rows))["context"]
    wanted, chosen = literal(base, rows, of)
    assert torch.allclose(found.double(), wanted, atol=1e-6)
    assert {name for name, one in rule.judged.items() if one.verdict != "rejected"} == {f"c{i}" for i in chosen}
    shares = {one.verdict == "rejected": one.influence for one in rule.judged.values()}
    assert shares == {True: 0.0, False: pytest.approx(1 / len(chosen))} or len(chosen) == count


def test_the_cluster_is_hdbscans() -> None:
    cluster = pytest.importorskip("sklearn.cluster")
    draws = torch.Generator().manual_seed(0)
    for count in [*range(3, 25)] * 3:
        rows = torch.randn(count, 5, generator=draws, dtype=torch.float64)
        rows[: count // 3] += 2
        distances = torch.cdist(rows, rows)
        distances = (distances + distances.T) / 2
        found = cluster.HDBSCAN(
            min_cluster_size=count // 2 + 1, min_samples=1, allow_single_cluster=True, metric="precomputed", copy=True
        ).fit(distances.numpy())
        accepted = {i for i, label in enumerate(found.labels_) if label == 0}
        assert set(flame.accepted(distances)) == accepted


def test_equal_updates_are_what_comes_out() -> None:
    base, update = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.0])
    rule = rule_of(base, flame_noise=0.0)
    assert rule(updates_of(update.repeat(5, 1)))["context"].equal(update)
    assert {one.verdict for one in rule.judged.values()} == {"counted"}


def test_of_four_alike_and_one_reversed_that_one_is_rejected() -> None:
    step = torch.randn(20, generator=torch.Generator().manual_seed(1))
    rows = step.repeat(5, 1)
    rows[2] = -step
    rule = rule_of(torch.zeros(20), flame_noise=0.0)
    rule(updates_of(rows))
    assert [one.verdict == "rejected" for one in rule.judged.values()] == [False, False, True, False, False]
    rows = rows + 0.1 * torch.randn(5, 20, generator=torch.Generator().manual_seed(2))
    rule = rule_of(torch.zeros(20), flame_noise=0.0)
    rule(updates_of(rows))
    assert rule.judged["c2"].verdict == "rejected"


def test_names_do_not_change_who_is_accepted() -> None:
    draws = torch.Generator().manual_seed(2)
    rows = torch.randn(5, 4, generator=draws)
    sets = set()
    for order in permutations(range(5)):
        rule = rule_of(torch.zeros(4), flame_noise=0.0)
        rule(updates_of(rows[list(order)]))
        kept = zip(order, rule.judged.values(), strict=True)
        sets.add(frozenset(row for row, one in kept if one.verdict != "rejected"))
    assert len(sets) == 1


def test_equal_distances_join_together_and_zero_has_no_direction() -> None:
    assert flame.accepted(torch.ones(5, 5)) == [0, 1, 2, 3, 4], "not the first three of them"
    rows = torch.tensor([[1.0, 0], [1, 0.1], [1, 0.2], [0, 0], [-1, 0]])
    rule = rule_of(torch.zeros(2), flame_noise=0.0)
    rule(updates_of(rows))
    assert [one.verdict for one in rule.judged.values()].count("rejected") == 2


def test_nobody_is_longer_than_the_median_of_all() -> None:
    """Of all, not of the accepted: three short ones far off pull it down."""
    rows = torch.tensor([[4.0, 0], [4, 0.1], [4, 0.2], [0, -1], [-1, 0]])
    rule = rule_of(torch.zeros(2), flame_noise=0.0)
    found = rule(updates_of(rows))["context"]
    assert float(found.norm()) == pytest.approx(4.0, rel=1e-3)
    rows = torch.tensor([[4.0, 0], [4, 0.1], [1, 0], [0, -1], [-1, 0]])
    rule = rule_of(torch.zeros(2), flame_noise=0.0)
    found = rule(updates_of(rows))["context"]
    assert float(found.norm()) == pytest.approx(1.0, rel=1e-3)
    assert [one.verdict for one in rule.judged.values()] == ["clipped", "clipped", "counted", "rejected", "rejected"]


def test_noise_is_normal_repeats_and_follows_from_the_key_alone() -> None:
    noise = flame.noise(SEED, 600_001)
    assert (noise.shape, noise.dtype) == ((600_001,), np.float64)
    assert abs(float(noise.mean())) < 5 / sqrt(len(noise))
    assert abs(float((noise**2).mean()) - 1) < 5 * sqrt(2 / len(noise))
    assert abs(float((abs(noise) > 1.959964).mean()) - 0.05) < 5 * sqrt(0.05 / len(noise))
    assert abs(float((noise[1:] * noise[:-1]).mean())) < 5 / sqrt(len(noise))
    assert np.array_equal(flame.noise(SEED, 600_001), noise)
    for other in (("cd" * 32, 1, "train"), ("ab" * 32, 2, "train"), ("ab" * 32, 1, "other")):
        assert not np.array_equal(flame.noise(flame.seed_of(*other), 100), noise[:100])


def test_noise_is_as_long_as_told() -> None:
    base, rows = torch.zeros(10_000), torch.ones(3, 10_000)
    rule = rule_of(base, flame_noise=0.01)
    found = rule(updates_of(rows))["context"]
    bound, length = rule.measured["flame_bound"], rule.measured["flame_noise"]
    assert bound == pytest.approx(100)
    assert length == pytest.approx(0.01 * 100 * 100, rel=0.05), "λ·√D·S"
    assert float((found - 1).norm()) == pytest.approx(length, rel=1e-4)
    with pytest.raises(ValueError, match="has no seed"):
        rule_of(base, seed=None)(updates_of(rows))


@pytest.mark.parametrize(
    ("aggregation", "says"),
    [
        ({"rule": "median", "flame_noise": 0.1}, "flame_noise is of the rule flame"),
        ({"flame_of": "models"}, "flame_of is of the rule flame"),
        ({"rule": "flame", "weighting": "samples"}, "weighs all whom it accepts alike"),
        ({"rule": "flame", "clip_norm": 1.0}, "leave clip_norm out"),
        ({"rule": "flame", "tolerate": 0.1}, "takes none"),
    ],
)
def test_what_it_takes(aggregation: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        resolve_spec(spec() | {"participation": {"min_clients": 5}, "aggregation": aggregation})


def test_two_updates_have_no_majority() -> None:
    raw = spec() | {"aggregation": {"rule": "flame"}}
    with pytest.raises(SpecError, match="flame needs at least 3 updates, and a phase may close with 2"):
        resolve_spec(raw | {"participation": {"min_clients": 2}})
    assert resolve_spec(raw | {"participation": {"min_clients": 3}}).aggregation.weighting == "uniform"


def federation_of_five(coordinator: InThread, name: str, **aggregation: Any) -> str:
    given = {"rule": "flame"} | aggregation
    federation = coordinator.create(name=name, rounds=1, aggregation=given, participation={"min_clients": 5})
    clients = coordinator.enrol(federation, *(f"{name}-{letter}" for letter in "abcde"))
    coordinator.post(f"{federation}/start")
    for client, task in zip(clients, coordinator.training(clients), strict=True):
        good = trained(client.payload(task), client.name[-1], task)
        assert client.send(task, update_body(good, task)).status_code == 201
    for client in clients:
        assert client.evaluate(coordinator.task(client)).status_code == 201
    coordinator.until(federation, state="finished")
    return federation


def test_a_round_tells_its_noise_and_is_computed_again_after_a_restart(tmp_path: Path) -> None:
    with in_thread(tmp_path / "data") as coordinator:
        federation = federation_of_five(coordinator, "first")
        [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
        measured = phase["measured"]["phase"]
        assert 0 < measured["flame_noise"] < measured["flame_bound"]
        texts = json.dumps([coordinator.get(federation), phase])
        assert "noise_key" not in texts
    with in_thread(tmp_path / "data") as coordinator:
        for round in (0, 1):
            answer = coordinator.post(f"{federation}/rounds/{round}/replay", {})
            assert [one["same"] for one in answer["states"]] == [True]


def test_noise_longer_than_the_updates_has_to_be_asked_for(coordinator: InThread) -> None:
    given = {"rule": "flame"}
    method = {"name": "fedtpg", "m": 4}
    big = {"d_t": 1024, "d_e": 1024, "text_layers": 1, "context_length": 77}
    for name, noise, status in (("one", None, 409), ("two", 1e-5, 200)):
        aggregation = given | ({} if noise is None else {"flame_noise": noise})
        federation = coordinator.create(
            name=name,
            method=method,
            backbone={"shape": big},
            aggregation=aggregation,
            participation={"min_clients": 3},
        )
        coordinator.enrol(federation, *(f"{name}-{letter}" for letter in "abc"), backbone_shape=big)
        answer = coordinator.post(f"{federation}/start", status=status)
        if status == 409:
            assert "times as long as a typical update: give aggregation.flame_noise" in answer["detail"]
