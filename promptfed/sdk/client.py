"""A coordinator's API as the command sees it: one client, errors in one line that says what to do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from promptfed.sdk.exit_codes import Exit

DEFAULT_URL = "http://127.0.0.1:8080"
URL_VARIABLE = "PROMPTFED_COORDINATOR"
RESTART_SECONDS = 60.0
RETRY_SECONDS = 0.2
TOKEN_VARIABLE = "PROMPTFED_OPERATOR_TOKEN"  # noqa: S105 (a variable's name)


class CommandError(Exception):
    """Ends the command: ``text`` goes to stderr in one line, ``exit`` is the exit code."""

    def __init__(self, text: str, exit: Exit):
        super().__init__(text)
        self.exit = exit


@dataclass
class Answer:
    """A successful answer: status, headers and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    json: Any


class Coordinator:
    """Calls one coordinator with an operator token.

    Where the coordinator is our own process, ``meanwhile`` (which starts it again) is called while it is away, and what
    can be asked again without harm is asked again for a minute.
    """

    def __init__(self, url: str, token: str, timeout: float = 60.0, meanwhile: Callable[[], object] | None = None):
        self.url = url.rstrip("/")
        self._meanwhile = meanwhile
        self._http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=timeout)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the connections go."""
        self._http.close()

    def call(self, verb: str, path: str, **request: Any) -> Answer:
        """Send one request.

        Raises:
            CommandError: the coordinator cannot be reached, or it refused; the problem's detail and path are told.
        """
        try:
            response = self._send(verb, path, **request)
        except httpx.TransportError as error:
            text = f"cannot reach the coordinator at {self.url} ({error}): is it running? See --coordinator"
            raise CommandError(text, Exit.UNREACHABLE) from None
        is_json = "json" in response.headers.get("content-type", "")
        if response.is_success:
            body = response.json() if is_json and response.content else None
            return Answer(response.status_code, response.headers, response.content, body)
        raise CommandError(*_refusal(response, response.json() if is_json else {}))

    def _send(self, verb: str, path: str, **request: Any) -> httpx.Response:
        deadline = time.monotonic() + RESTART_SECONDS
        while True:
            try:
                return self._http.request(verb, path, **request)
            except httpx.TransportError as error:
                # What was not sent, or only reads, can be sent again.
                harmless = verb == "GET" or isinstance(error, httpx.ConnectError)
                if self._meanwhile is None or not harmless or time.monotonic() > deadline:
                    raise
            self._meanwhile()
            time.sleep(RETRY_SECONDS)

    def get(self, path: str, **query: Any) -> Any:
        """The JSON that ``path`` answers."""
        return self.call("GET", path, params=query).json

    def post(self, path: str, body: Any = None, **request: Any) -> Any:
        """The JSON that ``path`` answers to ``body``."""
        return self.call("POST", path, json=body, **request).json


def _refusal(response: httpx.Response, problem: dict[str, Any]) -> tuple[str, Exit]:
    detail = problem.get("detail") or problem.get("title") or response.reason_phrase
    places = "; ".join(f"{item['path']}: {item['detail']}" for item in problem.get("errors", []) if "path" in item)
    text = f"{detail}{f' ({places})' if places and places not in str(detail) else ''}"
    if not problem:
        return f"{response.url} answers {response.status_code} {text}: is that a coordinator's address?", Exit.FAILED
    if response.status_code in (401, 403):
        return f"{text}: give the operator token with --token-file or {TOKEN_VARIABLE}", Exit.NOT_ALLOWED
    return text, Exit.REFUSED if response.status_code < 500 else Exit.FAILED


def open_coordinator(url: str | None, token_file: Path | None) -> Coordinator:
    """The coordinator of the options, or of the environment.

    Raises:
        CommandError: no operator token, or a file that cannot be read.
    """
    address = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except OSError as error:
            raise CommandError(f"cannot read the token file {token_file}: {error.strerror}", Exit.BAD_INPUT) from None
    else:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        text = (
            f"no operator token: give --token-file (it lies in the coordinator's data folder) or set {TOKEN_VARIABLE}"
        )
        raise CommandError(text, Exit.NOT_ALLOWED)
    return Coordinator(address, token)
