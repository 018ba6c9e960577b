"""What a refusal is: status, kind, title and a sentence, answered as RFC 9457 problem details."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from promptfed.shared.messages import PROBLEM_BASE
from promptfed.shared.service.reasons import offence

MEDIA_TYPE = "application/problem+json"


def first_error(error: ValidationError, whole: str = "(body)") -> str:
    """The first offence in a model: its place (``whole``: the model itself) and what is wrong, without the input."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc']) or whole}: {offence(first)}"


class Refusal(Exception):
    """Base of all refusals. ``detail`` says in one sentence what is wrong and what to do."""

    status: ClassVar[int]
    kind: ClassVar[str]
    title: ClassVar[str]
    retry_after: ClassVar[int | None] = None

    def __init_subclass__(
        cls, *, title: str, kind: str | None = None, status: int | None = None, retry_after: int | None = None
    ) -> None:
        """Declare a refusal.

        kind: the class's name in lower case with hyphens unless given. status: that of the base class, or of each
        instance, unless given. retry_after: seconds.
        """
        super().__init_subclass__()
        cls.kind = kind or re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()
        cls.title = title
        if retry_after is not None:
            cls.retry_after = retry_after
        if status is not None:
            cls.status = status

    def __init__(self, detail: str, *, headers: dict[str, str] | None = None, **members: Any):
        super().__init__(detail)
        self.detail = detail
        self.headers = headers or {}
        if self.retry_after is not None:
            self.headers.setdefault("Retry-After", str(self.retry_after))
        self.members = members

    def response(self, instance: str) -> JSONResponse:
        """The answer; ``instance`` is the path that was asked for."""
        content = {
            "type": PROBLEM_BASE + self.kind,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "instance": instance,
            **self.members,
        }
        return JSONResponse(content, self.status, self.headers, MEDIA_TYPE)
