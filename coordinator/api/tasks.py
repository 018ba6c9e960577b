"""``.../task`` and ``.../tasks``: what a client is asked, and what it answers."""

from __future__ import annotations

import json
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request, Response, status
from fastapi.responses import FileResponse

from promptfed.coordinator.api.deps import Calling, EngineOf, TaskId
from promptfed.coordinator.api.federations import TENSOR_BODY, TENSORS
from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Client, Live, OpenTask
from promptfed.coordinator.domain.run_state import ENDED
from promptfed.coordinator.engine.registry import Engine
from promptfed.coordinator.engine.wakeups import wait
from promptfed.coordinator.http.uploads import announced_digest, expect_digest
from promptfed.coordinator.operations import submissions
from promptfed.coordinator.problems import ANY_CALLER, StorageFull, Unauthorized, Withdrawn, documented
from promptfed.coordinator.store.fault_points import point
from promptfed.coordinator.task_problems import (
    AlreadyAnswered,
    DigestMismatch,
    DigestMissing,
    Ended,
    NormTooLarge,
    PayloadGone,
    PhaseClosed,
    WrongPayload,
    WrongTask,
    WrongTaskKind,
)
from promptfed.shared.api_schemas import Receipt, UpdateReceipt
from promptfed.shared.messages import EvaluationRequest, FailureRequest, Task, TaskConfig

router = APIRouter(prefix="/v1/federations/{federation}", tags=["tasks"])

CLIENT = (*ANY_CALLER, Withdrawn)


@router.get(
    "/task",
    response_model=Task,
    responses={204: {"description": "no task within the time"}, **documented(*CLIENT, Ended)},
)
async def get_task(
    engine: EngineOf,
    caller: Calling,
    wait_seconds: Annotated[float, Query(alias="wait", ge=0, le=60, description="seconds")] = 0,
) -> Response:
    """The client's open task; waits for one."""
    key = (caller.live.id, caller.client.name)
    until = clock.monotonic() + wait_seconds
    engine.measures.waiting.inc()
    try:
        while True:
            bell = engine.bells.listen(key)
            found = _open_task(engine, caller.live.id, caller.client)
            left = until - clock.monotonic()
            if found is not None:
                return Response(_message(engine, *found), media_type="application/json")
            if left <= 0 or engine.bells.silenced:
                return Response(status_code=status.HTTP_204_NO_CONTENT)
            await wait(bell, left)
    finally:
        engine.measures.waiting.dec()


def _open_task(engine: Engine, id: str, client: Client) -> tuple[Live, OpenTask] | None:
    live, name = engine.live(id), client.name
    if live.clients[name].secret_digest != client.secret_digest:
        raise Unauthorized("the operator has reset this client's name: enrol again")
    if not live.run.members[name].active:
        raise Withdrawn("the operator has withdrawn this client from the federation")
    if live.run.state in ENDED:
        raise Ended(f"{live.name} is {live.run.state}: there will be no more tasks")
    task = live.tasks.get(name)
    if live.run.state != "running" or task is None or task.payload_sha256 is None or live.deadline is None:
        return None
    return live, task


def _message(engine: Engine, live: Live, task: OpenTask) -> str:
    """A ``promptfed.shared.messages.Task`` as JSON."""
    assert live.run.stage is not None
    own = {
        "task_id": task.id,
        "kind": task.kind,
        "round": task.round,
        "phase": task.phase,
        "deadline": live.deadline,
        "seconds_left": round(max(0.0, live.run.stage.deadline - clock.monotonic()), 3),
        "payload": {
            "url": f"/v1/federations/{live.id}/tasks/{task.id}/payload",
            "bytes": task.payload_bytes,
            "sha256": task.payload_sha256,
        },
    }
    return f'{json.dumps(own)[:-1]}, "config": {_config(engine, live)}}}'


def _config(engine: Engine, live: Live) -> str:
    """The part of a task that is the same for all clients: made again only when the clients have changed."""
    known = engine.configs.get(live.id)
    if known is not None and known[0] is live.run.members and known[1] is live.clients:
        return known[2]
    config = TaskConfig(
        method=live.spec.method,
        training=live.spec.training.model_dump(),
        backbone=live.spec.backbone.model_copy(update={"fingerprint": live.fingerprint, "shape": live.shape}),
        class_names=live.spec.class_names,
        template=live.spec.template,
        rounds=live.spec.rounds,
        seed=live.spec.seed,
        # Where no method asks, sites need not know of each other; and a thousand of them would make every task long.
        peers=live.peers() if live.method.needs.domain_descriptions else [],
    ).model_dump_json()
    engine.configs[live.id] = (live.run.members, live.clients, config)
    return config


@router.get(
    "/tasks/{task_id}/payload",
    response_class=FileResponse,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "safetensors"},
        **documented(*CLIENT, PayloadGone),
    },
)
def get_payload(engine: EngineOf, caller: Calling, task_id: TaskId) -> Response:
    """What the client starts from: always the same bytes for one task."""
    digest, path, size = submissions.payload(engine, caller.live, caller.client, task_id)
    headers = {"ETag": f'"{digest}"'}
    if size <= FileResponse.chunk_size:
        # A file's way through four threads costs more than its bytes.
        return Response(path.read_bytes(), media_type="application/octet-stream", headers=headers)
    return FileResponse(path, media_type="application/octet-stream", headers=headers)


@router.put(
    "/tasks/{task_id}/update",
    status_code=status.HTTP_201_CREATED,
    response_model=UpdateReceipt,
    responses={
        200: {"model": UpdateReceipt, "description": "these very bytes were accepted before"},
        **documented(
            *CLIENT,
            DigestMissing,
            DigestMismatch,
            WrongTaskKind,
            AlreadyAnswered,
            PhaseClosed,
            *TENSORS,
            NormTooLarge,
            WrongTask,
            WrongPayload,
        ),
    },
    openapi_extra=TENSOR_BODY,
)
async def put_update(
    request: Request,
    engine: EngineOf,
    caller: Calling,
    task_id: TaskId,
    response: Response,
    content_digest: Annotated[str | None, Header(description="`sha-256=:<base64>:` (RFC 9530)")] = None,
) -> UpdateReceipt:
    """Answer a training task. 201 means that it is on the disk and counts, unless the phase was already closed."""
    announced = announced_digest(content_digest)
    live, client = caller.live, caller.client
    with engine.measures.receiving.time():
        async with request.app.state.uploads.receive(request, live.spec.admission.max_bytes) as upload:
            expect_digest(upload, announced)
            point("update-received")
            new = await run_sync(submissions.accept_update, engine, live, client, task_id, upload)
    if not new:
        response.status_code = status.HTTP_200_OK
    return UpdateReceipt(task_id=task_id, status="accepted", sha256=upload.sha256)


@router.put(
    "/tasks/{task_id}/evaluation",
    status_code=status.HTTP_201_CREATED,
    response_model=Receipt,
    responses={
        200: {"model": Receipt, "description": "the same accuracies were accepted before"},
        **documented(*CLIENT, WrongTaskKind, AlreadyAnswered, PhaseClosed, StorageFull),
    },
)
def put_evaluation(
    engine: EngineOf, caller: Calling, task_id: TaskId, evaluation: EvaluationRequest, response: Response
) -> Receipt:
    """Answer an evaluation task."""
    if not submissions.accept_evaluation(engine, caller.live, caller.client, task_id, evaluation):
        response.status_code = status.HTTP_200_OK
    return Receipt(task_id=task_id, status="accepted")


@router.post("/tasks/{task_id}/failure", responses=documented(*CLIENT, AlreadyAnswered, PhaseClosed, StorageFull))
def post_failure(engine: EngineOf, caller: Calling, task_id: TaskId, failure: FailureRequest) -> Receipt:
    """Say that the task cannot be carried out: nobody waits for it any longer."""
    submissions.accept_failure(engine, caller.live, caller.client, task_id, failure)
    return Receipt(task_id=task_id, status="failed")
