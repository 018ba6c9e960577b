"""Whose act it is that is noted."""

from __future__ import annotations

import pytest
import torch

from promptfed.coordinator.engine.audit import ITSELF, Actor, acting, actor
from promptfed.shared.tensors.torch_tensors import encode, state_hash
from tests.support.coordinators import InProcess
from tests.support.open_phases import supply


def test_who_acts_is_known_as_long_as_it_does_also_where_that_fails() -> None:
    first, second = Actor("a"), Actor("b", "admin", "10.0.0.1")
    with acting(first):
        with pytest.raises(ValueError, match="no"), acting(second):
            assert actor.get() is second
            raise ValueError("no")
        assert actor.get() is first
    assert actor.get() is ITSELF


def test_every_act_is_in_the_log(coordinator: InProcess) -> None:
    federation = coordinator.create(participation={"min_clients": 2}, rounds=1)
    tensors = {"context": torch.ones(4, 8)}
    supply(coordinator, federation, encode(tensors))
    a = coordinator.enrol(federation, "a", "b")[0]
    for verb in ("start", "pause", "resume"):
        coordinator.post(f"{federation}/{verb}")
    assert a.http.post(f"{a.path}/withdrawal", headers=a.headers).status_code == 204
    views = {one["name"]: one["client_id"] for one in coordinator.get(f"{federation}/clients")["clients"]}
    coordinator.delete(f"{federation}/clients/{views['b']}")
    coordinator.delete(f"{federation}/clients/{views['a']}/updates")
    coordinator.post(f"{federation}/clients/{views['b']}/reset")
    [token] = coordinator.get(f"{federation}/enrolment-tokens")["tokens"]
    coordinator.delete(f"{federation}/enrolment-tokens/{token['id']}")
    coordinator.post(f"{federation}/cancel")
    minted = coordinator.post("/v1/operators", {"name": "anna", "role": "viewer"}, status=201)
    coordinator.delete(f"/v1/operators/{minted['id']}")
    coordinator.delete(federation)
    entries = coordinator.get("/v1/audit-log", params={"limit": 1000})["entries"]
    acts = [
        ("federation-created", {"spec_sha256": entries[0]["detail"]["spec_sha256"]}),
        ("initial-state-supplied", {"state_hash": state_hash(tensors)}),
        ("token-minted", {"token": token["id"], "uses": 1000, "role": None, "client": None}),
        *(("client-enrolled", {"client": name, "role": "trainer"}) for name in "ab"),
        *((f"federation-{verb}", {}) for verb in ("start", "pause", "resume")),
        ("client-withdrawn", {"client": "a", "discard": True}),
        ("client-withdrawn", {"client": "b", "discard": False}),
        ("updates-deleted", {"client": "a"}),
        ("client-reset", {"client": "b"}),
        ("token-revoked", {"token": token["id"]}),
        ("federation-cancel", {}),
        ("operator-named", {"operator": "anna", "role": "viewer", "token": minted["id"]}),
        ("operator-revoked", {"operator": "anna", "token": minted["id"]}),
        ("federation-deleted", {}),
    ]
    assert [(one["act"], one["detail"]) for one in entries] == acts
    actors = [one["actor"] for one in entries]
    assert (actors[3:5], actors[8]) == ([token["id"]] * 2, "a")
    assert {*actors[:3], *actors[5:8], *actors[9:]} == {"operator.token"}
