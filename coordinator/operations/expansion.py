"""Compressed updates become plain ones before anything is checked or stored: rules, norms and replay see only these."""

from __future__ import annotations

import math
import os
import threading
from contextlib import nullcontext
from dataclasses import replace

from promptfed.coordinator.domain.federation import Client, Federation, OpenTask
from promptfed.coordinator.store.blobs import Blobs, digest_of, digest_of_file
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.methods.core.sizes import LARGE
from promptfed.shared.tensors import DTYPES, decode_place, encode, encode_file
from promptfed.shared.tensors.compression import added, decompressed

_one_large = threading.Lock()
"""Of large updates one at a time is expanded: some kilobytes may stand for hundreds of megabytes."""


def expanded(blobs: Blobs, federation: Federation, client: Client, task: OpenTask, upload: Upload) -> Upload:
    """The update that a compressed change makes of its task's payload; as it is without compression.

    A large one is the file at the upload's path, also where the change was in memory.

    Raises:
        TensorError: the tensors are not those of a compressed change.
    """
    up = federation.spec.compression.up
    if up == "none":
        return upload
    phase = federation.method_phase(task.round, task.step)
    expected = federation.method.expected_update(phase, client.info(), federation.context())
    size = sum(math.prod(shape) * DTYPES[dtype].itemsize for shape, dtype in expected.values())
    payload = decode_place(blobs.place(task.payload_sha256 or ""))[0]
    with _one_large if size >= LARGE else nullcontext():
        tensors, metadata = upload.tensors()
        update = added(decompressed(tensors, expected, up), payload)
        if upload.content is not None and blobs.is_small(size):
            content = encode(update, metadata)
            return replace(upload, content=content, size=len(content), sha256=digest_of(content))
        draft = upload.path.with_suffix(".expanded")
        try:
            encode_file(update, draft, metadata)
            os.replace(draft, upload.path)
        finally:
            draft.unlink(missing_ok=True)
    size = upload.path.stat().st_size
    return replace(upload, content=None, size=size, sha256=digest_of_file(upload.path) or "")
