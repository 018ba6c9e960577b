"""A federation whose first phase is open, and all that a refusal must not change."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import httpx

from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.store.tables import PhaseRow, TaskRow, UpdateRow
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode
from promptfed.testing.clients import ScriptedClient, drive
from promptfed.testing.coordinator import OperatorCalls
from tests.support.coordinators import InThread


def kind(response: httpx.Response) -> str:
    """A refusal's problem type, without the address before it."""
    return str(response.json()["type"]).rsplit("/", 1)[-1]


def told(response: httpx.Response) -> tuple[int, str]:
    """A refusal's status and problem type."""
    return response.status_code, kind(response)


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    """A refusal's status, problem type and words."""
    return response.status_code, kind(response), response.json()["detail"]


def enrolled(coordinator: OperatorCalls, *names: str, **changes: Any) -> tuple[str, list[ScriptedClient]]:
    """A federation that these clients have joined."""
    federation = coordinator.create(**changes)
    return federation, coordinator.enrol(federation, *names)


def launched(coordinator: OperatorCalls, *names: str, **changes: Any) -> tuple[str, list[ScriptedClient]]:
    """A federation that has been started with these clients."""
    federation, clients = enrolled(coordinator, *names, **changes)
    coordinator.post(f"{federation}/start")
    return federation, clients


def completed(coordinator: OperatorCalls, *names: str, **changes: Any) -> tuple[str, list[ScriptedClient]]:
    """The same, and its clients have worked until nothing was left to do."""
    federation, clients = launched(coordinator, *names, **changes)
    drive(clients)
    return federation, clients


def open_first_phase(
    coordinator: InThread, *names: str, **changes: Any
) -> tuple[str, list[ScriptedClient], list[dict[str, Any]]]:
    """A federation in its first training phase."""
    federation, clients = launched(coordinator, *(names or ("a", "b")), **changes)
    return federation, clients, coordinator.training(clients)


def answer_all(clients: Sequence[ScriptedClient], tasks: Sequence[dict[str, Any]]) -> None:
    """Each client's answer to its task is accepted."""
    assert [one.answer(task).status_code for one, task in zip(clients, tasks, strict=True)] == [201] * len(tasks)


def answer_next(coordinator: OperatorCalls, clients: Sequence[ScriptedClient]) -> None:
    """The next task of each client in turn, and an answer to it that is accepted."""
    assert [one.answer(coordinator.task(one)).status_code for one in clients] == [201] * len(clients)


def supply(coordinator: OperatorCalls, federation: str, body: bytes) -> httpx.Response:
    """Give the federation this file of tensors to start from."""
    path = f"/v1/federations/{federation}/initial-state"
    return coordinator.http.put(path, content=body, headers=coordinator.operator)


def prompts(coordinator: OperatorCalls, federation: str, round: int | str = "latest") -> Tensors:
    """The state after a round."""
    url = f"/v1/federations/{federation}/prompts?round={round}"
    answer = coordinator.http.get(url, headers=coordinator.operator)
    assert answer.status_code == 200, answer.text
    return decode(answer.content)[0]


def stored_rows(registry: Registry, federation: str) -> tuple[Any, ...]:
    """All that a refusal must not change."""
    with registry.database.read() as session:
        rows = [
            [(row.id, row.status, row.payload_sha256, row.counted) for row in session.query(TaskRow)],
            [(row.task_id, row.sha256) for row in session.query(UpdateRow)],
            [(row.id, row.closed_at, row.completed_at) for row in session.query(PhaseRow)],
        ]
    return registry.federations[federation].run, rows, sorted(registry.blobs.all())


def paused_phase(coordinator: InThread, **changes: Any) -> tuple[str, list[ScriptedClient]]:
    """A federation whose clients' first updates are accepted, and the phase not closed yet: it is paused."""
    federation, clients, tasks = open_first_phase(coordinator, **changes)
    coordinator.post(f"{federation}/pause")
    answer_all(clients, tasks)
    return federation, clients


def metrics(coordinator: OperatorCalls, federation: str) -> list[dict[str, Any]]:
    """The lines of the federation's metrics; an empty field is None."""
    answer = coordinator.http.get(f"/v1/federations/{federation}/metrics", headers=coordinator.operator)
    lines = csv.DictReader(io.StringIO(answer.text))
    return [{key: value or None for key, value in line.items()} | {"value": float(line["value"])} for line in lines]
