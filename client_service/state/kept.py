"""What a client's state folder holds, as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from promptfed.client_service.http.bodies import Body
from promptfed.shared.messages import Role, TaskConfig


@dataclass(frozen=True)
class Identity:
    """Who this client is to the coordinator. ``secret`` (256 bits, hex) is its bearer token.

    ``form``: of the files in its state folder; 0: of promptfed before 0.4.0.
    """

    name: str
    role: Role
    secret: str
    federation_id: str | None = None
    client_id: str | None = None
    form: int = 0


@dataclass(frozen=True)
class TensorOrigin:
    """Where private tensors come from: the task that made them, and the peers for which they were prepared."""

    task_id: str | None = None
    round: int = 0
    phase: str = ""
    peers: str | None = None
    privacy: str = "none"  # sample: trained under differential privacy


@dataclass(frozen=True)
class Pending:
    """An update that is ready to be sent. It is sent with the same bytes every time."""

    task_id: str
    round: int
    phase: str
    update: Body


@dataclass(frozen=True)
class Serving:
    """The last evaluation's payload, from which predictions are made."""

    round: int
    phase: str
    config: TaskConfig
    payload: bytes | Path
