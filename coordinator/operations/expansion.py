"""Compressed updates become plain ones before anything is checked or stored: rules, norms and replay see only these."""

from __future__ import annotations

import os
from dataclasses import replace

from promptfed.coordinator.domain.federation import Client, Federation, OpenTask
from promptfed.coordinator.store.blobs import Blobs, digest_of, digest_of_file
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.tensors import decode_place, encode, encode_file
from promptfed.shared.tensors.compression import added, decompressed


def expanded(blobs: Blobs, federation: Federation, client: Client, task: OpenTask, upload: Upload) -> Upload:
    """The update that a compressed change makes of its task's payload; as it is without compression.

    Raises:
        TensorError: the tensors are not those of a compressed change.
    """
    up = federation.spec.compression.up
    if up == "none":
        return upload
    tensors, metadata = upload.tensors()
    phase = federation.method_phase(task.round, task.step)
    expected = federation.method.expected_update(phase, client.info(), federation.context())
    changes = decompressed(tensors, expected, up)
    update = added(changes, decode_place(blobs.place(task.payload_sha256 or ""))[0])
    if upload.content is not None:
        content = encode(update, metadata)
        return replace(upload, content=content, size=len(content), sha256=digest_of(content))
    draft = upload.path.with_suffix(".expanded")
    try:
        encode_file(update, draft, metadata)
        os.replace(draft, upload.path)
    finally:
        draft.unlink(missing_ok=True)
    return replace(upload, size=upload.path.stat().st_size, sha256=digest_of_file(upload.path) or "")
