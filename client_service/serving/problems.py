"""Refusals of the client's API."""

from __future__ import annotations

from typing import Any

from promptfed.shared.messages import PROBLEM_BASE, Problem


class ApiProblem(Exception):
    """A refusal of this API."""

    def __init__(self, status: int, kind: str, title: str, detail: str, headers: dict[str, str] | None = None):
        super().__init__(detail)
        self.problem = Problem(type=PROBLEM_BASE + kind, title=title, status=status, detail=detail)
        self.headers = headers


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route as OpenAPI describes them."""
    content = {"application/problem+json": {"schema": Problem.model_json_schema()}}
    return {status: {"description": "Refused", "content": content} for status in statuses}
