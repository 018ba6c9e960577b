"""A member that gives false shares when the sum is opened: it is named, and the sum ends right."""

from __future__ import annotations

import time
from typing import Any

import httpx
import torch

from promptfed.shared.secagg.messages import UnmaskAnswer
from tests.coordinator.test_secure_sums import Leap, drive, expected, federation_of, step
from tests.support.coordinators import InThread
from tests.support.open_phases import prompts
from tests.support.secure_clients import SecureClient
from tests.support.waiting import PATIENCE


class Liar(SecureClient):
    """A member that gives a false share of everybody's seed when the sum is to be opened."""

    refused: httpx.Response | None = None

    def exchange(self, task: dict[str, Any], body: bytes) -> httpx.Response:
        if task["kind"] != "unmask":
            return super().exchange(task, body)
        told = UnmaskAnswer.model_validate_json(body)
        seeds = [(owner, share[:-1] + bytes([share[-1] ^ 1])) for owner, share in told.seeds]
        false = told.model_copy(update={"seeds": seeds}).model_dump_json().encode()
        self.refused = super().exchange(task, false)
        return httpx.Response(200)


def test_false_shares_of_a_member_are_refused_by_name_and_the_sum_is_right(coordinator: InThread, leap: Leap) -> None:
    federation, clients = federation_of(coordinator, *"abcde", liars={"a": Liar}, aggregation={"weighting": "uniform"})
    end = time.monotonic() + PATIENCE
    while clients[0].refused is None:  # before the three others that are enough
        assert time.monotonic() < end
        for client in clients:
            step(client, {"unmask": tuple("bcde")})
    drive(coordinator, clients, leap)
    assert coordinator.get(federation)["state"] == "finished"
    assert clients[0].refused.status_code == 422
    assert clients[0].refused.json()["type"].endswith("/bad-shares")
    (phase,) = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert [(one["client"], one["type"]) for one in phase["failed"]] == [("a", "bad-shares")]
    wanted = expected(prompts(coordinator, federation, 0), list("abcde"), dict.fromkeys("abcde", 1.0))
    found = prompts(coordinator, federation, 1)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), "bit for bit"
