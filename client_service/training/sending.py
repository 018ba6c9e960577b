"""Changes as they are sent: compressed, with what that loses kept for the next one (error feedback)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from promptfed.client_service.privacy.secure import Trained
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.messages import PayloadReceipt, Task, UpdateMetadata
from promptfed.shared.seeds import derive_seed
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.compression import compressed, decompressed, subtracted
from promptfed.shared.tensors.torch_tensors import arrays_of, decode_place, encode, tensors_of


def made_body(
    task: Task,
    client: str,
    trained: Trained,
    receipt: PayloadReceipt | None,
    payload: bytes | Path,
    state: PrivateState,
) -> tuple[bytes, Tensors]:
    """The body of an update, and the residual that is committed with it."""
    about = UpdateMetadata(
        task_id=task.task_id,
        payload_sha256=task.payload.sha256,
        metrics=dict(trained.metrics),
        privacy=trained.spent,
        receipt=receipt,
    )
    sent, residual = encoded(task, client, trained.update, payload, state)
    return encode(sent, about.model_dump()), residual


def encoded(
    task: Task, client: str, update: Tensors, payload: bytes | Path, state: PrivateState
) -> tuple[Tensors, Tensors]:
    """The tensors to send, and the residual that is committed with them.

    Sent is the change from the payload, plus the residual of the changes that were accepted before. The new residual is
    what the encoding loses. Draws follow from the task, so that a repetition sends the same bytes.
    """
    up, residual = task.config.compression.up, arrays_of(state.residual())
    if up == "none":
        return update, {}
    changes = subtracted(arrays_of(update), arrays_of(decode_place(payload)[0]))
    whole = {
        name: change + residual[name] if name in residual and residual[name].shape == change.shape else change
        for name, change in changes.items()
    }
    seed = derive_seed(task.config.seed, "compression", task.round, task.phase, client)
    sent = compressed(whole, up, np.random.default_rng(seed))
    expected = {name: (change.shape, change.dtype.name) for name, change in whole.items()}
    received = decompressed(sent, expected, up)
    lost = {name: whole[name] - received[name] for name in whole if whole[name].dtype == np.float32}
    return tensors_of(sent), tensors_of(residual | lost)
