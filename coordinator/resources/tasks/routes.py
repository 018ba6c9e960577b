"""``.../task`` and ``.../tasks``: clients' tasks, and their answers."""

from __future__ import annotations

from base64 import b64encode
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request, Response, status
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field

from promptfed.coordinator import problems
from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Client, Federation, OpenTask
from promptfed.coordinator.engine.registry import Registry, wait
from promptfed.coordinator.engine.selection import selected_round
from promptfed.coordinator.http import openapi
from promptfed.coordinator.http.deps import NO_NUL, Calling, CallingClient, RegistryOf, TaskId
from promptfed.coordinator.http.receipts import Stored
from promptfed.coordinator.http.tensors import TENSOR_BODY, TENSORS, first_byte, tensors_at
from promptfed.coordinator.http.uploads import Incoming, announced_digest, expect_digest
from promptfed.coordinator.resources.tasks import submissions
from promptfed.shared.api import api_schemas
from promptfed.shared.api.api_schemas import UpdateReceipt
from promptfed.shared.messages import (
    ENDED,
    INLINE_BYTES,
    EvaluationRequest,
    FailureRequest,
    PayloadRef,
    SecurePart,
    Task,
    TaskConfig,
)
from promptfed.shared.service.fault_points import point
from promptfed.shared.spec.sections import FINAL

router = APIRouter(prefix="/v1/federations/{federation}", tags=["tasks"])

ANSWERED = (problems.WrongTaskKind, problems.AlreadyAnswered, problems.PhaseClosed)
UPDATE = (  # what an update may be refused for that has arrived whole
    *TENSORS,
    problems.NormTooLarge,
    problems.WrongTask,
    problems.WrongPayload,
    problems.PrivacyMissing,
    problems.PrivacyMismatch,
)
ACCEPTED_BEFORE: dict[int | str, dict[str, Any]] = {
    200: {"model": UpdateReceipt, "description": "these very bytes were accepted before"}
}
HELD_SECONDS = 15.0  # that an answer waits for a task at most: many proxies end a silent connection after 20
Sent = Annotated[str | None, Header(alias="content-digest", description="`sha-256=:<base64>:` (RFC 9530)")]
Next = Annotated[
    float,
    Query(
        ge=0,
        le=60,
        description="seconds that the receipt of a new answer waits for the client's next task, which it contains; "
        "longer than 15 is 15",
    ),
]


class Poll(BaseModel):
    """What a client asks by with a poll."""

    wait: Annotated[float, Field(ge=0, le=60, description="seconds; longer than 15 is 15")] = 0
    carrying: Annotated[
        str | None, Field(max_length=100, pattern=NO_NUL, description="the task that the client carries out")
    ] = None
    progress: Annotated[float | None, Field(ge=0, le=1, description="the part of its steps that is done")] = None
    inline: Annotated[bool, Field(description="a payload of at most 64 KB comes within the task")] = False


@router.get(
    "/task",
    response_model=Task,
    responses={
        204: {"description": "no task within the time"},
        **openapi.for_clients(problems.Ended, problems.PhaseClosed),
    },
)
async def get_task(request: Request, caller: Calling, poll: Annotated[Poll, Query()]) -> Response:
    """The client's open task. Waits for one if there is none.

    With `carrying`, waits while that task is open. 409 as soon as it is closed, or the client's next task.
    """
    registry = _noticed(request)
    open_now = caller.federation.tasks.get(caller.client.name)
    if poll.progress is not None and open_now is not None and open_now.id == poll.carrying:
        registry.last_seen.is_at(open_now.id, poll.progress)
    task = await next_task(request, caller, poll.wait, poll.carrying, poll.inline)
    if task is None:
        return Response(status_code=status.HTTP_204_NO_CONTENT)
    return Response(task.model_dump_json(), media_type="application/json")


async def next_task(
    request: Request, caller: CallingClient, wait_seconds: float, carrying: str | None = None, inline: bool = False
) -> Task | None:
    """The task; None if there is none within ``wait_seconds``. Raises as ``get_task`` describes.

    ``inline``: with its payload, if that is small and in memory.
    """
    registry: Registry = request.app.state.registry
    key = (caller.federation.id, caller.client.name)
    until = clock.monotonic() + min(wait_seconds, HELD_SECONDS)
    with registry.waits.begun(key, request.receive if wait_seconds > 0 else None) as own:
        while True:
            wakeup = registry.wakeups.listen(key)
            if registry.away:
                raise problems.StoreAway
            served = _open_task(registry, caller.federation.id, caller.client)
            if carrying is not None:
                served = _other_task(registry, caller, carrying, served)
            left = until - clock.monotonic()
            if served is not None:
                # Where something on the way has hung up, no payload counts as served.
                return _message(registry, *served, inline and not own.over)
            if left <= 0 or registry.wakeups.closed or own.over:
                return None
            await wait(wakeup, left)


def _open_task(registry: Registry, id: str, client: Client) -> tuple[Federation, OpenTask] | None:
    federation, name = registry.get(id), client.name
    if federation.clients[name].secret_digest != client.secret_digest:
        raise problems.Unauthorized("the operator has reset this client's name: enrol again")
    if not federation.run.members[name].active:
        raise problems.Withdrawn("the operator has withdrawn this client from the federation")
    if federation.run.state in ENDED:
        raise problems.Ended(f"{federation.name} is {federation.run.state}: there will be no more tasks")
    task = federation.tasks.get(name)
    if federation.run.state != "running" or task is None or task.payload_sha256 is None or federation.deadline is None:
        return None
    return federation, task


def _other_task(
    registry: Registry, caller: CallingClient, carrying: str, served: tuple[Federation, OpenTask] | None
) -> tuple[Federation, OpenTask] | None:
    """What is served in the place of the task ``carrying``; None while that is open, also in a paused federation."""
    known = registry.get(caller.federation.id).tasks.get(caller.client.name)
    if known is not None and known.id == carrying:
        return None
    if served is None:
        raise problems.PhaseClosed(f"task {carrying} is no longer open: stop it")
    return served


def _message(registry: Registry, federation: Federation, task: OpenTask, inline: bool) -> Task:
    assert federation.run.stage is not None
    assert task.payload_sha256 is not None
    selected, phase, secure, data = None, task.phase, None, None
    if phase == FINAL:
        with registry.database.read() as session:
            selected = selected_round(session, federation)
    plan = federation.rules.plan(task.round, task.step) if task.kind != "evaluate" else None
    if plan is not None and plan.secure is not None:
        phase, secure = plan.secure.phase, SecurePart(phase=plan.secure.phase, attempt=plan.secure.attempt)
    if inline and task.payload_bytes <= INLINE_BYTES:
        content = registry.blobs.remembered(task.payload_sha256)
        if content is not None:
            data = _base64(content)
            submissions.note_served(registry, task.id, task.payload_bytes)
    return Task(
        task_id=task.id,
        kind=task.kind,
        round=task.round,
        phase=phase,
        deadline=clock.parse(federation.deadline or clock.now()),
        seconds_left=round(max(0.0, federation.run.stage.deadline - clock.monotonic()), 3),
        payload=PayloadRef(
            url=f"/v1/federations/{federation.id}/tasks/{task.id}/payload",
            bytes=task.payload_bytes,
            sha256=task.payload_sha256,
            data=data,
        ),
        config=_config(registry, federation),
        epoch=registry.epoch,
        secure=secure,
        selected=selected,
    )


@lru_cache(maxsize=8)
def _base64(content: bytes) -> str:
    return b64encode(content).decode()


def _config(registry: Registry, federation: Federation) -> TaskConfig:
    """The part of a task that is the same for all clients: made again only when the clients have changed."""
    known = registry.configs.get(federation.id)
    if known is not None and known[0] is federation.run.members and known[1] is federation.clients:
        return known[2]
    config = submissions.config_of(federation)
    registry.configs[federation.id] = (federation.run.members, federation.clients, config)
    return config


@router.get(
    "/tasks/{task_id}/payload",
    response_class=FileResponse,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "safetensors"},
        206: {"content": {"application/octet-stream": {}}, "description": "the range that was asked for"},
        **openapi.for_clients(problems.PayloadGone),
    },
)
async def get_payload(
    request: Request,
    caller: Calling,
    task_id: TaskId,
    span: Annotated[str | None, Header(alias="range", description="`bytes=N-`: of a large one, from there on")] = None,
) -> Response:
    """The tensors that the client starts from: always the same bytes for one task."""
    registry = _noticed(request)
    asked = (registry, caller.federation, caller.client, task_id, first_byte(span))
    if is_at_hand(registry, caller, task_id):
        digest, place = submissions.served_payload(*asked)
    else:
        digest, place = await run_sync(submissions.served_payload, *asked)
    return tensors_at(place, digest, {"ETag": f'"{digest}"'})


def is_at_hand(registry: Registry, caller: CallingClient, task_id: str) -> bool:
    """Whether the payload is known without asking the database or the disk."""
    task = caller.federation.tasks.get(caller.client.name)
    if task is None or task.id != task_id or task.payload_sha256 is None:
        return False
    return registry.blobs.remembered(task.payload_sha256) is not None


async def _receipt(
    request: Request, caller: CallingClient, receipt: api_schemas.Receipt, new: bool, seconds: float
) -> Stored:
    """The receipt of a stored answer, once there is the client's next task or the seconds are over."""
    if seconds:
        with suppress(Exception):  # the answer is stored, and the client's next question is answered so
            if (task := await next_task(request, caller, seconds if new else 0, inline=True)) is not None:
                request.app.state.registry.committer.notice()  # its answer may follow soon
                receipt = receipt.model_copy(update={"next": task})
    return Stored(receipt, new)


@router.put(
    "/tasks/{task_id}/update",
    status_code=status.HTTP_201_CREATED,
    response_model=UpdateReceipt,
    responses={
        **ACCEPTED_BEFORE,
        **openapi.for_clients(problems.DigestMissing, *ANSWERED, *UPDATE),
    },
    openapi_extra=TENSOR_BODY,
)
async def put_update(request: Request, caller: Calling, task_id: TaskId, sent: Sent = None, next: Next = 0) -> Response:
    """Answer a training task. 201 means that it is on the disk and counts, unless the phase was already closed.

    With `next`, the receipt waits for the client's next task and contains it, with a payload of at most 64 KB.
    """
    registry, announced = _noticed(request), announced_digest(sent)
    federation, client, body = caller.federation, caller.client, Incoming.of(request)
    with registry.metrics.receiving.time(), registry.committer.coming():
        limit = federation.spec.admission.max_bytes
        if body.length is None or body.length > limit:
            limit = federation.update_limit
        compressed = federation.spec.compression.up != "none"
        async with request.app.state.uploads.receive(body, limit, compressed=compressed) as upload:
            expect_digest(upload, announced)
            point("update-received")
            new = await submissions.accept_update(registry, federation, client, task_id, upload)
    receipt = UpdateReceipt(task_id=task_id, status="accepted", sha256=upload.sha256)
    del upload  # its bytes are not kept while the receipt waits
    return await _receipt(request, caller, receipt, new, next)


def _noticed(request: Request) -> Registry:
    """The registry, which has noticed that a client calls."""
    registry: Registry = request.app.state.registry
    registry.committer.notice()
    return registry


@router.put(
    "/tasks/{task_id}/evaluation",
    status_code=status.HTTP_201_CREATED,
    response_model=api_schemas.Receipt,
    responses={
        200: {"model": api_schemas.Receipt, "description": "the same accuracies were accepted before"},
        **openapi.for_clients(*ANSWERED, problems.PrivacyMismatch, problems.StorageFull),
    },
)
async def put_evaluation(
    request: Request, caller: Calling, task_id: TaskId, evaluation: EvaluationRequest, next: Next = 0
) -> Response:
    """Answer an evaluation task. `next` as of an update."""
    registry = _noticed(request)
    with registry.committer.coming():
        new = await submissions.accept_evaluation(registry, caller.federation, caller.client, task_id, evaluation)
    receipt = api_schemas.Receipt(task_id=task_id, status="accepted")
    del evaluation  # as of an update
    return await _receipt(request, caller, receipt, new, next)


@router.put(
    "/tasks/{task_id}/exchange",
    status_code=status.HTTP_201_CREATED,
    response_model=UpdateReceipt,
    responses={
        **ACCEPTED_BEFORE,
        **openapi.for_clients(
            problems.DigestMissing,
            *ANSWERED,
            problems.BodyTooLarge,
            problems.StorageFull,
            submissions.NotSecure,
            *submissions.REFUSALS.values(),
            problems.PrivacyMissing,
            problems.PrivacyMismatch,
        ),
    },
    openapi_extra=TENSOR_BODY,
)
async def put_exchange(request: Request, caller: Calling, task_id: TaskId, sent: Sent = None) -> Response:
    """Answer a step of a secure sum: JSON, or in step ``mask`` the masked vector as safetensors."""
    registry, announced = _noticed(request), announced_digest(sent)
    with registry.committer.coming():
        async with request.app.state.uploads.receive(
            Incoming.of(request), submissions.limit(caller.federation)
        ) as upload:
            expect_digest(upload, announced)
            new = await submissions.accept(registry, caller.federation, caller.client, task_id, upload)
    receipt = UpdateReceipt(task_id=task_id, status="accepted", sha256=upload.sha256)
    return Stored(receipt, new)


@router.post(
    "/tasks/{task_id}/failure",
    responses=openapi.for_clients(problems.AlreadyAnswered, problems.PhaseClosed, problems.StorageFull),
)
def post_failure(
    registry: RegistryOf, caller: Calling, task_id: TaskId, failure: FailureRequest
) -> api_schemas.Receipt:
    """Report that the client cannot carry out the task. The phase does not wait for it."""
    submissions.accept_failure(registry, caller.federation, caller.client, task_id, failure)
    return api_schemas.Receipt(task_id=task_id, status="failed")
