"""The coordinator's calls as a client uses them."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http import transfers
from promptfed.client_service.http.bodies import Body
from promptfed.client_service.http.connection import (
    MAX_JSON_BYTES,
    TIMEOUT,
    AnyMessage,
    BadAnswer,
    CoordinatorConnection,
    Patience,
    Reply,
    Unavailable,
    parse,
)
from promptfed.client_service.settings import Settings
from promptfed.shared.messages import (
    EnrolmentInfo,
    EnrolRequest,
    EnrolResponse,
    EvaluationRequest,
    FailureRequest,
    Task,
)
from promptfed.shared.service.network import http_options, trust
from promptfed.shared.service.reasons import why

MAX_PAYLOAD_BYTES = 2 << 30
POLL_MARGIN = 15.0  # seconds that a long poll may take beyond its wait
SHORT_POLL = 4  # seconds, where one of several coordinators may be gone and another one is to be asked soon


class CoordinatorClient(CoordinatorConnection):
    """The calls. All of them raise as `CoordinatorConnection` says."""

    async def enrolment(self, enrolment_token: str) -> EnrolmentInfo:
        """What a client must know before it enrols."""
        answer = await self.call("GET", self._path("enrolment"), token=enrolment_token)
        return parse(EnrolmentInfo, answer.body)

    async def enrol(self, enrolment_token: str, request: EnrolRequest) -> EnrolResponse:
        """Enrol, or be recognised again by the same name and secret."""
        body = request.model_dump_json().encode()
        answer = await self.call("POST", self._path("clients"), token=enrolment_token, body=body)
        return parse(EnrolResponse, answer.body)

    async def task(
        self, wait: int, *, retry: bool = True, carrying: str | None = None, progress: float | None = None
    ) -> Task | None:
        """The client's open task, or None after at most ``wait`` seconds. Refused 410 where the federation ended.

        With ``carrying``, the id of the task that it carries out: another one. Refused 409 once that one is closed.
        """
        about = {} if carrying is None else {"carrying": carrying}
        if progress is not None:
            about["progress"] = f"{progress:.2f}"
        answer = await self._poll("GET", "task", wait, retry, about)
        if answer.status == 204:
            return None
        task = parse(Task, answer.body)
        if self.sent is not None:
            self.sent.asked(task)
        return task

    async def payload(self, task: Task, folder: Path | None = None) -> bytes | Path:
        """The task's tensors, as announced; large ones in a file of ``folder``, if one is given.

        Raises:
            BadAnswer: another origin than the coordinator's, too many bytes, or others than the task announces.
        """
        if task.payload.bytes > MAX_PAYLOAD_BYTES:
            raise BadAnswer(f"the payload has {task.payload.bytes} bytes; {MAX_PAYLOAD_BYTES} are allowed: not fetched")
        url, size = self._own_path(task.payload.url), task.payload.bytes
        wanted = transfers.Wanted(size, task.payload.sha256)
        if folder is not None and size >= transfers.IN_FILES:
            return await transfers.fetch(self, url, wanted, folder)
        answer = await self.call("GET", url, token=self.token, limit=task.payload.bytes)
        digest = "sha256:" + hashlib.sha256(answer.body).hexdigest()
        if len(answer.body) != task.payload.bytes or digest != task.payload.sha256:
            raise BadAnswer(
                f"the payload of task {task.task_id} has {len(answer.body)} bytes and digest {digest}; "
                f"{task.payload.bytes} bytes and {task.payload.sha256} were announced"
            )
        return answer.body

    async def send_update(self, task_id: str, body: Body) -> None:
        """Send an update; returns when the coordinator has it (201, or 200 where it already had these bytes)."""
        await transfers.send(self, self._task_path(task_id, "update"), body)

    async def send_exchange(self, task_id: str, body: bytes) -> None:
        """Answer a step of a secure sum; returns when the coordinator has just these bytes."""
        headers = {"Content-Type": "application/octet-stream", "Content-Digest": Body.of(body).digest_field}
        await self.call("PUT", self._task_path(task_id, "exchange"), token=self.token, body=body, headers=headers)

    async def send_evaluation(self, task_id: str, evaluation: EvaluationRequest) -> None:
        """Send accuracies."""
        body = evaluation.model_dump_json().encode()
        await self.call("PUT", self._task_path(task_id, "evaluation"), token=self.token, body=body)

    async def send_failure(self, task_id: str, failure: FailureRequest) -> None:
        """Tell the coordinator not to wait for this task."""
        body = failure.model_dump_json().encode()
        await self.call("POST", self._task_path(task_id, "failure"), token=self.token, body=body)

    async def ask(self, kind: type[AnyMessage], resource: str, **query: str | int) -> AnyMessage:
        """What a resource of the federation answers this client."""
        path = self._path(resource) + (f"?{urlencode(query)}" if query else "")
        return parse(kind, (await self.call("GET", path, token=self.token)).body)

    async def withdraw(self) -> None:
        """Withdraw this client. Refused 403 if it has withdrawn already, 409 if the federation has ended."""
        await self.call("POST", self._path("withdrawal"), token=self.token)

    async def _poll(
        self,
        verb: str,
        resource: str,
        wait: int,
        retry: bool = True,
        about: Mapping[str, str] | None = None,
    ) -> Reply:
        """The answer to a poll of at most ``wait`` seconds; of fewer where there are several coordinators."""
        patience, headers = Patience(self), {"Authorization": f"Bearer {self.token}"}
        while True:
            seconds = min(wait, SHORT_POLL) if self.book.several else wait
            timeouts = httpx.Timeout(seconds + POLL_MARGIN, connect=TIMEOUT.connect)
            path = f"{self._path(resource)}?{urlencode({'wait': seconds, **(about or {})})}"
            try:
                answer = await self.once(verb, path, lambda: None, headers, timeouts, MAX_JSON_BYTES, None)
            except (httpx.TransportError, Unavailable) as error:
                if not retry:
                    raise self.unreachable(error) from None
                await patience.wait(error)
            else:
                patience.moved()
                return answer

    def _path(self, *parts: str) -> str:
        return "/".join(["/v1/federations", *(quote(part, safe="") for part in (self.federation, *parts))])

    def _task_path(self, task_id: str, resource: str) -> str:
        return self._path("tasks", task_id, resource)

    def _own_path(self, url: str) -> str:
        try:
            joined = httpx.URL(self.book.current + "/").join(url)
        except httpx.InvalidURL:
            raise BadAnswer("the address of the payload cannot be read") from None
        own = httpx.URL(self.book.current)
        if _origin(joined) != _origin(own):
            raise BadAnswer(
                f"the payload lies on {_origin(joined)}, not on the coordinator {_origin(own)}: not fetched"
            )
        return joined.raw_path.decode("ascii")


def open_http(settings: Settings) -> httpx.AsyncClient:
    """The HTTP client for the settings' coordinators. Raises as `options_to`."""
    return httpx.AsyncClient(timeout=TIMEOUT, **options_of(settings))


def http_to(
    coordinators: str,
    ca_file: Path | None,
    own: tuple[Path, Path | None] | None = None,
    proxy: str | None = None,
) -> httpx.AsyncClient:
    """The HTTP client for coordinators; arguments and errors are those of `options_to`."""
    return httpx.AsyncClient(timeout=TIMEOUT, **options_to(coordinators, ca_file, own, proxy))


def options_of(settings: Settings) -> dict[str, Any]:
    """`options_to` the settings' coordinators."""
    own = None if settings.client_cert is None else (settings.client_cert, settings.client_key)
    return options_to(settings.coordinator, settings.ca_file, own, settings.proxy)


def options_to(
    coordinators: str, ca_file: Path | None, own: tuple[Path, Path | None] | None, proxy: str | None
) -> dict[str, Any]:
    """Options of an httpx client for coordinators whose certificates the authority in ``ca_file`` may have signed.

    ``own`` is this client's certificate and its key, where the coordinator asks for one; ``proxy`` as of
    `network.http_options`.

    Raises:
        ClientError: USAGE for a certificate file that cannot be read, or a proxy that cannot be used.
    """
    try:
        verify = trust(ca_file)
        options = http_options(coordinators, verify, proxy)
    except ValueError as error:
        raise ClientError(Exit.USAGE, str(error)) from None
    if own is not None:
        try:
            verify.load_cert_chain(own[0], own[1], lambda: "")  # an empty password: nobody is there to be asked
        except (OSError, ssl.SSLError) as error:
            files = f"--client-cert {own[0]}" + (f" and --client-key {own[1]}" if own[1] is not None else "")
            text = f"{files} cannot be used: {why(error)}"
            raise ClientError(Exit.USAGE, text) from None
    return options


def _origin(url: httpx.URL) -> str:
    port = url.port or {"http": 80, "https": 443}.get(url.scheme)
    return f"{url.scheme}://{url.host}:{port}"
