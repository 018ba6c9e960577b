"""Updates as they are sent: their dtype, their compression, their metadata."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from promptfed.client_service.privacy.secure import Trained
from promptfed.shared.messages import Task, UpdateMetadata
from promptfed.shared.methods.core.interface import MethodError, Phase, TrainResult
from promptfed.shared.seeds import derive_seed
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.compression import compressed, subtracted
from promptfed.shared.tensors.torch_tensors import DTYPES, arrays_of, decode_place, encode, tensors_of


def made_body(task: Task, client: str, trained: Trained, payload: bytes | Path) -> bytes:
    """The body of an update."""
    about = UpdateMetadata(
        task_id=task.task_id, payload_sha256=task.payload.sha256, metrics=dict(trained.metrics), privacy=trained.spent
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


def sent(phase: Phase, result: TrainResult) -> Tensors:
    """The update as it is sent. Raises MethodError if it is not finite."""
    dtypes = {spec.name: DTYPES[spec.dtype] for spec in phase.up}
    update = {name: as_sent(tensor, dtypes.get(name)) for name, tensor in result.update.items()}
    for name, tensor in update.items():
        if not bool(torch.isfinite(tensor).all()):
            raise MethodError(f"the trained tensor {name!r} holds NaN or infinity: lower training.learning_rate")
    return update


def as_sent(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """In float32, whatever the backbone's precision, or in bfloat16 if the phase's ``dtype`` asks for it."""
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor
    return tensor.bfloat16() if dtype == torch.bfloat16 else tensor.float()
