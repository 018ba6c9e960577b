"""Schemathesis over the coordinator's own description: whatever is sent, by whomever, nothing breaks.

Requests come from the description, as it says and as it does not. Half of them have their addresses replaced by real
ones, so that they get past the door. Two federations run: what happens to ``victim`` is watched, ``toy`` may be spoilt.
"""

from __future__ import annotations

import secrets
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from promptfed.coordinator.app import create_app
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.tables import StateRow, TaskRow, UpdateRow
from promptfed.testing.clients import bearer, content_digest
from tests.support.coordinators import InThread, in_thread
from tests.support.open_phases import launched, open_first_phase

CHECKS = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
CHECKS.append(checks.response_schema_conformance)
SCHEMA = schemathesis.openapi.from_dict(create_app(Settings()).openapi())
OPERATIONS = {f"{one.method.upper()} {one.path}": one for one in (found.ok() for found in SCHEMA.get_all_operations())}
FEW, MANY = 6, 1000
OPTIONS = {"upload_timeout_seconds": 5, "auth_failures_per_minute": 1_000_000}  # strangers and members share an address
RIGHT = {"viewer": "operator", "operator": "operator", "admin": "operator"}
RIGHT |= {"client": "member of toy", "enrolment": "enrolling to toy"}
STREAM = "GET /v1/federations/{federation}/events"


@dataclass
class Place:
    """A coordinator with both federations, and who may call it how."""

    coordinator: InThread
    victim: str
    toy: str
    tasks: dict[str, str]
    callers: dict[str, dict[str, str]]
    seen: Counter[str]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InThread, str, str]]:
    with in_thread(tmp_path_factory.mktemp("openapi") / "data", **OPTIONS) as coordinator:
        coordinator.http.event_hooks = {}  # Schemathesis looks at the answers here.
        victim, _, (task, _) = open_first_phase(coordinator, name="victim", participation={"deadline_seconds": 86400})
        yield coordinator, victim, task["task_id"]


@pytest.fixture
def place(attacked: tuple[InThread, str, str], name: str) -> Iterator[Place]:
    coordinator, victim, task = attacked
    toy, [member] = launched(coordinator, "member", name="toy", participation={"min_clients": 1})
    callers = {
        "nobody": {}, "stranger": bearer(secrets.token_hex(32)), "member of toy": member.headers,
        "enrolling to toy": bearer(coordinator.token(toy)), "operator": coordinator.operator,
    }  # fmt: skip
    if not name.endswith("/evaluation"):
        assert member.evaluate(coordinator.task(member)).status_code == 201
    tasks = {victim: task, toy: coordinator.task(member)["task_id"]}
    before = standing(coordinator.registry, victim)
    yield Place(coordinator, victim, toy, tasks, callers, Counter())
    assert standing(coordinator.registry, victim) == before
    if toy in coordinator.registry.federations:
        coordinator.delete(toy)


def standing(registry: Registry, federation: str) -> tuple[Any, ...]:
    """All that nobody but its own members and the operator may change of a federation."""
    with registry.database.read() as session:
        mine = (TaskRow.federation_id == federation,)
        tasks = [(one.id, one.status, one.payload_sha256, one.counted) for one in session.query(TaskRow).where(*mine)]
        updates = [one.sha256 for one in session.query(UpdateRow).join(TaskRow).where(*mine)]
        states = [one.sha256 for one in session.query(StateRow).where(StateRow.federation_id == federation)]
    stored = set(registry.blobs.all())
    assert {*updates, *states, *(one[2] for one in tasks)} <= stored
    return registry.federations[federation], tasks, updates, states


def aimed(case: schemathesis.Case, place: Place, caller: str, at_victim: bool) -> None:
    """Give the case real addresses; an operator, who may do anything, is not let near the victim."""
    federation = place.victim if at_victim and caller != "operator" else place.toy
    real: dict[str, Any] = {"federation": federation, "task_id": place.tasks[federation]}
    real |= {"client_id": "a" if federation == place.victim else "member", "round": 0}
    real |= {"name": "promptfl", "file": "app.js", "token_id": "spare", "operator": "nobody"}
    case.path_parameters = {name: real[name] for name in case.path_parameters or {}}


def send(case: schemathesis.Case, place: Place, caller: str, endless: bool) -> httpx.Response | None:
    """The answer; None where such a request cannot even be written down, or where a stream without end begins."""
    request = case.as_transport_kwargs(base_url=place.coordinator.url)
    headers = {**request.pop("headers"), **place.callers[caller]}
    params = {**request.pop("params"), **({"wait": "0"} if "wait" in (case.query or {}) else {})}
    try:
        made = place.coordinator.http.build_request(**request_of(request), headers=headers, params=params)
    except (httpx.InvalidURL, UnicodeEncodeError, TypeError, ValueError):
        return None
    if made.url.path.endswith("/update"):
        made.headers["Content-Digest"] = content_digest(made.read())
    try:
        response = place.coordinator.http.send(made, stream=True)
    except httpx.LocalProtocolError:
        return None
    try:
        if endless and response.status_code == 200:
            place.seen["200"] += 1
            return None
        response.read()
        return response
    finally:
        response.close()


def request_of(request: dict[str, Any]) -> dict[str, Any]:
    """What of a request for `requests` has another name in httpx."""
    body = request.pop("data", None)
    request.pop("cookies", None)
    return request | ({"content": body} if body is not None else {})


def attack(name: str, place: Place, examples: int) -> None:
    operation = OPERATIONS[name]
    [right] = [RIGHT[kind] for one in operation.definition.raw.get("security", []) for kind in one] or ["nobody"]
    # Most requests come from whom they are meant for: the others do not get far.
    callers = st.one_of(st.just(right), st.just(right), st.sampled_from(sorted(place.callers)))
    aims = st.sampled_from([True, True, True, False])
    modes = [operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)]

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.one_of(*modes), callers, aims, st.booleans())
    def one(case: schemathesis.Case, caller: str, aim: bool, at_victim: bool) -> None:
        if aim:
            aimed(case, place, caller, at_victim and caller != right)
        response = send(case, place, caller, endless=name == STREAM)
        if response is None:
            return
        place.seen[f"{response.status_code}"] += 1
        case.validate_response(response, checks=CHECKS)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one()


@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_breaks_whatever_is_sent(place: Place, name: str) -> None:
    attack(name, place, FEW)
