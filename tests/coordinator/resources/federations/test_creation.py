"""A federation is created once, however often it is asked for."""

from __future__ import annotations

import json

import pytest

from promptfed.testing.clients import spec
from tests.support.coordinators import InThread


@pytest.mark.both_databases
def test_the_same_idempotency_key_answers_the_same_federation(coordinator: InThread) -> None:
    key = {"Idempotency-Key": "k1"}
    first = coordinator.post("/v1/federations", spec(), status=201, headers=key)
    again = coordinator.post("/v1/federations", spec(), status=201, headers=key)
    assert first["id"] == again["id"]
    turned = json.dumps(dict(reversed(spec().items())))
    headers = coordinator.operator | key | {"Content-Type": "application/json"}
    response = coordinator.http.post("/v1/federations", content=turned, headers=headers)
    assert response.json()["id"] == first["id"], "whatever the order of its keys"
    problem = coordinator.post("/v1/federations", spec(rounds=3), status=422, headers=key)
    assert problem["type"].endswith("/idempotency-key-reused")
    assert coordinator.post("/v1/federations", spec(), status=409)["type"].endswith("/name-taken")
