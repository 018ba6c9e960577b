"""``.../airlock``: an operator carries files between the coordinator and clients without a network.

The files are `promptfed.shared.service.airlock`'s. What a client answers is entered as if it had come over the network,
and refused by the same rules. The coordinator keeps nothing of the files: an answer counts while its task is open.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ValidationError
from sqlalchemy import select

from promptfed.coordinator import problems
from promptfed.coordinator.api import described, tasks
from promptfed.coordinator.api.deps import CallingClient, Operated, RegistryOf, SignerOf
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http.uploads import Incoming, Uploads
from promptfed.coordinator.operations import payloads, submissions, tokens
from promptfed.coordinator.operations.enrolment import enrol, enrolment_info
from promptfed.coordinator.reports import privacy
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import TaskRow, UpdateRow
from promptfed.coordinator.store.tokens import digest
from promptfed.shared.api.access_schemas import TokenRequest
from promptfed.shared.api.airlock_schemas import AirlockReceipt, AirlockRequest
from promptfed.shared.messages import EnrolRequest, EvaluationRequest, FailureRequest
from promptfed.shared.service.airlock import AirlockError, Sealed, public_key, seal, unseal
from promptfed.shared.service.reasons import offence
from promptfed.shared.spec.versions import RELEASE, VERSION

Model = TypeVar("Model", bound=BaseModel)

router = APIRouter(prefix="/v1/federations/{federation}/airlock", tags=["tasks"])

MOST_RECEIPTS = 20  # of a client's last tasks, which a file tells
HEADER_BYTES = 1 << 20  # of a file with answers, beside its body
TOKEN_HOURS = 1.0
FILE: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}, "description": "the file"}}


class BadAirlockFile(problems.Refusal, status=422, title="The file of the airlock cannot be taken"):
    """A file of the airlock that is damaged, changed, signed by another client, or for another federation."""


class NoAirlock(problems.Refusal, status=409, title="This federation or client does not take part by files"):
    """Secure sums, a method that is still to be chosen, or a client that has enrolled over the network."""


@router.post("/tasks", response_class=Response, responses={**FILE, **described.for_callers(NoAirlock)})
async def take_tasks(
    http: Request,
    registry: RegistryOf,
    signer: SignerOf,
    federation: Operated,
    asked: AirlockRequest,
    wait_seconds: Annotated[float, Query(alias="wait", ge=0, le=60, description="seconds for a task")] = 0,
) -> Response:
    """A client's open task with its payload, and what became of its last answers, as a file that is signed."""
    _expect_airlock(federation)
    header: dict[str, Any] = {
        "kind": "tasks",
        "federation": federation.id,
        "client": asked.client,
        "coordinator": str(http.base_url).rstrip("/"),
        "key": signer.public_key,
        "number": time.time_ns(),
        "release": RELEASE,
        "protocol": str(VERSION),
        "enrolment": enrolment_info(federation).model_dump(mode="json"),
        "client_id": None,
        "task": None,
        "ended": None,
        "receipts": {},
        "spends": None,
    }
    body, client = b"", federation.clients.get(asked.client)
    if client is not None:
        _key_of(client)
        caller = CallingClient(federation, client)
        try:
            header["task"] = await tasks.next_task(registry, caller, wait_seconds)
        except problems.Ended as ended:
            header["ended"] = ended.detail
        federation = registry.get(federation.id)
        header |= await run_sync(_known_of, registry, federation, client)
        task = federation.tasks.get(client.name)
        if header["task"] is not None and task is not None:
            _, place = await run_sync(payloads.served_payload, registry, federation, client, task.id)
            body = place.read_bytes() if isinstance(place, Path) else bytes(place)
    made = seal(header, body, lambda said: bytes.fromhex(signer.sign(said)))
    return Response(made, media_type="application/octet-stream")


@router.post("/answers", responses=described.for_callers(BadAirlockFile, NoAirlock, *tasks.ANSWERED, *tasks.UPDATE))
async def give_answers(http: Request, registry: RegistryOf, federation: Operated) -> AirlockReceipt:
    """Enter what a client has answered in its file. The same file again changes nothing."""
    _expect_airlock(federation)
    uploads: Uploads = http.app.state.uploads
    async with uploads.receive(Incoming.of(http), federation.update_limit + HEADER_BYTES) as upload:
        if upload.too_large:
            raise problems.BodyTooLarge("the file is larger than an update may be (admission.max_bytes)")
        content = await run_sync(upload.read)
    try:
        sealed = unseal(content, "answers", lambda header: _signer(federation, header))
        return await _entered(registry, federation, sealed, uploads)
    except AirlockError as error:
        raise BadAirlockFile(str(error)) from None


def _expect_airlock(federation: Federation) -> None:
    if federation.spec.secure_aggregation is not None:
        text = "every secure sum takes four exchanges, of which none can wait for files"
        raise NoAirlock(f"{federation.name} has secure sums, and {text}")
    if federation.spec.tuning is not None:
        raise NoAirlock(f"{federation.name} compares methods before round 1, in trials that need a network")


def _key_of(client: Client) -> bytes:
    if client.identity_key is None:
        raise NoAirlock(f"{client.name!r} has enrolled over the network: files are for clients that enrol by them")
    return bytes.fromhex(client.identity_key)


def _signer(federation: Federation, header: Mapping[str, Any]) -> bytes:
    """The key that a file must be signed with: that of its client, or its own where it enrols one."""
    if header.get("federation") != federation.id:
        raise AirlockError("the file belongs to another federation")
    client = federation.clients.get(str(header.get("client")))
    if client is not None:
        return _key_of(client)
    if header.get("request") != "enrol":
        raise AirlockError("no client of this name has enrolled: give the file with its enrolment first")
    return public_key(header.get("key"))


def _known_of(registry: Registry, federation: Federation, client: Client) -> dict[str, Any]:
    """What a file tells a client of itself: its id, what became of its last answers, and what it has spent."""
    with registry.database.read() as session:
        mine = queries.tasks_with_phases(federation.id).with_only_columns(TaskRow.id, TaskRow.status)
        last = mine.where(TaskRow.client == client.name, TaskRow.status != "open")
        rows = session.execute(last.order_by(TaskRow.opened_at.desc()).limit(MOST_RECEIPTS)).all()
        sent = select(UpdateRow.task_id, UpdateRow.sha256).where(UpdateRow.task_id.in_([row.id for row in rows]))
        digests: dict[str, str] = {row.task_id: row.sha256 for row in session.execute(sent)}
        spends = privacy.spends_of(session, federation, client)
    receipts = {row.id: {"status": row.status, "sha256": digests.get(row.id)} for row in rows}
    return {"client_id": client.id, "receipts": receipts, "spends": spends.model_dump(mode="json")}


async def _entered(registry: Registry, federation: Federation, sealed: Sealed, uploads: Uploads) -> AirlockReceipt:
    header, name = sealed.header, str(sealed.header["client"])
    kind, task_id = header.get("request"), str(header.get("task_id"))
    if kind == "enrol":
        new = await _enrolled(registry, federation, sealed)
        return AirlockReceipt(client=name, request="enrol", new=new)
    caller = CallingClient(federation, federation.clients[name])
    await run_sync(_expect_latest, registry, caller, task_id)
    if kind == "update":
        incoming = Incoming(_body_of(sealed.body), len(sealed.body), caller.client.id)
        _, new = await tasks.take_update(
            incoming, uploads, registry, caller, task_id, "sha256:" + str(header["body_sha256"])
        )
    elif kind == "evaluation":
        _, new = await tasks.take_evaluation(registry, caller, task_id, _parsed(EvaluationRequest, sealed.body))
    elif kind == "failure":
        failure, new = _parsed(FailureRequest, sealed.body), True
        await run_sync(submissions.accept_failure, registry, caller.federation, caller.client, task_id, failure)
    else:
        raise AirlockError("the file answers nothing that this coordinator knows: update the coordinator")
    return AirlockReceipt(client=name, request=kind, new=new)


async def _enrolled(registry: Registry, federation: Federation, sealed: Sealed) -> bool:
    """Enrol the client of a file; whether it is new. Its secret is made here: nobody can take its place online."""
    request, name = _parsed(EnrolRequest, sealed.body), sealed.header["client"]
    if (request.name, request.identity_key) != (name, sealed.header.get("key")):
        raise AirlockError("the file enrols another client than it names")
    if name in federation.clients:
        return False
    role = TokenRequest(uses=1, role=request.role)
    minted = await run_sync(tokens.mint, registry, federation.id, role, TOKEN_HOURS, None, request.name)
    request = request.model_copy(update={"secret": secrets.token_hex(32)})
    _, new = await enrol(registry, federation.id, request, digest(minted.token))
    return new


def _expect_latest(registry: Registry, caller: CallingClient, task_id: str) -> None:
    """Refuse answers to earlier tasks than the client's last one: files of earlier rounds, given again."""
    open_task = caller.federation.tasks.get(caller.client.name)
    with registry.database.read() as session:
        mine = queries.tasks_with_phases(caller.federation.id).with_only_columns(TaskRow.id)
        last = session.scalars(
            mine.where(TaskRow.client == caller.client.name, TaskRow.status == "answered")
            .order_by(TaskRow.settled_at.desc())
            .limit(1)
        ).first()
    if task_id not in (last, open_task.id if open_task is not None else None):
        raise problems.PhaseClosed("the file answers a task that is over: take the client's tasks again")


def _body_of(content: bytes) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    return receive


def _parsed(model: type[Model], content: bytes) -> Model:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise AirlockError(f"the file's answer cannot be read: {offence(error.errors(include_url=False)[0])}") from None
