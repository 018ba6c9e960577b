"""``.../tasks/{task}/update`` in several requests: how much has arrived, and what comes behind it."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Request, Response, status

from promptfed.coordinator import problems
from promptfed.coordinator.api import described
from promptfed.coordinator.api.deps import Calling, CallingClient, RegistryOf, TaskId
from promptfed.coordinator.api.federations import TENSOR_BODY
from promptfed.coordinator.api.tasks import ACCEPTED_BEFORE, ANSWERED, UPDATE
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http.resumable import (
    COMPLETE,
    LENGTH,
    NO,
    OFFSET,
    YES,
    Announced,
    AnnouncedPart,
    digest_of_file,
    receive,
)
from promptfed.coordinator.http.uploads import Incoming, Uploads
from promptfed.coordinator.operations import submissions
from promptfed.coordinator.store.fault_points import point
from promptfed.coordinator.store.partial_uploads import PartialUpload
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.api.api_schemas import UpdateReceipt

router = APIRouter(prefix="/v1/federations/{federation}", tags=["tasks"])

ABOUT = (problems.DigestMissing, problems.BadUploadHeaders, problems.BodyTooLarge, *ANSWERED)
Whole = Annotated[str | None, Header(description="SHA-256 of the whole body, `sha-256=:<base64>:` (RFC 9530)")]
Length = Annotated[str | None, Header(description="bytes of the whole body")]
Offset = Annotated[str | None, Header(description="how many bytes come before this part")]
Complete = Annotated[str | None, Header(description="`?1` with the last part, `?0` before")]


@router.head(
    "/tasks/{task_id}/update",
    status_code=status.HTTP_204_NO_CONTENT,
    responses={
        204: {"description": "`Upload-Offset`: bytes that have arrived; `Upload-Complete: ?1`: it was accepted"},
        **described.for_clients(*ABOUT),
    },
)
async def head_update(
    request: Request,
    registry: RegistryOf,
    caller: Calling,
    task_id: TaskId,
    repr_digest: Whole = None,
    upload_length: Length = None,
) -> Response:
    """How much of an update has arrived. A part that is under way is ended, so that this stays true."""
    whole = Announced.of(request.headers, caller.federation.update_limit)
    async with _held(registry, caller, task_id, whole) as partial:
        if await run_sync(_is_accepted, registry, caller, task_id, whole):
            return _told(whole.length, whole, YES)
        return _told(await run_sync(partial.size), whole, NO)


@router.patch(
    "/tasks/{task_id}/update",
    status_code=status.HTTP_201_CREATED,
    response_model=UpdateReceipt,
    responses={
        **ACCEPTED_BEFORE,
        204: {"description": "the part is kept, and more is waited for from `Upload-Offset` on"},
        **described.for_clients(
            *ABOUT,
            problems.MismatchingOffset,
            problems.InconsistentLength,
            problems.DigestMismatch,
            *UPDATE,
        ),
    },
    openapi_extra=TENSOR_BODY,
)
async def patch_update(
    request: Request,
    registry: RegistryOf,
    caller: Calling,
    task_id: TaskId,
    response: Response,
    repr_digest: Whole = None,
    upload_length: Length = None,
    upload_offset: Offset = None,
    upload_complete: Complete = None,
) -> UpdateReceipt | Response:
    """A part of an update, behind what has arrived; the last one answers the task as ``PUT`` does."""
    body, uploads = Incoming.of(request), request.app.state.uploads
    whole = Announced.of(request.headers, caller.federation.update_limit)
    part = AnnouncedPart.of(request.headers, whole, body.length)
    async with _held(registry, caller, task_id, whole) as partial:
        if await run_sync(_is_accepted, registry, caller, task_id, whole):
            response.status_code = status.HTTP_200_OK
            return _receipt(task_id, whole)
        reached = await receive(body, part, partial, registry.blobs.partial, uploads)
        if not part.is_last:
            return _told(reached, whole, NO)
        if reached != whole.length:
            text = f"{reached} bytes have arrived with the last part, and {LENGTH} is {whole.length}"
            raise problems.InconsistentLength(text)
        new = await _accept(registry, uploads, caller, task_id, partial, whole, body)
    if not new:
        response.status_code = status.HTTP_200_OK
    return _receipt(task_id, whole)


def _held(
    registry: Registry, caller: CallingClient, task_id: str, whole: Announced
) -> AbstractAsyncContextManager[PartialUpload]:
    id = caller.federation.id
    return registry.blobs.partial.held(id, caller.client.id, task_id, whole.digest, whole.length)


def _is_accepted(registry: Registry, caller: CallingClient, task_id: str, whole: Announced) -> bool:
    """Whether just this update has been accepted; refuses what can no longer be, before anything of it is read."""
    federation = caller.federation
    task = submissions.asked_task(registry.database, federation, caller.client, task_id)
    accepted = submissions.decided(federation, task, "train", whole.digest)
    if not accepted:
        submissions.expect_fitting(federation, caller.client, task, whole.length)
    # What was accepted and is damaged is taken again.
    return accepted and not (federation.run.is_damaged and caller.client.name in federation.resend)


async def _accept(
    registry: Registry,
    uploads: Uploads,
    caller: CallingClient,
    task_id: str,
    partial: PartialUpload,
    whole: Announced,
    body: Incoming,
) -> bool:
    """Admit what has arrived whole; whether it is new. It is kept where the fault is not its own."""
    async with uploads.place(body):
        with registry.metrics.receiving.time(), registry.committer.coming():
            path = registry.blobs.temporary()
            try:
                upload = await run_sync(_whole, registry, partial, path, whole)
                point("update-received")
                new = await submissions.accept_update(registry, caller.federation, caller.client, task_id, upload)
            except problems.Refusal as refusal:
                if refusal.status < 500:
                    await run_sync(partial.remove)
                raise
            finally:
                await run_sync(lambda: path.unlink(missing_ok=True))
            await run_sync(partial.remove)
    return new


def _whole(registry: Registry, partial: PartialUpload, path: Path, whole: Announced) -> Upload:
    """What has arrived as an upload of its own, so that a crash before it is accepted leaves what has arrived.

    Raises DigestMismatch.
    """
    digest = digest_of_file(partial)
    if digest != whole.digest:
        text = f"the body has digest {digest}; {whole.digest} was announced: send it again from the beginning"
        raise problems.DigestMismatch(text)
    content = partial.path.read_bytes() if registry.blobs.is_small(whole.length) else None
    if content is None:
        try:
            os.link(partial.path, path)
        except OSError:
            shutil.copyfile(partial.path, path)  # a file system without links
    return Upload(path, whole.length, whole.digest, content=content)


def _told(reached: int, whole: Announced, complete: str) -> Response:
    headers = {OFFSET: str(reached), LENGTH: str(whole.length), COMPLETE: complete}
    return Response(status_code=status.HTTP_204_NO_CONTENT, headers=headers)


def _receipt(task_id: str, whole: Announced) -> UpdateReceipt:
    return UpdateReceipt(task_id=task_id, status="accepted", sha256=whole.digest)
