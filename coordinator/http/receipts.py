"""The receipt of something stored, as an answer."""

from __future__ import annotations

from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from promptfed.shared.service.fault_points import point


class Stored(Response):
    """A receipt: 201 for what is new, 200 for what was there already."""

    media_type = "application/json"

    def __init__(self, receipt: BaseModel, new: bool):
        super().__init__(receipt.model_dump_json(), 201 if new else 200)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await super().__call__(scope, receive, send)
        point("answer-sent")
