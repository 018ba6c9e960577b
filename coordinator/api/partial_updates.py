"""``.../tasks/{task}/update`` in several requests: how much has arrived, and further parts."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, Request, Response, status

from promptfed.coordinator import problems
from promptfed.coordinator.api import described
from promptfed.coordinator.api.deps import Calling, CallingClient, RegistryOf, TaskId, answered
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


@dataclass(frozen=True)
class _Sending:
    """A request about an update that is sent in parts. ``whole``: the digest and length of all parts together."""

    registry: Registry
    caller: CallingClient
    task_id: str
    whole: Announced

    def held(self) -> AbstractAsyncContextManager[PartialUpload]:
        """A block in which this request alone works with the received part."""
        federation, client = self.caller.federation.id, self.caller.client.id
        partial = self.registry.blobs.partial
        return partial.held(federation, client, self.task_id, self.whole.digest, self.whole.length)

    def is_accepted(self) -> bool:
        """Whether this update was accepted before. Refuses one that cannot be accepted, before anything is read."""
        federation, client = self.caller.federation, self.caller.client
        task = submissions.asked_task(self.registry.database, federation, client, self.task_id)
        accepted = submissions.decided(federation, task, "train", self.whole.digest)
        if not accepted:
            submissions.expect_fitting(federation, client, task, self.whole.length)
        # An accepted update that is damaged is taken again.
        return accepted and not (federation.run.is_damaged and client.name in federation.resend)

    async def accept(self, uploads: Uploads, partial: PartialUpload, body: Incoming) -> bool:
        """Admit the complete update; returns whether it is new. The part stays if the coordinator is at fault."""
        registry, caller = self.registry, self.caller
        async with uploads.place(body):
            with registry.metrics.receiving.time(), registry.committer.coming():
                path = registry.blobs.temporary()
                try:
                    upload = await run_sync(self._upload, partial, path)
                    point("update-received")
                    new = await submissions.accept_update(
                        registry, caller.federation, caller.client, self.task_id, upload
                    )
                except problems.Refusal as refusal:
                    if refusal.status < 500:
                        await run_sync(partial.remove)
                    raise
                finally:
                    await run_sync(lambda: path.unlink(missing_ok=True))
                await run_sync(partial.remove)
        return new

    def _upload(self, partial: PartialUpload, path: Path) -> Upload:
        """The complete body at ``path``. The part stays, for a crash before the update is accepted.

        Raises DigestMismatch.
        """
        whole = self.whole
        digest = digest_of_file(partial)
        if digest != whole.digest:
            text = f"the body has digest {digest}; {whole.digest} was announced: send it again from the beginning"
            raise problems.DigestMismatch(text)
        content = partial.path.read_bytes() if self.registry.blobs.is_small(whole.length) else None
        if content is None:
            try:
                os.link(partial.path, path)
            except OSError:
                shutil.copyfile(partial.path, path)  # a file system without links
        return Upload(path, whole.length, whole.digest, content=content)

    def progress(self, reached: int, complete: str) -> Response:
        """The answer that tells how many bytes have arrived."""
        headers = {OFFSET: str(reached), LENGTH: str(self.whole.length), COMPLETE: complete}
        return Response(status_code=status.HTTP_204_NO_CONTENT, headers=headers)

    def receipt(self, response: Response, new: bool) -> UpdateReceipt:
        """The receipt of an accepted update."""
        return answered(response, new, UpdateReceipt(task_id=self.task_id, status="accepted", sha256=self.whole.digest))


async def _sending(
    request: Request,
    registry: RegistryOf,
    caller: Calling,
    task_id: TaskId,
    repr_digest: Annotated[
        str | None, Header(description="SHA-256 of the whole body, `sha-256=:<base64>:` (RFC 9530)")
    ] = None,
    upload_length: Annotated[str | None, Header(description="bytes of the whole body")] = None,
) -> _Sending:
    return _Sending(registry, caller, task_id, Announced.of(request.headers, caller.federation.update_limit))


Sending = Annotated[_Sending, Depends(_sending)]


@router.head(
    "/tasks/{task_id}/update",
    status_code=status.HTTP_204_NO_CONTENT,
    responses={
        204: {"description": "`Upload-Offset`: bytes that have arrived; `Upload-Complete: ?1`: it was accepted"},
        **described.for_clients(*ABOUT),
    },
)
async def head_update(sending: Sending) -> Response:
    """How much of an update has arrived. A request that is still sending a part is ended first."""
    async with sending.held() as partial:
        if await run_sync(sending.is_accepted):
            return sending.progress(sending.whole.length, YES)
        return sending.progress(await run_sync(partial.size), NO)


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
    sending: Sending,
    response: Response,
    upload_offset: Annotated[str | None, Header(description="how many bytes come before this part")] = None,
    upload_complete: Annotated[str | None, Header(description="`?1` with the last part, `?0` before")] = None,
) -> UpdateReceipt | Response:
    """Add a part to an update. The last part answers the task as ``PUT`` does."""
    body, uploads, whole = Incoming.of(request), request.app.state.uploads, sending.whole
    part = AnnouncedPart.of(request.headers, whole, body.length)
    async with sending.held() as partial:
        if await run_sync(sending.is_accepted):
            return sending.receipt(response, new=False)
        reached = await receive(body, part, partial, sending.registry.blobs.partial, uploads)
        if not part.is_last:
            return sending.progress(reached, NO)
        if reached != whole.length:
            text = f"{reached} bytes have arrived with the last part, and {LENGTH} is {whole.length}"
            raise problems.InconsistentLength(text)
        return sending.receipt(response, await sending.accept(uploads, partial, body))
