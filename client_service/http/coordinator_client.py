"""The coordinator's calls as a client uses them; large bodies, over slow lines, are never in memory as a whole."""

from __future__ import annotations

import asyncio
import hashlib
import re
import ssl
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlencode

import httpx

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.bodies import Body, sha256_of
from promptfed.client_service.http.connection import (
    MAX_JSON_BYTES,
    PASSING,
    TIMEOUT,
    AnyMessage,
    BadAnswer,
    CoordinatorConnection,
    Patience,
    Refused,
    Reply,
    Unavailable,
    WrongReceipt,
    parse,
)
from promptfed.client_service.settings import Settings
from promptfed.shared.api.api_schemas import Receipt
from promptfed.shared.machine import sync_folder
from promptfed.shared.messages import (
    EnrolmentInfo,
    EnrolRequest,
    EnrolResponse,
    EvaluationRequest,
    FailureRequest,
    Task,
)
from promptfed.shared.service.digests import Damaged
from promptfed.shared.service.net import http_options, trust
from promptfed.shared.service.reasons import why

IN_FILES = 16 << 20  # bytes from which a payload comes into a file
# An update is answered once the whole was hashed, looked through and put on the disk; a small one soon.
TIMEOUTS = httpx.Timeout(300.0, connect=TIMEOUT.connect)
SMALL_SECONDS = 60.0
ATTEMPTS = 3  # that may end with `upload-timeout`
_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")

MAX_PAYLOAD_BYTES = 2 << 30
POLL_MARGIN = 15.0  # seconds that a long poll may take beyond its wait
SHORT_POLL = 2  # seconds, where one of several coordinators may be gone and another one is to be asked soon


def receipt_for(task_id: str, sha256: str | None = None) -> Callable[[Reply], Receipt]:
    """Reads the receipt of what was sent for a task: of these bytes, where it says of which."""

    def read(reply: Reply) -> Receipt:
        receipt = parse(Receipt, reply)
        for what, received, sent in (("task", receipt.task_id, task_id), ("digest", receipt.sha256, sha256)):
            if None not in (received, sent) and received != sent:
                text = f"the coordinator's receipt has the {what} {str(received)[:100]!a}; {sent} was sent"
                raise WrongReceipt(f"{text}: tell its operator") if reply.proven else Damaged(text)
        return receipt

    return read


async def send(
    connection: CoordinatorConnection,
    url: str,
    task_id: str,
    body: Body,
    wait: int = 0,
    content_type: str = "application/octet-stream",
) -> Receipt | None:
    """Send a body to ``url``, again from its beginning where it breaks off; the receipt, None where nobody knows it.

    The first one, of a small body, asks the coordinator to answer with the next task, once there is one within ``wait``
    seconds. Later ones do not: something on the way may end whatever takes long.

    Raises:
        Refused: the coordinator does not take it.
        WrongReceipt: it confirms something else.
        ClientError: UNREACHABLE where nobody has answered for ``connection.give_up_after`` seconds.
    """
    headers = {
        "Authorization": f"Bearer {connection.token}",
        "Content-Type": content_type,
        "Content-Length": str(body.size),
        "Content-Digest": body.digest_field,
    }
    slow, query = 0, f"?next={wait}" if wait else ""
    read = receipt_for(task_id, f"sha256:{body.sha256}")

    async def attempt() -> Receipt | None:
        nonlocal slow, query
        address, query = url + query, ""
        timeouts = TIMEOUTS if address == url else httpx.Timeout(wait + SMALL_SECONDS, connect=TIMEOUT.connect)
        try:
            reply = await connection.once("PUT", address, body.parts, headers, timeouts, MAX_JSON_BYTES, whole=body)
            return read(reply)
        except WrongReceipt:
            raise
        except BadAnswer:
            return None  # it is accepted; what the next answer holds is told there
        except Refused as refused:
            slow += 1
            if refused.kind != "upload-timeout" or slow == ATTEMPTS:
                raise
            raise Unavailable(refused.status, refused.detail, None) from None

    return await connection.until_answered(attempt)


@dataclass(frozen=True)
class Wanted:
    """A body that is announced: its size, and its digest as ``sha256:<hex>``."""

    size: int
    digest: str


async def fetch(connection: CoordinatorConnection, url: str, announced: Wanted, folder: Path) -> Path:
    """Fetch the body at ``url`` into a file of ``folder``, unless it is there; other files of the folder are deleted.

    Raises:
        Refused: the coordinator does not give it.
        ClientError: UNREACHABLE where nobody has given it for ``connection.give_up_after`` seconds.
    """
    name = announced.digest.removeprefix("sha256:")
    path, draft = folder / name, folder / f"{name}.part"
    if await asyncio.to_thread(_is_there, path, draft):
        return path
    patience = Patience(connection)
    while True:
        have = _size(draft)
        try:
            if have < announced.size:
                await _receive(connection, url, announced, draft, have)
            digest = "sha256:" + await asyncio.to_thread(sha256_of, draft)
            if (_size(draft), digest) == (announced.size, announced.digest):
                break
            draft.unlink()
            raise _not_announced(digest, announced)
        except PASSING as error:
            if not isinstance(error, Damaged) and _size(draft) > have:
                patience.moved()
            await patience.wait(error)
    draft.replace(path)
    sync_folder(folder)
    return path


def _not_announced(digest: str, announced: Wanted) -> Damaged:
    return Damaged(f"the payload has the digest {digest}; {announced.digest} was announced")


def _is_there(path: Path, draft: Path) -> bool:
    """Whether the whole file is there already. Other files are deleted."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for other in path.parent.iterdir():
        if other not in (path, draft):
            other.unlink()
    return path.exists() and sha256_of(path) == path.name


async def _receive(connection: CoordinatorConnection, url: str, announced: Wanted, draft: Path, have: int) -> None:
    """Append to the draft. Raises PASSING, Refused."""
    # As it lies there: of a compressed body no range could be told by what has arrived.
    headers = {"Authorization": f"Bearer {connection.token}", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": f'"{announced.digest}"'}
    async with connection.answered("GET", url, lambda: None, headers, TIMEOUT) as response:
        if not response.is_success:
            connection.take(response, await connection.read(response, MAX_JSON_BYTES))
        begin = _begin(response, announced) if response.status_code == 206 else 0
        if begin > have:
            raise Damaged(f"the payload was asked for from byte {have} on, and comes from byte {begin}")
        with draft.open("r+b" if begin else "wb") as file:
            file.seek(begin)
            file.truncate()
            await _write(response, file, announced.size - begin)


async def _write(response: httpx.Response, file: BinaryIO, most: int) -> None:
    written = 0
    async for chunk in response.aiter_raw():
        written += len(chunk)
        if written > most:
            raise Damaged(f"the payload has more than the {most} bytes that were announced")
        file.write(chunk)


def _begin(response: httpx.Response, announced: Wanted) -> int:
    header = response.headers.get("content-range", "")
    match = _RANGE.fullmatch(header)
    if match is None or int(match[3]) != announced.size:
        raise Damaged(f"the payload comes as {header[:100]!r}; {announced.size} bytes were announced")
    return int(match[1])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class CoordinatorClient(CoordinatorConnection):
    """The calls. All of them raise as `CoordinatorConnection` says."""

    async def enrolment(self, enrolment_token: str) -> EnrolmentInfo:
        """What a client must know before it enrols."""
        return await self.call(
            "GET", self._path("enrolment"), token=enrolment_token, read=partial(parse, EnrolmentInfo)
        )

    async def enrol(self, enrolment_token: str, request: EnrolRequest) -> EnrolResponse:
        """Enrol, or be recognised again by the same name and secret."""
        body = request.model_dump_json().encode()
        read = partial(parse, EnrolResponse)
        answer = await self.call("POST", self._path("clients"), token=enrolment_token, body=body, read=read)
        if answer.name != request.name:
            raise BadAnswer(f"the coordinator has enrolled {answer.name!r}, not {request.name!r}: tell its operator")
        return answer

    async def task(
        self, wait: int, *, retry: bool = True, carrying: str | None = None, progress: float | None = None
    ) -> Task | None:
        """The client's open task, or None after at most ``wait`` seconds. Refused 410 where the federation ended.

        It contains a small payload. With ``carrying``, the id of the task that it carries out: another one, without its
        payload. Refused 409 once that one is closed.
        """
        about = {"inline": "true"} if carrying is None else {"carrying": carrying}
        if progress is not None:
            about["progress"] = f"{progress:.2f}"

        async def poll() -> Task | None:
            seconds = min(wait, SHORT_POLL) if self.addresses.several else wait
            timeouts = httpx.Timeout(seconds + POLL_MARGIN, connect=TIMEOUT.connect)
            path = f"{self._path('task')}?{urlencode({'wait': seconds, **about})}"
            headers = {"Authorization": f"Bearer {self.token}"}
            reply = await self.once("GET", path, lambda: None, headers, timeouts, MAX_JSON_BYTES, None)
            return None if reply.status == 204 else parse(Task, reply)

        task = await self.until_answered(poll, retry)
        if task is not None and self.sent is not None:
            self.sent.asked(task)
        return task

    async def payload(self, task: Task, folder: Path | None = None) -> bytes | Path:
        """The task's tensors, as announced; large ones in a file of ``folder``, if one is given.

        Raises:
            BadAnswer: too many bytes.
        """
        if task.payload.bytes > MAX_PAYLOAD_BYTES:
            raise BadAnswer(f"the payload has {task.payload.bytes} bytes; {MAX_PAYLOAD_BYTES} are allowed: not fetched")
        url = self._task_path(task.task_id, "payload")  # whatever address the task names: nothing is asked elsewhere
        announced = Wanted(task.payload.bytes, task.payload.sha256)
        if folder is not None and announced.size >= IN_FILES:
            return await fetch(self, url, announced, folder)
        if task.payload.data is not None:
            with suppress(Damaged, ValueError):
                return _whole(b64decode(task.payload.data, validate=True), announced)
        return await self.call(
            "GET", url, token=self.token, limit=announced.size, read=lambda reply: _whole(reply.body, announced)
        )

    async def send_update(self, task_id: str, body: Body, wait: int = 0) -> Task | None:
        """Send an update; returns when the coordinator has it (201, or 200 where it already had these bytes).

        The client's next task, if there is one within ``wait`` seconds.
        """
        return await self._answer(task_id, "update", body, wait)

    async def send_exchange(self, task_id: str, body: bytes) -> None:
        """Answer a step of a secure sum; returns when the coordinator has just these bytes."""
        headers, path = {"Content-Type": "application/octet-stream"}, self._task_path(task_id, "exchange")
        read = receipt_for(task_id, f"sha256:{hashlib.sha256(body).hexdigest()}")
        await self.call("PUT", path, token=self.token, body=body, headers=headers, read=read)

    async def send_evaluation(self, task_id: str, evaluation: EvaluationRequest, wait: int = 0) -> Task | None:
        """Send accuracies; ``wait`` and what is returned as of `send_update`."""
        body = Body.of(evaluation.model_dump_json().encode())
        return await self._answer(task_id, "evaluation", body, wait, content_type="application/json")

    async def send_failure(self, task_id: str, failure: FailureRequest) -> None:
        """Tell the coordinator not to wait for this task."""
        body = failure.model_dump_json().encode()
        path, read = self._task_path(task_id, "failure"), receipt_for(task_id)
        await self.call("POST", path, token=self.token, body=body, read=read)

    async def ask(self, kind: type[AnyMessage], resource: str, **query: str | int) -> AnyMessage:
        """What a resource of the federation answers this client."""
        path = self._path(resource) + (f"?{urlencode(query)}" if query else "")
        return await self.call("GET", path, token=self.token, read=partial(parse, kind))

    async def withdraw(self) -> None:
        """Withdraw this client. Refused 403 if it has withdrawn already, 409 if the federation has ended."""
        await self.call("POST", self._path("withdrawal"), token=self.token, read=lambda reply: None)

    def _path(self, *parts: str) -> str:
        return "/".join(["/v1/federations", *(quote(part, safe="") for part in (self.federation, *parts))])

    def _task_path(self, task_id: str, resource: str) -> str:
        return self._path("tasks", task_id, resource)

    async def _answer(self, task_id: str, resource: str, body: Body, wait: int, **about: str) -> Task | None:
        """Answer a task; the next one, if the receipt holds it."""
        # Of several coordinators one that is silent is given up, after less than an update and a wait may take.
        wait = 0 if self.addresses.several else wait
        receipt = await send(self, self._task_path(task_id, resource), task_id, body, wait, **about)
        task = receipt.next if receipt is not None else None
        if task is not None and self.sent is not None:
            self.sent.asked(task)
        return task


def _whole(content: bytes, announced: Wanted) -> bytes:
    """``content``, if it is what was announced. Raises Damaged."""
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    if (len(content), digest) != (announced.size, announced.digest):
        raise _not_announced(digest, announced)
    return content


def open_http(settings: Settings) -> httpx.AsyncClient:
    """The HTTP client for the settings' coordinators. Raises as `http_to`."""
    certificate = None if settings.client_cert is None else (settings.client_cert, settings.client_key)
    return http_to(settings.coordinator, settings.ca_file, certificate, settings.proxy)


def http_to(
    coordinators: str,
    ca_file: Path | None,
    certificate: tuple[Path, Path | None] | None = None,
    proxy: str | None = None,
) -> httpx.AsyncClient:
    """The HTTP client for coordinators whose certificates the authority in ``ca_file`` may have signed.

    ``certificate`` is this client's certificate and its key, where the coordinator asks for one; ``proxy`` as of
    `network.http_options`.

    Raises:
        ClientError: USAGE for a certificate file that cannot be read, or a proxy that cannot be used.
    """
    try:
        verify = trust(ca_file)
        options = http_options(coordinators, verify, proxy)
    except ValueError as error:
        raise ClientError(Exit.USAGE, str(error)) from None
    if certificate is not None:
        try:
            # An empty password: nobody is there to be asked.
            verify.load_cert_chain(certificate[0], certificate[1], lambda: "")
        except (OSError, ssl.SSLError) as error:
            files = f"--client-cert {certificate[0]}" + (
                f" and --client-key {certificate[1]}" if certificate[1] is not None else ""
            )
            text = f"{files} cannot be used: {why(error)}"
            raise ClientError(Exit.USAGE, text) from None
    return httpx.AsyncClient(timeout=TIMEOUT, **options)
