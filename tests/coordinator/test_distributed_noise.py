"""Whole clients protected by noise of all clients together: the literal sum, what it costs, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from promptfed.client_service.privacy.secure import OwnNoise
from promptfed.shared.messages import Task
from promptfed.shared.methods import resolve_spec
from promptfed.shared.methods.core.checks.client_checks import honest_parts, partial_noise, spent
from promptfed.shared.privacy.distributed import MOST_NUMBERS, PartialNoise, epsilon_of_sums
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.secagg import encoding
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors.torch_tensors import arrays_of, tensors_of
from promptfed.testing.clients import trained
from tests.coordinator.test_secure_sums import Leap, drive, federation_of, prompts, step
from tests.support.coordinators import InThread
from tests.support.secure_clients import SecureClient

PRIVACY = {"level": "client", "noise": "distributed", "clip": 1.0, "noise_multiplier": 0.5, "delta": 1e-3}
PART = PartialNoise(1.0, 0.5, 2)  # sums are of three at least, one of whom may collude
UNIFORM = {"weighting": "uniform"}


def noise_of(name: str) -> Any:
    def noise(task: Task) -> OwnNoise:
        return OwnNoise(PART, SeededNoise(4).stream(task.round, task.phase, name), "seeded")

    return noise


def begun(coordinator: InThread) -> tuple[str, list[SecureClient]]:
    privacy = PRIVACY | {"accept_noise": True}
    federation, clients = federation_of(coordinator, *"abcde", privacy=privacy, aggregation=UNIFORM, rounds=2)
    for client in clients:
        client.noise, client.withheld = noise_of(client.name), True
    return federation, clients


def test_the_state_is_the_mean_of_clipped_changes_with_everybody_s_noise(coordinator: InThread, leap: Leap) -> None:
    federation, clients = begun(coordinator)
    drive(coordinator, clients, leap, {"mask": ("b",)})
    before, names = prompts(coordinator, federation, 0), list("acde")
    total: Any = 0
    for name in names:
        change = encoding.flat_change(
            arrays_of(trained(before, name, {"round": 1, "phase": "train"})), arrays_of(before)
        )
        change = change * min(1.0, (1 - 1e-9) / np.linalg.norm(change))
        stream = SeededNoise(4).stream(1, "train", name)
        drawn = np.array([stream.discrete_gaussian(PART.variance) for _ in change], dtype=np.int64)
        total = total + np.rint(change * 2**32).astype(np.int64) + drawn
    mean = total.astype(np.float64) / (2**32 * len(names))
    shapes = {name: tuple(tensor.shape) for name, tensor in before.items()}
    wanted = tensors_of(encoding.as_tensors(mean, arrays_of(before), shapes))
    found = prompts(coordinator, federation, 1)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), "bit for bit"
    told = coordinator.get(f"{federation}/rounds/2")["phases"][0]["privacy"]
    assert told["epsilon"] == epsilon_of_sums(PART.rho(MOST_NUMBERS), 2, 1e-3)
    assert (told["noise"], told["expected"]) == ("seeded", 4)
    assert coordinator.get(federation)["privacy"]["epsilon"] == told["epsilon"]
    again = coordinator.post(f"{federation}/rounds/2/replay", {})
    assert all(one["same"] for one in again["states"]), again


def test_a_change_without_its_part_of_the_noise_is_refused(coordinator: InThread, leap: Leap) -> None:
    _, clients = begun(coordinator)
    clients[0].noise = None
    federation = clients[0].federation
    while (coordinator.get(federation)["stage"] or {}).get("kind") != "mask":
        for client in clients:
            step(client, {"mask": tuple("abcde")})
    refused = clients[0].answer(coordinator.task(clients[0]))
    assert (refused.status_code, refused.json()["type"].rsplit("/", 1)[-1]) == (422, "privacy-mismatch")


def spec(clients: int = 100, **changes: Any) -> dict[str, Any]:
    given = PRIVACY | changes.pop("privacy", {})
    return {
        "name": "eyes",
        "method": {"name": "promptfl", "m": 4},
        "rounds": 50,
        "participation": {"min_clients": clients},
        "aggregation": UNIFORM,
        "secure_aggregation": {},
        "privacy": {key: value for key, value in given.items() if value is not None},
    } | changes


def test_the_parts_that_are_secret_follow_from_the_fewest_clients_of_a_sum() -> None:
    resolved = resolve_spec(spec(privacy={"colluding": 10}))
    assert resolved.secure_aggregation is not None
    assert resolved.secure_aggregation.minimum == 60, "what the threshold makes of a hundred"
    assert honest_parts(resolved) == 50
    assert partial_noise(resolved) == PartialNoise(1.0, 0.5, 50)
    assert resolved.evaluations == "withheld"
    wanted = resolve_spec(spec(privacy={"noise_multiplier": None, "epsilon": 8.0}))
    assert wanted.privacy.noise_multiplier is not None
    assert 7.9 < spent(wanted, 50) <= 8.0
    again = wanted.model_dump(mode="json")
    assert resolve_spec(again) == wanted, "what is resolved stays as it is"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"secure_aggregation": None}, "give secure_aggregation"),
        ({"privacy": {"evaluation": "plain"}}, "withhold"),
        ({"aggregation": {"weighting": "samples"}}, "take aggregation.weighting uniform"),
        ({"clients": 4, "privacy": {"colluding": 3}}, "no part of the noise would be secret"),
        ({"privacy": {"epsilon": 8.0}}, "and 8 is allowed: leave noise_multiplier out"),
        ({"privacy": {"noise_multiplier": None}}, "give noise_multiplier, or epsilon"),
        ({"privacy": {"clip": None}}, "give clip"),
        ({"privacy": {"unit": "group"}}, "a whole client is protected here"),
        ({"privacy": {"adaptive_clip": {}}}, "which nobody sees"),
        ({"privacy": {"delta": 0.5}}, "δ = 0.5 is not between"),
        ({"admission": {"max_update_norm": 1.0}}, "max_update_norm would stop"),
        ({"participation": {"min_clients": 100, "sampling": "poisson"}}, "sampling poisson is for"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        resolve_spec(spec(**changes))
