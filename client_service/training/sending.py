"""Changes as they are sent, compressed where the federation wants it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from promptfed.client_service.privacy.secure import Trained
from promptfed.shared.messages import Task, UpdateMetadata
from promptfed.shared.seeds import derive_seed
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.compression import compressed, subtracted
from promptfed.shared.tensors.torch_tensors import arrays_of, decode_place, encode, tensors_of


def made_body(
    task: Task,
    client: str,
    trained: Trained,
    payload: bytes | Path,
) -> bytes:
    """The body of an update."""
    about = UpdateMetadata(
        task_id=task.task_id,
        payload_sha256=task.payload.sha256,
        metrics=dict(trained.metrics),
        privacy=trained.spent,
    )
    return encode(encoded(task, client, trained.update, payload), about.model_dump())


def encoded(task: Task, client: str, update: Tensors, payload: bytes | Path) -> Tensors:
    """The tensors to send: with compression, the encoded change from the payload.

    Draws follow from the task, so that a repetition sends the same bytes.
    """
    up = task.config.compression.up
    if up == "none":
        return update
    changes = subtracted(arrays_of(update), arrays_of(decode_place(payload)[0]))
    seed = derive_seed(task.config.seed, "compression", task.round, task.phase, client)
    return tensors_of(compressed(changes, up, np.random.default_rng(seed)))
