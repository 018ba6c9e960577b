"""Requests to the coordinator: one address or the next, retries where they help, typed refusals."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from html import unescape
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.bodies import Body, SentLog
from promptfed.shared.calls import asked, one_line, read_answer
from promptfed.shared.service.addresses import Addresses
from promptfed.shared.service.digests import CHANGED, Damaged
from promptfed.shared.service.net import PROXY_LOGIN, explained, is_certificate_error
from promptfed.shared.service.reasons import first_error, why
from promptfed.shared.versions import PROTOCOL, VERSION, OtherVersion, expect_ours

log = logging.getLogger("promptfed.client")

MAX_JSON_BYTES = 64 << 20
FOREIGN_BYTES = 64 << 10  # of a page that is read for its title
FIRST_BACKOFF, LONGEST_BACKOFF = 0.25, 15.0  # seconds
LONGEST_RETRY_AFTER = 300.0
QUICK_ATTEMPTS, QUICK_BACKOFF = 20, 1.0  # among several coordinators: the next one takes over within seconds
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
SILENT_SECONDS = 5.0  # without a byte of an answer, after which one of several coordinators is given up

AnyMessage = TypeVar("AnyMessage", bound=BaseModel)
Answer = TypeVar("Answer")


class Refused(Exception):
    """The coordinator answered with a refusal: 4xx, or a redirect."""

    def __init__(self, status: int, kind: str, detail: str):
        super().__init__(f"{detail} ({status} {kind})")
        self.status = status
        self.kind = kind
        self.detail = detail


class BadAnswer(Exception):
    """The coordinator's answer arrived whole and is not what the protocol says; asking again would not help."""


class WrongReceipt(BadAnswer):
    """The coordinator confirms something else than what was sent."""


class Unavailable(Exception):
    """A 5xx, a 429 that says when to come again, or whatever somebody else answers in the coordinator's place.

    ``retry_after`` is in seconds, where a 503 or 429 gave it.
    """

    def __init__(self, status: int, detail: str, retry_after: float | None):
        super().__init__(f"{status} {detail}")
        self.status = status
        self.retry_after = retry_after


PASSING = (httpx.TransportError, Unavailable, Damaged)  # for which a request is sent again


@dataclass
class Reply:
    """An answer; ``proven``: it is what the coordinator sent, by its digest."""

    status: int
    body: bytes
    proven: bool


@dataclass
class CoordinatorConnection:
    """Calls one federation at the coordinators of ``base_url``: one address, or several separated by commas.

    ``token`` is the client's secret once there is one. With several ``addresses``, one that refuses connections, waits
    or does not answer within `SILENT_SECONDS` is given up, and the next request goes to the next one. Nothing is
    redirected. Every request is written to ``sent`` before it leaves.

    Connection errors, 5xx, a 429 with Retry-After (too many wrong tokens came from this address), every answer without
    a coordinator's header `PROTOCOL`, such as a proxy's page, and what was damaged on the way up or down are tried
    again with jittered exponential backoff (a 503's and 429's Retry-After is kept) until ``give_up_after`` seconds have
    passed without an answer, then every call raises ClientError(UNREACHABLE). Any other answer that is no success
    raises Refused at once.
    """

    http: httpx.AsyncClient
    base_url: str
    federation: str
    give_up_after: float = 3600.0
    token: str = ""
    sent: SentLog | None = None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _jitter: random.Random = field(default_factory=random.SystemRandom)
    _served: str = ""  # the address that answered last

    def __post_init__(self) -> None:
        self.addresses = Addresses(self.base_url)

    async def call(
        self,
        verb: str,
        url: str,
        *,
        token: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeouts: httpx.Timeout = TIMEOUT,
        limit: int = MAX_JSON_BYTES,
        read: Callable[[Reply], Answer],
    ) -> Answer:
        """What ``read`` makes of the answer to a request, which is sent again if that may help.

        Raises Refused, BadAnswer, ClientError.
        """
        whole = Body.of(body) if body is not None else None
        about = {} if whole is None else {"Content-Type": "application/json", "Content-Digest": whole.digest_field}
        all_headers = {"Authorization": f"Bearer {token}", **about, **(headers or {})}

        async def attempt() -> Answer:
            return read(await self.once(verb, url, lambda: body, all_headers, timeouts, limit, whole))

        return await self.until_answered(attempt)

    async def until_answered(self, attempt: Callable[[], Awaitable[Answer]], retry: bool = True) -> Answer:
        """What ``attempt`` gives, made again after failures that may pass. Raises ClientError (UNREACHABLE)."""
        patience = Patience(self)
        while True:
            try:
                answer = await attempt()
            except PASSING as error:
                if not retry:
                    raise self.unreachable(error) from None
                await patience.wait(error)
            else:
                patience.moved()
                return answer

    async def once(
        self,
        verb: str,
        url: str,
        body: Callable[[], bytes | AsyncIterator[bytes] | None],
        headers: dict[str, str],
        timeouts: httpx.Timeout,
        limit: int,
        whole: Body | None,
    ) -> Reply:
        """Send a request once. Raises what `call` retries.

        Args:
            verb, url, headers, timeouts: of the request.
            body: makes each body.
            limit: of the answer, in bytes.
            whole: the message of which the body is all or a part.
        """
        async with self.answered(verb, url, body, headers, timeouts, whole) as response:
            content = await self.read(response, limit)
            return Reply(response.status_code, content, self.take(response, content))

    @asynccontextmanager
    async def answered(
        self,
        verb: str,
        url: str,
        body: Callable[[], bytes | AsyncIterator[bytes] | None],
        headers: dict[str, str],
        timeouts: httpx.Timeout,
        whole: Body | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """The coordinator's answer, also a refusal, with its body unread."""
        all_headers = {PROTOCOL: str(VERSION), **headers}
        with asked(self.addresses, PASSING) as address:
            if self.sent is not None:
                self.sent.note(address, verb, url, whole)
            request = self.http.build_request(
                verb, address + url, content=body(), headers=all_headers, timeout=self._patient(timeouts)
            )
            response = await self.http.send(request, stream=True, follow_redirects=False)
            try:
                if PROTOCOL not in response.headers and response.status_code == PROXY_LOGIN:
                    raise httpx.ProxyError(f"{PROXY_LOGIN} {response.reason_phrase}")
                if PROTOCOL not in response.headers:
                    raise Unavailable(response.status_code, await _foreign(response), _retry_after(response))
                self._note_served(address, response)
                yield response
            finally:
                await response.aclose()

    def _patient(self, timeouts: httpx.Timeout) -> httpx.Timeout:
        """Of several, none may be silent for long; how long a body takes that is under way is another thing."""
        if not self.addresses.several:
            return timeouts
        return httpx.Timeout(SILENT_SECONDS, pool=timeouts.pool)

    def _note_served(self, address: str, response: httpx.Response) -> None:
        if response.status_code < 500 and address != self._served:
            if self._served:
                log.info("the coordinator at %s serves this client now", address)
            self._served = address

    async def read(self, response: httpx.Response, limit: int) -> bytes:
        """A body of up to ``limit`` bytes. Raises Damaged."""
        request, content = response.request, bytearray()
        try:
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > limit:
                    raise Damaged(f"the answer to {request.method} {request.url.path} is larger than {limit} bytes")
        except httpx.DecodingError:
            raise Damaged(f"the answer to {request.method} {request.url.path} cannot be decoded") from None
        return bytes(content)

    def take(self, response: httpx.Response, content: bytes) -> bool:
        """Whether a successful answer is proven to be what was sent. Raises PASSING, Refused, ClientError."""
        try:
            expect_ours(response.headers.get(PROTOCOL), "the coordinator", "this client")
        except OtherVersion as error:
            raise ClientError(Exit.PROTOCOL, str(error)) from None
        proven, problem = read_answer(response, content)
        if response.is_success:
            return proven
        if response.is_redirect:
            raise Refused(response.status_code, "redirect", f"redirects are not followed (to {_location(response)})")
        detail = response.reason_phrase if problem is None else one_line(problem.detail)
        if response.status_code >= 500 or (response.status_code == 429 and _retry_after(response) is not None):
            raise Unavailable(response.status_code, detail, _retry_after(response))
        if problem is None:
            raise Damaged(f"{response.status_code} {detail}: its reason cannot be read")
        raise Refused(response.status_code, one_line(problem.kind, 100), detail)

    def unreachable(self, error: BaseException) -> ClientError:
        """The error that ends a client to which nobody answers, or nothing that can be read."""
        text = f"no answer from the coordinator at {self.base_url}: {_why(error)}"
        if isinstance(error, Damaged):
            text = f"no answer from the coordinator at {self.base_url} that can be used ({error}): {CHANGED}"
        return ClientError(Exit.UNREACHABLE, self.explained(error) or text)

    def explained(self, error: BaseException) -> str | None:
        """What is wrong with TLS or a proxy, if that is why nobody answers."""
        return explained(error, self.addresses.failed)

    @property
    def has_served(self) -> bool:
        """Whether a coordinator has answered."""
        return bool(self._served)

    def backoff(self, attempt: int, error: BaseException) -> float:
        """Seconds to wait after so many failed attempts, jittered."""
        quick = self.addresses.several and attempt <= QUICK_ATTEMPTS
        longest = min(QUICK_BACKOFF if quick else LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** min(attempt - 1, 16))
        delay = self._jitter.uniform(longest / 2, longest)
        if not isinstance(error, Unavailable) or error.retry_after is None:
            return delay
        # Another coordinator is asked next, which a 503 of this one says nothing about.
        most = QUICK_BACKOFF if quick and error.status == 503 else LONGEST_RETRY_AFTER
        return min(error.retry_after, most) + self._jitter.uniform(0, FIRST_BACKOFF)


class Patience:
    """Waits between attempts, until ``give_up_after`` seconds have passed without an answer or any progress."""

    def __init__(self, connection: CoordinatorConnection):
        self._connection = connection
        self._attempts = 0
        self._since = time.monotonic()

    def moved(self) -> None:
        """There is progress, or an answer: earlier failures are forgotten."""
        if self._attempts:
            log.info("the coordinator at %s answers again", self._connection.addresses.current)
        self._attempts, self._since = 0, time.monotonic()

    async def wait(self, error: BaseException) -> None:
        """Wait after a failure. Raises ClientError if waiting cannot help, or if nothing has moved for too long."""
        connection = self._connection
        hopeless = not may_pass(error)
        if not hopeless and not connection.has_served:
            hopeless = await asyncio.to_thread(connection.explained, error) is not None
        if hopeless or time.monotonic() - self._since >= connection.give_up_after:
            raise connection.unreachable(error) from None
        self._attempts += 1
        delay = connection.backoff(self._attempts, error)
        fault = "is heard, but not as it was sent" if isinstance(error, Damaged) else "does not answer"
        text = "the coordinator at %s %s (%s): again in %.1f s"
        log.warning(text, connection.addresses.failed, fault, _why(error), delay)
        await connection.sleep(delay)


def may_pass(error: BaseException) -> bool:
    """Whether trying again may help. It does not if the coordinator's certificate is refused."""
    return isinstance(error, PASSING) and not is_certificate_error(error)


def _why(error: BaseException) -> str:
    return str(error) if isinstance(error, (Unavailable, Damaged)) else why(error)


def parse(kind: type[AnyMessage], reply: Reply) -> AnyMessage:
    """An answer as a message. Raises BadAnswer where it is what the coordinator sent, Damaged where it may not be."""
    try:
        return kind.model_validate_json(reply.body)
    except ValidationError as error:
        text = f"the coordinator's {kind.__name__} is not understood: {first_error(error)}"
        if not reply.proven:
            raise Damaged(text) from None
        raise BadAnswer(f"{text}: install the same version of promptfed on both sides") from None


def _location(response: httpx.Response) -> str:
    return one_line(response.headers.get("location", ""))


async def _foreign(response: httpx.Response) -> str:
    """What somebody else has answered: a proxy, a log-in page, another server at this address."""
    if response.is_redirect:
        return f"somebody else redirects to {_location(response)}"
    begin = b""
    with suppress(httpx.DecodingError):
        async for chunk in response.aiter_bytes():
            begin += chunk
            if len(begin) > FOREIGN_BYTES:
                break
    title = re.search(rb"<title[^>]*>([^<]+)", begin[:FOREIGN_BYTES], re.IGNORECASE)
    page = f"the page {one_line(unescape(title[1].decode(errors='replace')), 100)!r}" if title is not None else "a body"
    size = "; something on the way takes no request of this size" if response.status_code == 413 else ""
    return f"{response.reason_phrase}: {page} of somebody else, not of a coordinator{size}"


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
