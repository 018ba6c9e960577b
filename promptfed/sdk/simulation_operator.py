"""The operator's side of a federation whose coordinator lives in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx

from promptfed.sdk.client import CommandError
from promptfed.sdk.exit_codes import Exit
from promptfed.shared.messages import Problem

PAGE = 20  # reports of rounds that are asked for at once: with a thousand clients each has megabytes


class Operator:
    """Calls one coordinator over ``http`` with the operator token."""

    def __init__(self, http: httpx.AsyncClient, token: str):
        self._http = http
        self._headers = {"Authorization": f"Bearer {token}"}

    async def call(self, verb: str, path: str, **request: Any) -> httpx.Response:
        """A successful answer.

        Raises:
            CommandError: the coordinator refused, with its reason.
        """
        headers = self._headers | request.pop("headers", {})
        answer = await self._http.request(verb, path, headers=headers, **request)
        if not answer.is_success:
            problem = Problem.model_validate_json(answer.content)
            raise CommandError(problem.detail, Exit.REFUSED if answer.status_code < 500 else Exit.FAILED)
        return answer

    async def get(self, path: str, **query: Any) -> Any:
        """The JSON that ``path`` answers."""
        return (await self.call("GET", path, params=query)).json()

    async def post(self, path: str, body: Any = None) -> Any:
        """The JSON that ``path`` answers to ``body``."""
        return (await self.call("POST", path, json=body)).json()

    async def pages(self, path: str, key: str) -> AsyncIterator[dict[str, Any]]:
        """Everything on the pages of a list."""
        after: str | None = None
        while True:
            page = await self.get(path, limit=PAGE, **({"after": after} if after is not None else {}))
            for item in page[key]:
                yield item
            after = page["next"]
            if after is None:
                return
