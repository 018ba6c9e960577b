"""A federation is created once, however often it is asked for."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.coordinator.resources.federations import operations
from promptfed.coordinator.store.tokens import digest
from promptfed.testing.clients import spec
from tests.support.coordinators import InThread


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


@pytest.mark.parametrize(("sampling", "drawn"), [("poisson", [("sampling", "eyes")]), ("fixed", [])])
def test_only_sampling_in_secret_takes_a_key(sampling: str, drawn: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []
    noise: Any = SimpleNamespace(key=lambda *purpose: keys.append(purpose) or b"\x01\x02")
    spec = SimpleNamespace(participation=SimpleNamespace(sampling=sampling))
    federation: Any = SimpleNamespace(spec=spec, name="eyes", method=None, sampling_with=lambda key, most: (key, most))
    monkeypatch.setattr(operations, "allowed_rounds", lambda method, spec: 7)
    assert operations._budgeted(federation, noise) == ("0102" if drawn else None, 7)
    assert keys == drawn


@pytest.mark.parametrize(
    ("there", "here", "told"),
    [
        ({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 2}}, []),
        ({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}, ["b.c is 2, not 3"]),
        ({"a": 1, "b": None}, {"a": 2, "b": {"c": 3}}, ["a is 1, not 2", "b is None, not {'c': 3}"]),
        ({"b": {"c": 2}}, {"a": "x" * 99, "b": {"c": 2}}, [f"a is None, not {'x' * 80}"]),
    ],
)
def test_what_differs_of_a_run_file_is_named(there: dict[str, Any], here: dict[str, Any], told: list[str]) -> None:
    assert operations._differing({"a": 0, "b": {"c": 0}}, there, here) == told


@pytest.mark.parametrize(("kept", "good"), [("t", True), ("u", False), (None, False), (b"\xff", False)])
def test_a_token_that_is_still_good_is_kept(kept: str | bytes | None, good: bool, tmp_path: Path) -> None:
    place = tmp_path / "token"
    if kept is not None:
        place.write_bytes(kept if isinstance(kept, bytes) else f"{kept}\n".encode())
    for hours, expired in ((1, False), (-1, True)):
        token = SimpleNamespace(expired=False, expires=datetime.now(UTC) + timedelta(hours=hours))
        federation: Any = SimpleNamespace(tokens={digest("t"): token})
        assert operations._is_good(federation, place) is (good and not expired)
