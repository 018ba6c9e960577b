"""The operator's client of a coordinator's API: requests, answers, and the two transports that carry them.

Operations (`promptfed.sdk.operations`) do not depend on the transport: an operation is a generator that yields requests
and receives their answers. `Coordinator` sends them over a network, `AsyncCoordinator` within this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from promptfed.shared.calls import asked, read_answer
from promptfed.shared.errors import (
    BadInput,
    CommandError,
    Failed,
    NotAllowed,
    PromptfedError,
    Refused,
    Unreachable,
    offences,
)
from promptfed.shared.service import digests
from promptfed.shared.service.addresses import (
    GONE_SECONDS,
    QUIET_SECONDS,
    Addresses,
    address_parts,
    addresses_of,
    is_loopback,
)
from promptfed.shared.service.digests import Damaged
from promptfed.shared.service.net import PROXY_LOGIN, explained, http_options, refused_by_proxy, trust
from promptfed.shared.service.reasons import first_error, why
from promptfed.shared.versions import PROTOCOL

__all__ = ["CommandError"]

DEFAULT_URL = "http://127.0.0.1:8080"
URL_VARIABLE = "PROMPTFED_COORDINATOR"
CA_VARIABLE, PLAIN_VARIABLE = "PROMPTFED_CA_FILE", "PROMPTFED_ALLOW_PLAIN_HTTP"
PROXY_VARIABLE = "PROMPTFED_PROXY"
RESTART_SECONDS = 60.0
TAKEOVER_SECONDS = 20.0
RETRY_SECONDS = 0.2
PASSING = (httpx.TransportError, httpx.DecodingError, Damaged)
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
MOVING = ("store-away", "not-ready")  # 503s that another coordinator may not give
TOKEN_VARIABLE = "PROMPTFED_OPERATOR_TOKEN"  # noqa: S105 (a variable's name)
View = TypeVar("View", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True)
class Request(Generic[View]):
    """One request and the model of its answer; ``options`` are httpx's params, json, content, headers and timeout."""

    verb: str
    path: str
    model: type[View]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer(Generic[View]):
    """A successful answer. Its body can be large and is parsed when ``json`` or ``view`` is first read."""

    model: type[View]
    url: str
    headers: Mapping[str, str]
    body: bytes

    @cached_property
    def json(self) -> Any:
        """The answer with all keys, including unknown ones. Raises PromptfedError if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise Failed(f"{self.url} answers no JSON: is that a coordinator's address?") from None

    @cached_property
    def view(self) -> View:
        """The answer as a model, without unknown keys. Raises PromptfedError if it does not fit."""
        return parse(self.model, self.json)


def parse(model: type[View], raw: object) -> View:
    """Parse a coordinator's answer as ``model``; keys of a later version are ignored.

    Raises:
        PromptfedError: a field is missing, or has a value that this promptfed does not know.
    """
    try:
        return model.model_validate(raw, extra="ignore")
    except ValidationError as error:
        text = f"this promptfed does not understand the coordinator's answer ({first_error(error)})"
        raise Failed(f"{text}: use the coordinator's version") from None


Operation = Generator[Request[Any], Answer[Any], T]


class Coordinator:
    """Calls one coordinator, or several that wait for each other, at addresses separated by commas, with an operator
    token.

    If one does not answer or waits, the next is asked: with requests that only read or were not sent, for
    `TAKEOVER_SECONDS`.

    If this process has started the coordinator, ``meanwhile`` restarts it. It is called while the coordinator does not
    answer; requests that can safely be repeated are repeated for a minute.

    Raises:
        PromptfedError: the token would be sent unencrypted to another machine, or the file of certificate authorities
                or the proxy cannot be used.
    """

    def __init__(self, url: str, token: str, timeout: float = 60.0, meanwhile: Callable[[], object] | None = None):
        self.url = ",".join(addresses_of(url))
        self._addresses = Addresses(self.url)
        self._meanwhile = meanwhile
        self._served = False  # whether a coordinator has answered: somebody else's answers then pass
        self._http = httpx.Client(headers=_authorization(token), timeout=timeout, **_connection(self.url))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._http.is_closed

    def run(self, operation: Operation[T]) -> T:
        """The result of ``operation``. Raises PromptfedError as `send` does."""
        try:
            request = next(operation)
            while True:
                request = operation.send(self.send(request))
        except StopIteration as end:
            result: T = end.value
            return result

    def send(self, request: Request[View]) -> Answer[View]:
        """The answer to one request. What was damaged on the way is sent again where that is safe.

        Raises:
            PromptfedError: the coordinator cannot be reached, or refuses; the text has the problem's detail and path.
        """
        if self.is_closed:
            raise BadInput(f"the connection to {self.url} is closed: connect again")
        try:
            return _answer(request, self._response(request))
        except PASSING as error:
            text = f"cannot reach the coordinator at {self.url} ({why(error)}): is it running? See --coordinator"
            if isinstance(error, (Damaged, httpx.DecodingError)):
                text = _unusable(request, error)
            elif request.verb != "GET" and not isinstance(error, UNSENT):
                text = f"{self._addresses.failed} took the request and gives no answer: look before you repeat it"
            raise Unreachable(explained(error, self._addresses.failed) or text) from None

    def _response(self, request: Request[View]) -> httpx.Response:
        deadline = time.monotonic() + (RESTART_SECONDS if self._meanwhile is not None else TAKEOVER_SECONDS)
        while True:
            try:
                response = self._answered(request)
                ours = PROTOCOL in response.headers
                self._served |= ours
                may_pass = self._is_moving(response) or (self._served and not ours and request.verb == "GET")
                if not may_pass or time.monotonic() > deadline:
                    return response
            except PASSING as error:
                # A request that was not sent or taken, or that only reads, can be sent again.
                harmless = request.verb == "GET" or isinstance(error, (httpx.ConnectError, Damaged))
                damaged = isinstance(error, (Damaged, httpx.DecodingError))
                may_help = self._meanwhile is not None or self._addresses.several or damaged
                if not may_help or not harmless or time.monotonic() > deadline:
                    raise
            if self._meanwhile is not None:
                self._meanwhile()
            time.sleep(RETRY_SECONDS)

    def _answered(self, request: Request[Any]) -> httpx.Response:
        """The answer of the address that comes first now; behind one that does not work the next comes first."""
        with asked(self._addresses, PASSING) as address:
            response = _received(request, self._asked(address, request))
        if self._is_moving(response):
            self._addresses.move_on()
        return response

    def _is_moving(self, response: httpx.Response) -> bool:
        """Whether another coordinator will answer soon, also behind one address."""
        kind = _kind(_problem(response)) if response.status_code == 503 else ""
        return kind == "waiting" or (self._addresses.several and kind in MOVING)

    def _asked(self, address: str, request: Request[Any]) -> httpx.Response:
        """The answer of one coordinator. With several of them, one that is gone is given up after some seconds."""
        send = partial(self._http.send, _built(self._http, request, address + request.path))
        if not self._addresses.several:
            return send()
        if request.verb != "GET" and not self._is_there(address):
            raise httpx.ConnectError(f"{address} does not answer")
        answer: Future[httpx.Response] = Future()

        def run() -> None:
            try:
                answer.set_result(send())
            except BaseException as error:
                answer.set_exception(error)

        # A thread that nobody waits for: where the coordinator hangs, it would take the request's whole time.
        threading.Thread(target=run, daemon=True).start()
        while not wait([answer], QUIET_SECONDS).done:
            if not self._is_there(address):
                raise httpx.ReadTimeout(f"{address} does not answer any more")
        return answer.result()

    def _is_there(self, address: str) -> bool:
        try:
            return self._http.get(f"{address}/readyz", timeout=GONE_SECONDS - QUIET_SECONDS).is_success
        except httpx.TransportError:
            return False


class AsyncCoordinator:
    """Calls one coordinator with an operator token over an ``http`` client, which may be shared."""

    def __init__(self, http: httpx.AsyncClient, token: str):
        self._http, self._authorization = http, _authorization(token)

    async def run(self, operation: Operation[T]) -> T:
        """As `Coordinator.run`."""
        try:
            request = next(operation)
            while True:
                request = operation.send(await self.send(request))
        except StopIteration as end:
            result: T = end.value
            return result

    async def send(self, request: Request[View]) -> Answer[View]:
        """The answer to one request, as of `Coordinator.send`. Raises PromptfedError, httpx.TransportError."""
        until = time.monotonic() + TAKEOVER_SECONDS
        while True:
            sent = _built(self._http, request, request.path)
            sent.headers.update(self._authorization)
            try:
                return _answer(request, _received(request, await self._http.send(sent)))
            except (Damaged, httpx.DecodingError) as error:
                harmless = request.verb == "GET" or isinstance(error, Damaged)
                if not harmless or time.monotonic() > until:
                    raise Unreachable(_unusable(request, error)) from None
            await asyncio.sleep(RETRY_SECONDS)


def _built(http: httpx.Client | httpx.AsyncClient, request: Request[Any], url: str) -> httpx.Request:
    """A request with the digest of its body."""
    built = http.build_request(request.verb, url, **request.options)
    if built.content:
        built.headers[digests.CONTENT] = digests.field_of(built.content)
    return built


def _received(request: Request[Any], response: httpx.Response) -> httpx.Response:
    """The answer, if it can be what the coordinator sent.

    Raises:
        Damaged: it cannot, and the request can safely be sent again.
        PromptfedError: it cannot, and the coordinator has done what was asked.
    """
    try:
        proven, _ = read_answer(response, response.content)
        has_json = "json" in response.headers.get("content-type", "") and response.status_code != httpx.codes.NO_CONTENT
        if not proven and PROTOCOL in response.headers and has_json:
            response.json()
    except (Damaged, ValueError) as error:
        damaged = error if isinstance(error, Damaged) else Damaged("it is not JSON")
        if request.verb == "GET" or not response.is_success:
            raise damaged from None
        raise Unreachable(_unusable(request, damaged)) from None
    return response


def _unusable(request: Request[Any], error: Exception) -> str:
    look = "" if request.verb == "GET" else "look before you repeat it; "
    return f"no answer to {request.verb} {request.path} that can be used ({error}): {look}{digests.CHANGED}"


def _authorization(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _answer(request: Request[View], response: httpx.Response) -> Answer[View]:
    if response.is_success:
        return Answer(request.model, str(response.url), response.headers, response.content)
    problem = _problem(response)
    raise _refusal(response, problem)


def _kind(problem: Mapping[str, Any]) -> str:
    return str(problem.get("type", "")).rpartition("/")[2]


def _problem(response: httpx.Response) -> Mapping[str, Any]:
    with suppress(ValueError):
        problem = response.json() if "json" in response.headers.get("content-type", "") else None
        if isinstance(problem, dict):
            return problem
    return {}


def _refusal(response: httpx.Response, problem: Mapping[str, Any]) -> PromptfedError:
    detail = problem.get("detail") or problem.get("title") or response.reason_phrase
    kind, errors = _kind(problem), [item for item in problem.get("errors", []) if "path" in item]
    places = "; ".join(f"{item['path']}: {item['detail']}" for item in errors)
    text = f"{detail}{f' ({places})' if places and places not in str(detail) else ''}"
    if len(errors) > 1 and places == detail:
        text = offences(errors)
    if not problem and response.status_code == PROXY_LOGIN:
        address = str(response.url.copy_with(path="/", query=None)).rstrip("/")
        return Unreachable(refused_by_proxy(PROXY_LOGIN, address) or text)
    if not problem:
        return Failed(f"{response.url} answers {response.status_code} {text}: is that a coordinator's address?")
    if response.status_code in (401, 403):
        return NotAllowed(f"{text}: give the operator token with --token-file or {TOKEN_VARIABLE}", kind)
    return (Refused if response.status_code < 500 else Failed)(text, kind)


def _connection(url: str) -> dict[str, Any]:
    """The trusted authorities and the proxy, as httpx's options."""
    for address in addresses_of(url) or [url]:
        try:
            parts = address_parts(address)
        except ValueError as error:
            raise BadInput(f"--coordinator: {error}") from None
        if parts.scheme == "http" and not is_loopback(parts.hostname or "") and not os.environ.get(PLAIN_VARIABLE):
            text = (
                f"{address} would carry the operator token unencrypted: use https://, or promptfed --allow-plain-http"
            )
            raise BadInput(f"{text} (or ${PLAIN_VARIABLE})")
    ca_file = os.environ.get(CA_VARIABLE)
    try:
        verify = trust(Path(ca_file) if ca_file and "https://" in url else None)
        return http_options(url, verify, os.environ.get(PROXY_VARIABLE) or None)
    except ValueError as error:
        raise BadInput(str(error)) from None


def open_coordinator(url: str | None, token_file: Path | None, public: bool = False) -> Coordinator:
    """Connect to the coordinator that the options or the environment name.

    ``public``: for a call that anybody may make; a token is sent if there is one.

    Raises:
        PromptfedError: there is no operator token, or a file cannot be read.
    """
    address = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"cannot read the token file {token_file}: {why(error)}") from None
    else:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token and not public:
        text = (
            f"no operator token: give --token-file (it lies in the coordinator's data folder) or set {TOKEN_VARIABLE}"
        )
        raise NotAllowed(text)
    return Coordinator(address, token)
