"""A federation whose rounds are rows only: reports of thousands of updates without anybody who sends them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import insert
from sqlalchemy.engine import Connection

from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Client
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.store.tables import EvaluationRow, PhaseRow, TaskRow, UpdateRow

RESULT = {"accuracy": 0.5, "num_samples": 10, "ece": 0.125, "macro_f1": 0.375}
BODY = {"splits": {"test": RESULT}, "zero_shot": {"test": RESULT}, "metrics": {"a": 1.0}}
METRICS = {"loss": 0.5, "accuracy": 0.25, "seconds": 1e-5}


def played(registry: Registry, id: str, rounds: int, clients: int) -> None:
    """Make it one that has finished: in each of ``rounds`` all ``clients`` have sent an update and an evaluation."""
    federation = registry.get(id)
    names = [f"client-{number:05}" for number in range(clients)]
    members = {
        name: Client(name, "trainer", 5, ("a", "b"), id=f"cli-{name}", secret_digest=f"digest of {name}")
        for name in names
    }
    run = replace(federation.run, round=rounds, state="finished")
    with registry.exclusively():
        registry.federations = {**registry.federations, id: replace(federation, clients=members, run=run)}
    with registry.database.write() as session:
        for number in range(1, rounds + 1):
            _stage(session.connection(), id, number, 0, "train", names)
            _stage(session.connection(), id, number, 1, "evaluate", names)


def _stage(connection: Connection, id: str, round: int, step: int, kind: str, names: list[str]) -> None:
    now = clock.now()
    times = {"opened_at": now, "deadline": now, "closed_at": now, "completed_at": now}
    about = {"round": round, "step": step, "kind": kind, "name": kind, "sample_size": len(names), "extended": False}
    [phase] = connection.execute(insert(PhaseRow).values(federation_id=id, **about, **times)).inserted_primary_key
    tasks: list[dict[str, Any]] = [
        {
            "id": f"{id}-{phase}-{number}", "federation_id": id, "phase_id": phase, "number": number, "client": name,
            "status": "answered", "opened_at": now, "counted": True, "payload_sha256": None, "payload_stored": False,
            "bytes_down": 100, "weight": 1 / len(names),
        }
        for number, name in enumerate(names)
    ]  # fmt: skip
    connection.execute(insert(TaskRow), tasks)
    if kind == "train":
        same = {"bytes": 32_000, "metrics": METRICS, "received_at": now, "stored": False}
        connection.execute(
            insert(UpdateRow),
            [{"task_id": task["id"], "sha256": f"sha256:{task['number']:064}", "norm": 1.5, **same} for task in tasks],
        )
    else:
        same = {"digest": "", "body": BODY, "received_at": now}
        connection.execute(insert(EvaluationRow), [{"task_id": task["id"], **same} for task in tasks])
