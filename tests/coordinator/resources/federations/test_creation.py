"""A federation is created once, however often it is asked for."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from promptfed.coordinator.problems import InvalidSpec
from promptfed.coordinator.resources.federations import operations
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.tokens import digest
from promptfed.shared.errors import BadInput
from promptfed.shared.tensors.torch_tensors import encode, state_hash
from promptfed.testing.clients import content_digest, spec
from tests.support.coordinators import InProcess, InThread
from tests.support.open_phases import refusal, told


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


def test_a_spec_that_is_no_json_is_refused_where_it_is_not() -> None:
    told = spec(training={"learning_rate": float("nan")})
    with pytest.raises(InvalidSpec, match=r"training\.learning_rate"):
        operations._digest_of(told)


def test_what_no_key_of_a_spec_holds_is_refused_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "resolve", lambda raw: None)
    for value in (float("nan"), float("inf")):
        with pytest.raises(InvalidSpec, match="holds NaN, infinity or text that is no Unicode") as told:
            operations._digest_of({"a": value})
        assert [error["path"] for error in told.value.members["errors"]] == ["(spec)"]
    assert operations._digest_of({"b": 1, "a": 2}) == operations._digest_of({"a": 2, "b": 1})


def test_an_initial_state_comes_whole_in_its_shape_and_before_the_start(coordinator: InProcess) -> None:
    federation = coordinator.create()
    path = f"/v1/federations/{federation}/initial-state"

    def put(tensor: torch.Tensor, announced: bytes | None = None) -> httpx.Response:
        body = encode({"context": tensor})
        headers = coordinator.operator | ({"Content-Digest": content_digest(announced)} if announced else {})
        return coordinator.http.put(path, content=body, headers=headers)

    good = torch.ones(4, 8)
    assert refusal(put(good[0]))[1:] == ("wrong-shape", "tensor 'context' has 1 dimensions; 2 are expected")
    assert told(put(good, b"another")) == (400, "digest-mismatch")
    kept = put(good, encode({"context": good}))
    assert (kept.status_code, kept.json()["state_hash"]) == (200, state_hash({"context": good}))
    assert coordinator.registry.get(federation).supplied_state is not None
    coordinator.post(f"{federation}/cancel")
    assert told(put(good)) == (409, "wrong-state")
    coordinator.delete(f"{federation}/clients/nobody", status=404)


def test_a_first_federation_that_cannot_be_made_is_said_with_its_file(coordinator: InProcess, tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(json.dumps(spec(rounds=-1)))
    with pytest.raises(BadInput, match=rf"{file}: .*rounds"):
        operations.bootstrap(coordinator.registry, Settings(bootstrap=file))
