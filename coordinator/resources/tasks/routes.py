"""``.../task`` and ``.../tasks``: clients' tasks, and their answers."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import Header, Query, Request, Response, status
from fastapi.responses import FileResponse

from promptfed.coordinator import problems
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http import openapi
from promptfed.coordinator.http.deps import Calling, CallingClient, RegistryOf, TaskId
from promptfed.coordinator.http.receipts import Stored
from promptfed.coordinator.http.tensors import TENSOR_BODY, TENSORS, first_byte, tensors_at
from promptfed.coordinator.http.uploads import Incoming, announced_digest, expect_digest
from promptfed.coordinator.resources.tasks import exchanges, reports, served, updates
from promptfed.coordinator.resources.tasks.polls import Poll, next_task
from promptfed.coordinator.resources.tasks.served import is_at_hand
from promptfed.shared.api import api_schemas
from promptfed.shared.api.api_schemas import UpdateReceipt
from promptfed.shared.messages import EvaluationRequest, FailureRequest, Task
from promptfed.shared.service.fault_points import point

router = openapi.router(prefix="/v1/federations/{federation}", tags=["tasks"])

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
    arguments = (registry, caller.federation, caller.client, task_id, first_byte(span))
    if is_at_hand(registry, caller, task_id):
        digest, place = served.served_payload(*arguments)
    else:
        digest, place = await run_sync(served.served_payload, *arguments)
    return tensors_at(place, digest, {"ETag": f'"{digest}"'})


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
    responses={**ACCEPTED_BEFORE, **openapi.for_clients(problems.DigestMissing, *ANSWERED, *UPDATE)},
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
            new = await updates.accept_update(registry, federation, client, task_id, upload)
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
        new = await reports.accept_evaluation(registry, caller.federation, caller.client, task_id, evaluation)
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
            exchanges.NotSecure,
            *exchanges.REFUSALS.values(),
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
            Incoming.of(request), exchanges.limit(caller.federation)
        ) as upload:
            expect_digest(upload, announced)
            new = await exchanges.accept_exchange(registry, caller.federation, caller.client, task_id, upload)
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
    reports.accept_failure(registry, caller.federation, caller.client, task_id, failure)
    return api_schemas.Receipt(task_id=task_id, status="failed")
