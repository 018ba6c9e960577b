"""Bodies of the airlock's routes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from promptfed.shared.messages import Message
from promptfed.shared.spec.spec import Name


class AirlockRequest(Message):
    """Whose tasks are asked for: a client that takes part by files, or will."""

    client: Name


class AirlockReceipt(Message):
    """What a client's file has done; ``new`` is false where it had been given before."""

    client: str
    request: Annotated[Literal["enrol", "update", "evaluation", "failure"], Field(description="what the file held")]
    new: bool
