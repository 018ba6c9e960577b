"""Calls to the coordinator: what is tried again, what is refused, what is never followed."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http import connection, coordinator_client
from promptfed.client_service.http.bodies import Body, SentLog
from promptfed.client_service.http.connection import BadAnswer, Refused
from promptfed.client_service.http.coordinator_client import CoordinatorClient, open_http
from promptfed.client_service.settings import Settings, make_settings
from promptfed.shared.api.api_schemas import SpendList
from promptfed.shared.messages import (
    EnrolmentInfo,
    EnrolRequest,
    EnrolResponse,
    EvaluationRequest,
    FailureRequest,
    Task,
)
from promptfed.shared.service.digests import Damaged, field_of
from promptfed.shared.spec.spec import BackboneShape
from promptfed.shared.versions import PROTOCOL, VERSION
from promptfed.testing.clients import SHAPE

Handler = Callable[[httpx.Request], httpx.Response]
BASE = "https://coordinator.example"
PAYLOAD = b"tensors"


def marked(answer: httpx.Response) -> httpx.Response:
    answer.headers[PROTOCOL] = str(VERSION)
    return answer


class Scripted:
    """Answers requests in order; the last answer is repeated. An exception is raised instead of answered.

    Answers have a coordinator's mark, unless they have the status of ``foreign``, which somebody else gives.
    """

    def __init__(
        self, *answers: httpx.Response | Exception | Handler, give_up_after: float = 1e6, foreign: int | None = None
    ):
        self.answers, self.foreign = list(answers), foreign
        self.requests: list[httpx.Request] = []
        self.delays: list[float] = []
        http = httpx.AsyncClient(transport=httpx.MockTransport(self._answer), follow_redirects=True)
        self.client = CoordinatorClient(
            http, BASE, "fed", token="secret", give_up_after=give_up_after, sleep=self._sleep
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        given = answer(request) if callable(answer) else answer
        return given if given.status_code == self.foreign else marked(given)

    async def _sleep(self, seconds: float) -> None:
        self.delays.append(seconds)


def make_task(url: str = "/v1/federations/fed/tasks/t/payload", size: int = len(PAYLOAD)) -> Task:
    config = {"method": {"name": "promptfl"}, "training": {}, "backbone": {}, "class_names": None, "template": "{}"}
    return Task.model_validate({
        "task_id": "t", "kind": "train", "round": 1, "phase": "train", "deadline": datetime.now(UTC),
        "seconds_left": 1,
        "payload": {"url": url, "bytes": size, "sha256": "sha256:" + hashlib.sha256(PAYLOAD).hexdigest()},
        "config": config | {"rounds": 1, "seed": 0, "peers": []},
    })  # fmt: skip


def problem(status: int, kind: str, detail: str = "why", **extra: Any) -> httpx.Response:
    body = {"type": f"https://promptfed.invalid/problems/{kind}", "title": "t", "status": status, "detail": detail}
    return httpx.Response(status, json=body, **extra)


def send(script: Scripted) -> None:
    asyncio.run(script.client.send_failure("t", FailureRequest(type="x", detail="y")))


def test_connection_errors_and_5xx_are_tried_again_with_growing_jittered_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), *(httpx.Response(500) for _ in range(8))]
    script = Scripted(*failures, httpx.Response(201, json=RECEIPT))
    with caplog.at_level(logging.INFO, "promptfed.client"):
        send(script)
    told = [record.getMessage() for record in caplog.records]
    assert [f"at {BASE} does not answer" in line for line in told] == [True] * 10 + [False]
    assert told[-1] == f"the coordinator at {BASE} answers again"
    assert len(script.requests) == 11
    for attempt, delay in enumerate(script.delays):
        longest = min(15.0, 0.25 * 2**attempt)
        assert longest / 2 <= delay <= longest
    assert len(set(script.delays)) == 10
    assert script.client.has_served


def proven(content: bytes, status: int = 200) -> httpx.Response:
    """An answer with its digest, as a coordinator sends it."""
    return httpx.Response(status, content=content, headers={"Content-Digest": field_of(content)})


def whole_task() -> bytes:
    task = make_task()
    payload = task.payload.model_copy(update={"data": base64.b64encode(PAYLOAD).decode()})
    return task.model_copy(update={"payload": payload}).model_dump_json().encode()


RECEIPT = {"task_id": "t", "status": "accepted"}
INFO = {
    "federation_id": "f", "name": "fed", "state": "running", "evaluate_every": 1,
    **{key: value for key, value in make_task().config.model_dump(mode="json").items() if key != "peers"},
}  # fmt: skip
REQUEST = EnrolRequest(
    name="n", secret="a" * 64, num_samples=1, class_names=["sun"], backbone_fingerprint="sha256:" + "a" * 64,
    backbone_shape=BackboneShape(**SHAPE),
)  # fmt: skip
CALLS: dict[str, tuple[bytes, Callable[[CoordinatorClient], Any]]] = {
    "enrolment": (json.dumps(INFO).encode(), lambda client: client.enrolment("t")),
    "enrol": (b'{"client_id": "1", "federation_id": "f", "name": "n"}', lambda client: client.enrol("t", REQUEST)),
    "task": (whole_task(), lambda client: client.task(1)),
    "payload": (PAYLOAD, lambda client: client.payload(make_task())),
    "update": (json.dumps(RECEIPT).encode(), lambda client: client.send_update("t", Body.of(b"update"), 15)),
    "exchange": (json.dumps(RECEIPT).encode(), lambda client: client.send_exchange("t", b"{}")),
    "evaluation": (
        json.dumps(RECEIPT).encode(),
        lambda client: client.send_evaluation("t", EvaluationRequest(splits={}), 15),
    ),
    "failure": (
        json.dumps(RECEIPT).encode(),
        lambda client: client.send_failure("t", FailureRequest(type="x", detail="y")),
    ),
    "spends": (b'{"federation_id": "f", "client": "n", "spends": []}', lambda client: client.ask(SpendList, "spends")),
}


def flipped(given: httpx.Response, at: int) -> httpx.Response:
    body = bytearray(given.content)
    body[at // 8] ^= 1 << at % 8
    return httpx.Response(given.status_code, content=bytes(body), headers=given.headers)


def undecodable(given: httpx.Response) -> httpx.Response:
    headers = {**given.headers, "Content-Encoding": "gzip"}
    return httpx.Response(given.status_code, stream=httpx.ByteStream(given.content), headers=headers)


def with_body(change: Callable[[bytes], bytes]) -> Callable[[httpx.Response], httpx.Response]:
    return lambda given: httpx.Response(given.status_code, content=change(given.content), headers=given.headers)


def undigested(given: httpx.Response) -> httpx.Response:
    return httpx.Response(given.status_code, content=b"{}")


DAMAGES: dict[str, Callable[[httpx.Response], httpx.Response]] = {
    "first bit": lambda given: flipped(given, 0),
    "middle bit": lambda given: flipped(given, 4 * len(given.content) + 1),
    "last bit": lambda given: flipped(given, 8 * len(given.content) - 1),
    "cut": with_body(lambda body: body[:-3]),
    "nothing left": with_body(lambda body: b""),
    "a script appended": with_body(lambda body: body + b"<script>1</script>"),
    "another encoding": undecodable,
    "no digest, and not understood": undigested,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", CALLS)
def test_what_was_damaged_on_the_way_is_asked_for_again_by_every_call(name: str, damage: str) -> None:
    content, use = CALLS[name]
    script = Scripted(lambda _: DAMAGES[damage](proven(content)), lambda _: proven(content))
    told = asyncio.run(use(script.client))
    assert len(script.requests) == 2
    assert told == asyncio.run(use(Scripted(lambda _: proven(content)).client))
    script = Scripted(lambda _: DAMAGES[damage](proven(content)), give_up_after=0.0)
    with pytest.raises(ClientError, match=r"something on the way.*changes what is sent") as end:
        asyncio.run(use(script.client))
    assert end.value.exit is Exit.UNREACHABLE, "what starts a client starts it again"


def test_no_flipped_bit_of_a_task_passes() -> None:
    """Also those with which it is a task still: of another round, with another digest, another rate."""
    content = whole_task()
    bits = list(range(0, 8 * len(content), 7))
    script = Scripted(*(lambda _, at=at: flipped(proven(content), at) for at in bits), lambda _: proven(content))
    assert asyncio.run(script.client.task(1)) == Task.model_validate_json(content)
    assert len(script.requests) == len(bits) + 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_refusal_is_no_refusal(damage: str) -> None:
    body = problem(409, "phase-closed").content
    script = Scripted(lambda _: DAMAGES[damage](proven(body, 409)), lambda _: proven(body, 409))
    with pytest.raises(Refused, match="phase-closed"):
        send(script)
    assert len(script.requests) == 2


def test_what_a_proxy_compresses_on_the_way_is_whole() -> None:
    content = whole_task()
    headers = {"Content-Encoding": "gzip", "Content-Digest": field_of(content)}
    script = Scripted(httpx.Response(200, content=gzip.compress(content), headers=headers))
    assert asyncio.run(script.client.task(1)) == Task.model_validate_json(content)


@pytest.mark.parametrize("kind", ["digest-mismatch", "incomplete-body"])
@pytest.mark.parametrize("name", ["enrol", "update", "exchange", "evaluation", "failure"])
def test_a_request_that_was_damaged_on_the_way_up_is_sent_again_as_long_as_one_that_met_a_502(
    name: str, kind: str
) -> None:
    content, use = CALLS[name]
    script = Scripted(*([lambda _: problem(400, kind)] * 5), lambda _: proven(content, 201))
    asyncio.run(use(script.client))
    assert len({(request.content, request.headers["content-digest"]) for request in script.requests}) == 1
    assert script.requests[0].headers["content-digest"] == field_of(script.requests[0].content)
    assert len(script.requests) == 6


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 413, 415, 422, 429])
def test_4xx_is_not_tried_again(status: int) -> None:
    script = Scripted(problem(status, "some-kind", "the reason"))
    with pytest.raises(Refused) as refusal:
        send(script)
    assert len(script.requests) == 1
    assert (refusal.value.status, refusal.value.kind, refusal.value.detail) == (status, "some-kind", "the reason")


@pytest.mark.parametrize("status", [200, 302, 307, 400, 401, 403, 404, 410, 413, 422, 429, 503])
@pytest.mark.parametrize("body", [b"<title>Please log in &amp; wait</title>", b'{"message": "Forbidden"}', b"\x1f"])
def test_what_somebody_else_answers_is_tried_again_whatever_its_code(
    status: int, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    origin = "https://other.example/v1/federations/fed/tasks/t/failure"
    given = httpx.Response(status, headers={"Location": origin}, content=body)
    script = Scripted(given, httpx.Response(201, json=RECEIPT), foreign=status)
    send(script)
    assert [request.url.host for request in script.requests] == ["coordinator.example"] * 2
    says = f"redirects to {origin}" if status in (302, 307) else "not of a coordinator"
    if b"title" in body and status not in (302, 307):
        says = "the page 'Please log in & wait' of somebody else"
    assert says in caplog.text


def test_a_large_page_of_somebody_else_is_not_read_to_its_end() -> None:
    closed = list[bool]()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"<html>" * 1000

    class Endless(httpx.AsyncByteStream):
        def __aiter__(self) -> AsyncIterator[bytes]:
            return endless()

        async def aclose(self) -> None:
            closed.append(True)

    script = Scripted(lambda request: httpx.Response(200, stream=Endless()), foreign=200, give_up_after=0.0)
    with pytest.raises(ClientError, match="200 OK: a body of somebody else") as end:
        send(script)
    assert (end.value.exit, closed) == (Exit.UNREACHABLE, [True])


def test_a_question_that_is_not_repeated_ends_with_its_failure() -> None:
    script = Scripted(httpx.ConnectError("refused"), httpx.Response(204))
    with pytest.raises(ClientError, match="refused") as end:
        asyncio.run(script.client.task(1, retry=False, carrying="t"))
    assert (end.value.exit, len(script.requests), script.delays) == (Exit.UNREACHABLE, 1, [])


def test_a_proxy_that_wants_a_login_is_told_and_not_asked_again() -> None:
    script = Scripted(httpx.Response(407), foreign=407)
    with pytest.raises(ClientError, match=f"the proxy wants a login before it connects to {BASE}") as end:
        send(script)
    assert (end.value.exit, len(script.requests)) == (Exit.UNREACHABLE, 1)


def test_a_coordinator_that_never_answers_ends_the_client() -> None:
    script = Scripted(httpx.ConnectError("connection refused"), give_up_after=0.05)
    with pytest.raises(
        ClientError, match=r"no answer from the coordinator at https://coordinator\.example: conn"
    ) as end:
        send(script)
    assert end.value.exit is Exit.UNREACHABLE


UNTRUSTED = httpx.ConnectError("certificate verify failed: self-signed")
UNTRUSTED.__cause__ = ssl.SSLCertVerificationError("self-signed")


@pytest.mark.parametrize(
    ("served", "error", "explained", "waits"),
    [
        (False, httpx.ConnectError("refused"), None, True),
        (False, httpx.ConnectError("refused"), "it speaks HTTP, not HTTPS", False),  # wrong from the start
        (True, httpx.ConnectError("refused"), "it speaks HTTP, not HTTPS", True),  # a proxy that is being set up anew
        (True, connection.Unavailable(503, "starting", None), None, True),
        (True, Damaged("half an answer"), None, True),
        (False, UNTRUSTED, None, False),
        (True, UNTRUSTED, None, False),
        (True, OSError("no room"), None, False),  # of this machine: no coordinator mends it
    ],
)
def test_what_may_pass_is_waited_for_and_what_was_wrong_from_the_start_is_said(
    served: bool, error: Exception, explained: str | None, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def run() -> None:
        async with httpx.AsyncClient() as http:
            line = connection.CoordinatorConnection(http, "http://c", "f", 60.0, sleep=sleep)
            line._served = "http://c" if served else ""
            monkeypatch.setattr(line, "explained", lambda error: explained)
            await connection.Patience(line).wait(error)

    if waits:
        asyncio.run(run())
    else:
        with pytest.raises(ClientError) as ended:
            asyncio.run(run())
        assert ended.value.exit is Exit.UNREACHABLE
    assert len(slept) == waits


def test_a_certificate_that_is_not_trusted_is_not_tried_again() -> None:
    error = httpx.ConnectError("certificate verify failed")
    error.__cause__ = ssl.SSLCertVerificationError("self-signed certificate")
    script = Scripted(error)
    with pytest.raises(ClientError, match="--ca-file"):
        send(script)
    assert len(script.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_no_redirect_is_followed(status: int) -> None:
    script = Scripted(httpx.Response(status, headers={"Location": "https://elsewhere.example/steal"}))
    for call in (
        script.client.payload(make_task()),
        script.client.task(1),
        script.client.send_update("t", Body.of(b"update")),
    ):
        with pytest.raises(Refused, match="redirects are not followed") as refusal:
            asyncio.run(call)
        assert refusal.value.kind == "redirect"
    assert {request.url.host for request in script.requests} == {"coordinator.example"}
    assert len(script.requests) == 3


@pytest.mark.parametrize("url", [
    "https://elsewhere.example/payload",
    "//elsewhere.example/payload",
    "http://coordinator.example/payload",
    "https://coordinator.example:444/payload",
    "file:///etc/passwd",
    "https://coordinator.example@elsewhere.example/payload",
    "http://host:port/payload",
    "/v1/federations/fed/tasks/t/payload",
])  # fmt: skip
def test_whatever_address_a_task_names_its_payload_comes_from_the_coordinator(url: str) -> None:
    script = Scripted(httpx.Response(200, content=PAYLOAD))
    assert asyncio.run(script.client.payload(make_task(url))) == PAYLOAD
    [request] = script.requests
    assert str(request.url) == "https://coordinator.example/v1/federations/fed/tasks/t/payload"
    assert request.headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize(("least", "folder", "in_file"), [(7, True, True), (8, True, False), (7, False, False)])
def test_a_payload_comes_into_a_file_from_a_size_on(
    least: int, folder: bool, in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_client, "IN_FILES", least)
    script = Scripted(lambda _: httpx.Response(200, stream=httpx.ByteStream(PAYLOAD)), give_up_after=0.0)
    found = asyncio.run(script.client.payload(make_task(), tmp_path if folder else None))
    assert (found.read_bytes() if in_file and isinstance(found, Path) else found) == PAYLOAD
    assert len(list(tmp_path.iterdir())) == in_file


def test_who_withdraws_says_so() -> None:
    script = Scripted(httpx.Response(204))
    asyncio.run(script.client.withdraw())
    [request] = script.requests
    assert (request.method, request.url.path) == ("POST", "/v1/federations/fed/withdrawal")
    assert request.headers["authorization"] == "Bearer secret"


def test_a_payload_of_absurd_size_is_not_fetched() -> None:
    script = Scripted(httpx.Response(200, content=PAYLOAD))
    with pytest.raises(BadAnswer, match="are allowed"):
        asyncio.run(script.client.payload(make_task(size=1 << 40)))
    assert not script.requests


@pytest.mark.parametrize("content", [b"tensorS", b"tensor", b"", b"tensors and more"])
def test_a_payload_that_is_not_what_was_announced_is_refused(content: bytes) -> None:
    script = Scripted(httpx.Response(200, content=content), give_up_after=0.0)
    with pytest.raises(ClientError, match=r"announced|larger than 7 bytes"):
        asyncio.run(script.client.payload(make_task()))


def test_an_update_carries_its_digest() -> None:
    script = Scripted(httpx.Response(201, json=RECEIPT | {"task_id": "a/../task"}))
    asyncio.run(script.client.send_update("a/../task", Body.of(b"update")))
    request = script.requests[0]
    digest = base64.b64encode(hashlib.sha256(b"update").digest()).decode()
    assert request.headers["content-digest"] == f"sha-256=:{digest}:"
    assert request.content == b"update"
    assert request.url.raw_path == b"/v1/federations/fed/tasks/a%2F..%2Ftask/update"


def test_the_long_poll_may_take_longer_than_it_waits() -> None:
    script = Scripted(httpx.Response(204))
    assert asyncio.run(script.client.task(30)) is None
    request = script.requests[0]
    assert request.url.query == b"wait=30&inline=true"
    assert request.extensions["timeout"]["read"] == 45


def with_payload(data: str) -> Task:
    task = make_task()
    return task.model_copy(update={"payload": task.payload.model_copy(update={"data": data})})


def test_a_payload_within_its_task_is_not_asked_for() -> None:
    script = Scripted(httpx.Response(500))
    assert asyncio.run(script.client.payload(with_payload(base64.b64encode(PAYLOAD).decode()))) == PAYLOAD
    assert not script.requests


@pytest.mark.parametrize(
    "data", ["no base64!", base64.b64encode(b"tensorS").decode(), base64.b64encode(PAYLOAD[:-1]).decode()]
)
def test_another_payload_within_a_task_is_not_used(data: str) -> None:
    script = Scripted(httpx.Response(200, content=PAYLOAD))
    assert asyncio.run(script.client.payload(with_payload(data))) == PAYLOAD
    assert [request.url.path for request in script.requests] == ["/v1/federations/fed/tasks/t/payload"]


async def answer(client: CoordinatorClient, kind: str) -> Task | None:
    if kind == "update":
        return await client.send_update("s", Body.of(b"x"), 15)
    return await client.send_evaluation("s", EvaluationRequest(splits={}), 15)


@pytest.mark.parametrize("kind", ["update", "evaluation"])
@pytest.mark.parametrize("status", [201, 200])
def test_a_receipt_contains_the_next_task(kind: str, status: int) -> None:
    receipt = {"task_id": "s", "status": "accepted", "next": make_task().model_dump(mode="json")}
    script = Scripted(httpx.Response(status, json=receipt))
    assert asyncio.run(answer(script.client, kind)) == Task.model_validate(receipt["next"])
    assert [request.url.raw_path for request in script.requests] == [
        f"/v1/federations/fed/tasks/s/{kind}?next=15".encode()
    ]


@pytest.mark.parametrize("kind", ["update", "evaluation"])
@pytest.mark.parametrize("cut", [httpx.ReadError("cut off"), httpx.ReadTimeout("slow"), httpx.Response(504)])
def test_an_answer_that_is_cut_off_is_sent_again_without_a_wait(kind: str, cut: Any) -> None:
    """A proxy that ends whatever takes long must not keep the receipt from the client."""
    script = Scripted(cut, httpx.Response(200, json={"task_id": "s", "status": "accepted"}), foreign=504)
    lines: list[Any] = []
    script.client.sent = SentLog(lambda what, facts: lines.append((what, facts["message"])))
    assert asyncio.run(answer(script.client, kind)) is None
    assert [request.url.query for request in script.requests] == [b"next=15", b""]
    seconds = [request.extensions["timeout"]["read"] for request in script.requests]
    assert seconds == [75, 300], "a connection that is lost without a word is given up soon"
    assert len({request.content for request in script.requests}) == 1
    assert lines == [("sent", kind)], "one message, however often it is sent"


@pytest.mark.parametrize("body", [b"{}", b'{"task_id": "s", "status": "accepted", "next": {"task_id": 1}}'])
def test_a_receipt_without_a_readable_task_is_a_receipt(body: bytes) -> None:
    """Of a coordinator that has said so; what may have been damaged is asked for again."""
    script = Scripted(proven(body, 201))
    assert asyncio.run(script.client.send_update("s", Body.of(b"x"), 15)) is None
    assert len(script.requests) == 1


OTHER = f"sha256:{hashlib.sha256(b'other').hexdigest()}"
SENDING: dict[str, Callable[[CoordinatorClient], Any]] = {
    "update": lambda client: client.send_update("s", Body.of(b"x"), 15),
    "exchange": lambda client: client.send_exchange("s", b"x"),
    "evaluation": lambda client: client.send_evaluation("s", EvaluationRequest(splits={}), 15),
    "failure": lambda client: client.send_failure("s", FailureRequest(type="x", detail="y")),
}


@pytest.mark.parametrize("kind", SENDING)
def test_a_receipt_of_something_else_confirms_nothing(kind: str) -> None:
    """It is asked for again where it may have been damaged or mixed up on the way, and else refused."""
    right = {"task_id": "s", "status": "accepted"}
    wrong = [right | {"task_id": "r"}, *([right | {"sha256": OTHER}] if kind in ("update", "exchange") else [])]
    for told in wrong:
        script = Scripted(proven(json.dumps(told).encode(), 201))
        with pytest.raises(BadAnswer, match=r"the coordinator's receipt has the (task|digest) .* was sent"):
            asyncio.run(SENDING[kind](script.client))
        assert len(script.requests) == 1
        script = Scripted(httpx.Response(201, json=told), httpx.Response(200, json=right))
        asyncio.run(SENDING[kind](script.client))
        assert len(script.requests) == 2


def test_an_enrolment_of_another_name_is_refused() -> None:
    script = Scripted(proven(b'{"client_id": "1", "federation_id": "f", "name": "other"}', 201))
    with pytest.raises(BadAnswer, match="enrolled 'other', not 'n'"):
        asyncio.run(script.client.enrol("t", REQUEST))


@pytest.mark.parametrize("id", ["../../x", "a/b", "..", ".ssh", "x" * 101, ""])
def test_ids_of_a_coordinator_are_no_paths(id: str) -> None:
    """Clients name folders by the federation's id."""
    for model, given in ((EnrolmentInfo, INFO), (EnrolResponse, {"client_id": "1", "federation_id": "f", "name": "n"})):
        with pytest.raises(ValidationError):
            model.model_validate(given | {"federation_id": id})


def test_one_of_several_coordinators_is_not_kept_waiting() -> None:
    script = Scripted(httpx.Response(201, json={"task_id": "s", "status": "accepted"}))
    script.client.addresses.all.append("https://other.example")
    assert script.client.addresses.several
    asyncio.run(script.client.send_update("s", Body.of(b"x"), 15))
    assert script.requests[0].url.query == b""


@pytest.mark.parametrize("body", [b"[]", b"<html>", b'{"task_id": 1}', json.dumps({"task_id": "x"}).encode()])
def test_an_answer_that_is_no_task_is_named(body: bytes) -> None:
    script = Scripted(proven(body))
    with pytest.raises(BadAnswer, match=r"the coordinator's Task is not understood.*: install the same version"):
        asyncio.run(script.client.task(0))
    assert len(script.requests) == 1


def test_what_a_refusal_says_is_cleaned_for_the_log() -> None:
    script = Scripted(problem(409, "kind", "one\x1b[31m\ntwo\r" + "x" * 10_000))
    with pytest.raises(Refused) as refusal:
        send(script)
    assert refusal.value.detail.startswith("one [31m two x")
    assert len(refusal.value.detail) == 500


def settings_for(tmp_path: Path, **changes: Any) -> Settings:
    given = {"coordinator": "http://127.0.0.1:8080", "federation": "f", "name": "n", "data": "d", "state_dir": tmp_path}
    return make_settings(**(given | changes))


@pytest.mark.parametrize("address", ["coordinator:8080", "ftp://x", "https://", "https://u:p@host", "https://h/?q=1"])
def test_what_is_no_address_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ClientError, match="--coordinator: "):
        settings_for(tmp_path, coordinator=address)


def test_settings_name_every_offence_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ClientError) as refusal:
        settings_for(tmp_path, name="no spaces", device="tpu", max_epsilon=0)
    assert [part.split(":")[0] for part in str(refusal.value).split("; ")] == ["--name", "--device", "--max-epsilon"]


def test_the_environment_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTFED_CLIENT_DEVICE", "cuda:1")
    monkeypatch.setenv("PROMPTFED_CLIENT_ALLOW_BACKBONE", '["hf-hub:org/model"]')
    settings = settings_for(tmp_path)
    assert (settings.device, settings.allow_backbone) == ("cuda:1", ["hf-hub:org/model"])
    monkeypatch.setenv("PROMPTFED_CLIENT_ALLOW_BACKBONE", "hf-hub:org/model")
    with pytest.raises(ClientError, match="PROMPTFED_CLIENT_ALLOW_BACKBONE is no list: write JSON") as end:
        settings_for(tmp_path)
    assert end.value.exit is Exit.USAGE


def test_a_certificate_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.pem", tmp_path / "bad.pem"):
        if path.name == "bad.pem":
            path.write_text("not a certificate")
        with pytest.raises(ClientError, match=f"--ca-file .*{path.name} cannot be used"):
            open_http(settings_for(tmp_path, ca_file=path))
