"""The coordinator as a client calls it: outbound only, one origin, retries where they help, typed refusals."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import random
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel, ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.settings import Settings
from promptfed.shared.messages import (
    EnrolmentInfo,
    EnrolRequest,
    EnrolResponse,
    EvaluationRequest,
    FailureRequest,
    Problem,
    Task,
)
from promptfed.shared.net import MOST_MOVES, is_loopback, moved_to

log = logging.getLogger("promptfed.client")

MAX_JSON_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 2 << 30
FIRST_BACKOFF, LONGEST_BACKOFF = 0.25, 15.0  # seconds
LONGEST_RETRY_AFTER = 300.0
POLL_MARGIN = 15.0  # seconds that a long poll may take beyond its wait
TIMEOUT = httpx.Timeout(60.0, connect=10.0)

AnyMessage = TypeVar("AnyMessage", bound=BaseModel)


class Refused(Exception):
    """The coordinator answered with a refusal: 4xx, or a redirect that is not to another of its kind."""

    def __init__(self, status: int, kind: str, detail: str):
        super().__init__(f"{detail} ({status} {kind})")
        self.status = status
        self.kind = kind
        self.detail = detail


class BadAnswer(Exception):
    """The coordinator's answer is not what the protocol says; asking again would not help."""


class _Moved(Exception):
    """Another coordinator carries the federation out, at ``origin``."""

    def __init__(self, origin: str):
        super().__init__(f"the coordinator at {origin} carries it out")
        self.origin = origin


class _Unavailable(Exception):
    """A 5xx, or a 429 that says when to come again; ``retry_after`` is in seconds, where a 503 or 429 gave it."""

    def __init__(self, status: int, detail: str, retry_after: float | None):
        super().__init__(f"{status} {detail}")
        self.retry_after = retry_after


@dataclass
class Traffic:
    """Bytes of bodies sent and received, requests that had to be sent again, and whose clock is ahead.

    ``clock`` is in seconds: this machine's time less the coordinator's at its last answer, to about a second.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    retries: int = 0
    clock: float | None = None


@dataclass
class _Answer:
    status: int
    body: bytes


@dataclass
class CoordinatorClient:
    """Calls one federation of one coordinator. ``token`` is the client's secret once there is one.

    Of several coordinators the one that carries the federation out is named by a 307, which is followed with the token
    (`shared.net.moved_to` says where to) and remembered until that one does not answer.

    Connection errors, 5xx and a 429 with Retry-After (too many wrong tokens came from this address) are tried again
    with jittered exponential backoff (a 503's and 429's Retry-After is kept) until ``give_up_after`` seconds have
    passed without an answer, then every call raises ClientError(UNREACHABLE). Any other answer that is no success
    raises Refused at once.
    """

    http: httpx.AsyncClient
    base_url: str
    federation: str
    give_up_after: float = 3600.0
    token: str = ""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    traffic: Traffic = field(default_factory=Traffic)
    _jitter: random.Random = field(default_factory=random.SystemRandom)
    _holder: str | None = None

    async def enrolment(self, enrolment_token: str) -> EnrolmentInfo:
        """What a client must know before it enrols."""
        answer = await self._call("GET", self._path("enrolment"), token=enrolment_token)
        return _parse(EnrolmentInfo, answer.body)

    async def enrol(self, enrolment_token: str, request: EnrolRequest) -> EnrolResponse:
        """Enrol, or be recognised again by the same name and secret."""
        body = request.model_dump_json().encode()
        answer = await self._call("POST", self._path("clients"), token=enrolment_token, body=body)
        return _parse(EnrolResponse, answer.body)

    async def task(self, wait: int, *, retry: bool = True) -> Task | None:
        """The client's open task, or None after at most ``wait`` seconds. Refused 410 where the federation ended."""
        timeouts = httpx.Timeout(wait + POLL_MARGIN, connect=TIMEOUT.connect)
        path = self._path("task") + f"?wait={wait}"
        answer = await self._call("GET", path, token=self.token, timeouts=timeouts, retry=retry)
        return None if answer.status == 204 else _parse(Task, answer.body)

    async def payload(self, task: Task) -> bytes:
        """The task's tensors, as announced.

        Raises:
            BadAnswer: another origin than the coordinator's, too many bytes, or others than the task announces.
        """
        if task.payload.bytes > MAX_PAYLOAD_BYTES:
            raise BadAnswer(f"the payload has {task.payload.bytes} bytes; {MAX_PAYLOAD_BYTES} are allowed: not fetched")
        url = self._own_path(task.payload.url)
        answer = await self._call("GET", url, token=self.token, limit=task.payload.bytes)
        digest = "sha256:" + hashlib.sha256(answer.body).hexdigest()
        if len(answer.body) != task.payload.bytes or digest != task.payload.sha256:
            raise BadAnswer(
                f"the payload of task {task.task_id} has {len(answer.body)} bytes and digest {digest}; "
                f"{task.payload.bytes} bytes and {task.payload.sha256} were announced"
            )
        return answer.body

    async def send_update(self, task_id: str, body: bytes) -> None:
        """Send an update; returns when the coordinator has it (201, or 200 where it already had these bytes)."""
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        headers = {"Content-Type": "application/octet-stream", "Content-Digest": f"sha-256=:{digest}:"}
        await self._call("PUT", self._task_path(task_id, "update"), token=self.token, body=body, headers=headers)

    async def send_exchange(self, task_id: str, body: bytes) -> None:
        """Answer a step of a secure sum; returns when the coordinator has just these bytes."""
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        headers = {"Content-Type": "application/octet-stream", "Content-Digest": f"sha-256=:{digest}:"}
        await self._call("PUT", self._task_path(task_id, "exchange"), token=self.token, body=body, headers=headers)

    async def send_evaluation(self, task_id: str, evaluation: EvaluationRequest) -> None:
        """Send accuracies."""
        body = evaluation.model_dump_json().encode()
        await self._call("PUT", self._task_path(task_id, "evaluation"), token=self.token, body=body)

    async def send_failure(self, task_id: str, failure: FailureRequest) -> None:
        """Tell the coordinator not to wait for this task."""
        body = failure.model_dump_json().encode()
        await self._call("POST", self._task_path(task_id, "failure"), token=self.token, body=body)

    async def withdraw(self) -> None:
        """Take part no longer. Refused 403 where that is so already, 409 where the federation has ended."""
        await self._call("POST", self._path("withdrawal"), token=self.token)

    def _path(self, *parts: str) -> str:
        return "/".join(["/v1/federations", *(quote(part, safe="") for part in (self.federation, *parts))])

    def _task_path(self, task_id: str, what: str) -> str:
        return self._path("tasks", task_id, what)

    def _own_path(self, url: str) -> str:
        try:
            joined = httpx.URL(self.base_url + "/").join(url)
        except httpx.InvalidURL:
            raise BadAnswer("the address of the payload cannot be read") from None
        own = httpx.URL(self.base_url)
        if _origin(joined) != _origin(own):
            raise BadAnswer(
                f"the payload lies on {_origin(joined)}, not on the coordinator {_origin(own)}: not fetched"
            )
        return joined.raw_path.decode("ascii")

    async def _call(
        self,
        verb: str,
        url: str,
        *,
        token: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeouts: httpx.Timeout = TIMEOUT,
        limit: int = MAX_JSON_BYTES,
        retry: bool = True,
    ) -> _Answer:
        default = {"Content-Type": "application/json"} if body is not None else {}
        all_headers = {"Authorization": f"Bearer {token}", **default, **(headers or {})}

        async def once() -> _Answer:
            for _ in range(MOST_MOVES):
                full = (self._holder or self.base_url) + url
                request = self.http.build_request(verb, full, content=body, headers=all_headers, timeout=timeouts)
                try:
                    return await self._send(request, limit)
                except _Moved as moved:
                    self._holder = moved.origin
                except (httpx.TransportError, _Unavailable):
                    self._holder = None
                    raise
            raise _Unavailable(503, "the coordinators send this client from one to the other", None)

        retrying = AsyncRetrying(
            retry=retry_if_exception(_may_pass),
            wait=self._backoff,
            stop=stop_after_delay(self.give_up_after),
            before_sleep=self._note_retry,
            reraise=True,
            sleep=self.sleep,
        )
        try:
            answer = await (retrying(once) if retry else once())
        except (httpx.TransportError, _Unavailable) as error:
            raise ClientError(
                Exit.UNREACHABLE, f"no answer from the coordinator at {self.base_url}: {_why(error)}"
            ) from None
        if retrying.statistics.get("attempt_number", 1) > 1:
            log.info("the coordinator at %s answers again", self.base_url)
        return answer

    async def _send(self, request: httpx.Request, limit: int) -> _Answer:
        response = await self.http.send(request, stream=True, follow_redirects=False)
        try:
            content = bytearray()
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > limit:
                    raise BadAnswer(f"the answer to {request.method} {request.url.path} is larger than {limit} bytes")
        except httpx.DecodingError as error:
            raise BadAnswer(f"the answer to {request.method} {request.url.path} cannot be decoded: {error}") from None
        finally:
            await response.aclose()
        self.traffic.bytes_up += len(request.content)
        self.traffic.bytes_down += len(content)
        self.traffic.clock = _ahead(response.headers.get("date"), self.traffic.clock)
        if response.is_success:
            return _Answer(response.status_code, bytes(content))
        if response.status_code == 307:
            origin = moved_to(self.base_url, str(request.url), response.headers.get("location", ""))
            if origin is not None:
                raise _Moved(origin)
        if response.status_code >= 500 or (response.status_code == 429 and _retry_after(response) is not None):
            raise _Unavailable(response.status_code, _problem(response, content)[1], _retry_after(response))
        raise Refused(response.status_code, *_problem(response, content))

    def _backoff(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        longest = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** min(state.attempt_number - 1, 16))
        delay = self._jitter.uniform(longest / 2, longest)
        if isinstance(error, _Unavailable) and error.retry_after is not None:
            return min(error.retry_after, LONGEST_RETRY_AFTER) + self._jitter.uniform(0, FIRST_BACKOFF)
        return delay

    def _note_retry(self, state: RetryCallState) -> None:
        self.traffic.retries += 1
        error = state.outcome.exception() if state.outcome else None
        delay = state.next_action.sleep if state.next_action else 0.0
        log.warning("the coordinator at %s does not answer (%s): again in %.1f s", self.base_url, _why(error), delay)


def open_http(settings: Settings) -> httpx.AsyncClient:
    """The HTTP client for the settings' coordinator.

    Raises:
        ClientError: USAGE for a certificate file that cannot be read.
    """
    own = None if settings.client_cert is None else (settings.client_cert, settings.client_key)
    return http_to(settings.coordinator, settings.ca_file, own)


def http_to(coordinator: str, ca_file: Path | None, own: tuple[Path, Path | None] | None = None) -> httpx.AsyncClient:
    """The HTTP client for a coordinator whose certificate the authority in ``ca_file`` may have signed.

    ``own`` is this client's certificate and its key, where the coordinator asks for one.

    Raises:
        ClientError: USAGE for a certificate file that cannot be read.
    """
    verify: ssl.SSLContext | bool = True
    if ca_file is not None:
        try:
            verify = ssl.create_default_context(cafile=str(ca_file))
        except (OSError, ssl.SSLError) as error:
            raise ClientError(Exit.USAGE, f"--ca-file {ca_file} cannot be used: {error}") from None
    if own is not None:
        verify = verify if isinstance(verify, ssl.SSLContext) else ssl.create_default_context()
        try:
            verify.load_cert_chain(own[0], own[1], lambda: "")  # an empty password: nobody is there to be asked
        except (OSError, ssl.SSLError) as error:
            text = f"--client-cert {own[0]} and --client-key {own[1]} cannot be used: {error.strerror or error}"
            raise ClientError(Exit.USAGE, text) from None
    # A proxy of the environment is for the outside: it could not reach this machine's loopback.
    trust_env = not is_loopback(urlsplit(coordinator).hostname or "")
    return httpx.AsyncClient(verify=verify, trust_env=trust_env, follow_redirects=False, timeout=TIMEOUT)


def _may_pass(error: BaseException) -> bool:
    """Whether trying again may help: not where the coordinator's certificate is the trouble."""
    if isinstance(error, _Unavailable):
        return True
    return isinstance(error, httpx.TransportError) and not _is_certificate_error(error)


def _is_certificate_error(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _why(error: BaseException | None) -> str:
    if error is None:
        return "unknown"
    hint = ": give its authority with --ca-file" if _is_certificate_error(error) else ""
    return (str(error) or type(error).__name__) + hint


def _origin(url: httpx.URL) -> str:
    port = url.port or {"http": 80, "https": 443}.get(url.scheme)
    return f"{url.scheme}://{url.host}:{port}"


def _parse(kind: type[AnyMessage], body: bytes) -> AnyMessage:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "(body)"
        raise BadAnswer(f"the coordinator's {kind.__name__} is not understood: {place}: {first['msg']}") from None


def _problem(response: httpx.Response, body: bytes | bytearray) -> tuple[str, str]:
    """Kind and detail of a refusal, cleaned for a log: what a server says may hold anything."""
    if response.is_redirect:
        return "redirect", f"redirects are not followed (to {_clean(response.headers.get('location', ''))})"
    try:
        problem = Problem.model_validate_json(bytes(body))
    except ValidationError:
        return "unexplained", response.reason_phrase or "no reason given"
    return _clean(problem.kind, 100), _clean(problem.detail)


def _clean(text: Any, length: int = 500) -> str:
    printable = "".join(letter if letter.isprintable() else " " for letter in str(text)[: 4 * length])
    return " ".join(printable.split())[:length]


def _ahead(date: str | None, before: float | None) -> float | None:
    """Seconds by which this clock is ahead of an answer's ``Date``, which has whole seconds; ``before`` without one."""
    try:
        return (datetime.now(UTC) - parsedate_to_datetime(date or "")).total_seconds() - 0.5
    except (ValueError, TypeError):
        return before


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds of a 503's or 429's Retry-After, which is a number or a date."""
    text = response.headers.get("retry-after", "")
    if response.status_code not in (429, 503) or not text:
        return None
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None
