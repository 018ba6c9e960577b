"""An update between training and its verdict: killed, lost, late, refused; private state follows the coordinator."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http import connection
from promptfed.client_service.http.coordinator_client import CoordinatorClient
from promptfed.client_service.settings import Settings, make_settings
from promptfed.client_service.state.known_addresses import FILE, add_known, keep_known
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.training import trainer
from promptfed.shared.messages import PROBLEM_BASE
from promptfed.shared.methods.promptfl import CoOp
from promptfed.shared.seeds import derive_seed
from promptfed.shared.service import addresses
from promptfed.shared.service.addresses import Addresses
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.compression import compressed
from promptfed.shared.tensors.torch_tensors import arrays_of, decode, state_hash, tensors_of
from promptfed.shared.versions import PROTOCOL, VERSION
from tests.client_service.conftest import Killed, Make
from tests.support.fake_coordinator import FakeCoordinator, Wire

TRAINING = TrainingSpec(learning_rate=0.1, batch_size=8).model_dump()


COOP = {"name": "coop", "m": 4}


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks that were trained, in order, however the training ended."""
    begun: list[str] = []
    real = trainer.TaskWork.train

    def counted(self: trainer.TaskWork, task: Any, *rest: Any) -> Any:
        begun.append(task.task_id)
        return real(self, task, *rest)

    monkeypatch.setattr(trainer.TaskWork, "train", counted)
    return begun


def once(action: Callable[[], None], which: int = 1) -> Callable[[httpx.Request], None]:
    """Do ``action`` at the ``which``-th sending of an update."""
    seen = 0

    def look(request: httpx.Request) -> None:
        nonlocal seen
        if request.url.path.endswith("/update"):
            seen += 1
            if seen == which:
                action()

    return look


def kill() -> None:
    raise Killed


def lose() -> None:
    raise httpx.ReadError("connection reset by peer")


def outcome(coordinator: FakeCoordinator, settings: Settings) -> tuple[str, str, Any]:
    """What must not depend on kills: the global state, the private state, and which task it belongs to."""
    state = PrivateState(settings.state_dir)
    private, provenance = state.committed()
    assert state.pending() is None
    state.close()
    return state_hash(coordinator.global_state), state_hash(private), provenance


@pytest.fixture(params=["promptfl", "coop"])
def method(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"name": request.param, "m": 4}


@pytest.fixture
def undisturbed(make: Make, settings: Settings, tmp_path: Path, method: dict[str, Any]) -> tuple[str, str, Any]:
    own = settings.model_copy(update={"state_dir": tmp_path / "undisturbed"})
    coordinator = make.coordinator(rounds=2, method=method, training=TRAINING)
    assert asyncio.run(make.worker(coordinator, settings=own).run()) is Exit.OK
    return outcome(coordinator, own)


@pytest.mark.extended
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_round_the_sending_the_stored_update_is_sent(
    make: Make,
    settings: Settings,
    undisturbed: tuple[str, str, Any],
    trainings: list[str],
    method: dict[str, Any],
    moment: str,
) -> None:
    coordinator = make.coordinator(rounds=2, method=method, training=TRAINING)
    wire = Wire(coordinator.app, **{moment: once(kill, 2)})
    with pytest.raises(Killed):
        asyncio.run(make.worker(coordinator, http=httpx.AsyncClient(transport=wire)).run())
    stored = (settings.state_dir / "pending" / "update.safetensors").read_bytes()

    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert len(trainings) == len(set(trainings)) == 2
    assert outcome(coordinator, settings) == undisturbed
    updates = [body for body in coordinator.received if b"payload_sha256" in body]
    assert updates.count(stored) == (1 if moment == "before" else 2)
    statuses = [call[2] for call in coordinator.calls if call[1].endswith("/update")]
    assert statuses == [201, 201] if moment == "before" else sorted(statuses) == [200, 201, 201]


@pytest.mark.extended
def test_what_was_accepted_is_committed_after_the_federations_end(
    make: Make, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receipt waited for the next task when the client was killed, and the federation ended meanwhile."""
    coordinator = make.coordinator(rounds=2, method=COOP, training=TRAINING)
    with pytest.raises(Killed):
        wire = Wire(coordinator.app, after=once(kill, 2))
        asyncio.run(make.worker(coordinator, http=httpx.AsyncClient(transport=wire)).run())
    coordinator.state, coordinator.plan = "finished", []
    served: list[int | None] = []
    restore = trainer.TaskWork.restore_serving

    def restored(self: trainer.TaskWork, cancelled: Any) -> None:
        restore(self, cancelled)
        served.append(self.state.committed()[1].round)

    monkeypatch.setattr(trainer.TaskWork, "restore_serving", restored)
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert outcome(coordinator, settings)[2].round == 2
    assert served == [1, 2], "predictions come from what was committed last"
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert served == [1, 2], "nothing is left to take part in"


@pytest.mark.extended
def test_killed_in_training_the_task_is_trained_again_from_committed_state(
    make: Make,
    settings: Settings,
    undisturbed: tuple[str, str, Any],
    trainings: list[str],
    method: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = make.coordinator(rounds=2, method=method, training=TRAINING)
    with monkeypatch.context() as patch:

        def killed(self: PrivateState, *arguments: Any) -> None:
            if len(trainings) == 2:  # in the second round, when all has been trained and nothing is on disk
                raise Killed

            write(self, *arguments)

        write = PrivateState.write_pending
        patch.setattr(PrivateState, "write_pending", killed)
        with pytest.raises(Killed):
            asyncio.run(make.worker(coordinator).run())
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert len(trainings) == 3
    assert trainings[1] == trainings[2]
    assert outcome(coordinator, settings) == undisturbed


@pytest.mark.extended
def test_an_answer_that_was_lost_is_asked_for_again_and_commits_once(
    make: Make, settings: Settings, undisturbed: tuple[str, str, Any], trainings: list[str], method: dict[str, Any]
) -> None:
    coordinator = make.coordinator(rounds=2, method=method, training=TRAINING)
    events: list[str] = []
    http = httpx.AsyncClient(transport=Wire(coordinator.app, after=once(lose)))
    worker = make.worker(coordinator, http=http, hook=lambda event, facts: events.append(event))
    assert asyncio.run(worker.run()) is Exit.OK
    assert [call[2] for call in coordinator.calls if call[1].endswith("/update")] == [201, 200, 201]
    assert events.count("accepted") == 2
    assert len(trainings) == 2
    assert outcome(coordinator, settings) == undisturbed


@pytest.mark.extended
def test_update_that_comes_too_late_takes_private_state_with_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    started_from: list[str] = []
    real = CoOp.train

    def watched(self: CoOp, context: Any, payload: Any, private: Any) -> Any:
        started_from.append(state_hash(private))
        return real(self, context, payload, private)

    monkeypatch.setattr(CoOp, "train", watched)
    coordinator = make.coordinator(rounds=3, method=COOP, training=TRAINING, closed_phases={2})
    events: list[str] = []
    worker = make.worker(coordinator, hook=lambda event, facts: events.append(event))
    assert asyncio.run(worker.run()) is Exit.OK
    # Round 3 starts from what round 1 left; round 2 never happened here.
    assert started_from[0] == state_hash({})
    assert started_from[2] == started_from[1] != started_from[0]
    assert events.count("accepted") == 2
    assert events.count("discarded") == 1
    assert outcome(coordinator, make.settings)[2].round == 3
    refusal = json.loads((make.settings.state_dir / "last-refusal.json").read_text())
    assert (refusal["kind"], refusal["round"], refusal["status"]) == ("phase-closed", 2, 409)
    assert not coordinator.failures


@pytest.mark.extended
def test_a_kill_while_the_late_update_is_discarded_changes_nothing(make: Make, settings: Settings) -> None:
    coordinator = make.coordinator(rounds=1, method=COOP, training=TRAINING)
    wire = Wire(coordinator.app, before=once(kill))
    with pytest.raises(Killed):
        asyncio.run(make.worker(coordinator, http=httpx.AsyncClient(transport=wire)).run())
    coordinator.plan.pop(0)  # the deadline passes while the client is away
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert outcome(coordinator, settings)[1] == state_hash({})


@pytest.mark.extended
def test_no_private_tensor_is_in_any_byte_that_is_sent(make: Make, settings: Settings) -> None:
    coordinator = make.coordinator(rounds=3, method=COOP, training=TRAINING)
    private: list[bytes] = []
    worker = make.worker(coordinator)

    def collect(event: str, facts: Any) -> None:
        if event == "trained":
            private.append((settings.state_dir / "pending" / "private.safetensors").read_bytes())

    worker.monitor._hook = collect
    assert asyncio.run(worker.run()) is Exit.OK

    sent = b"".join(coordinator.received)
    rows = [stored[-4 * coordinator.shape.d_t :] for stored in private]
    assert len(set(rows)) == 3
    for row in rows:
        # Eight bytes are two numbers: no pair of neighbours of any trained vector was sent.
        assert not any(row[start : start + 8] in sent for start in range(0, len(row), 4))
    updates = [body for body in coordinator.received if b"payload_sha256" in body]
    assert len(updates) == 3
    for body in updates:
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        assert set(header) == {"__metadata__"}
        assert len(body) == 8 + int.from_bytes(body[:8], "little")
        about = json.loads(header["__metadata__"]["promptfed"])
        assert set(about) == {"task_id", "payload_sha256", "metrics"}
        assert set(about["metrics"]) == {"loss", "train_seconds", "trained_parameters"}


# A client that sends compressed changes.


def sent(coordinator: FakeCoordinator) -> list[Tensors]:
    return [decode(body)[0] for body in coordinator.received if body[8:9] == b"{"]


@pytest.mark.parametrize("up", [pytest.param("bf16", marks=pytest.mark.extended), "int8"])
def test_each_change_is_encoded_with_draws_of_its_task(up: str, make: Make, settings: Settings) -> None:
    plain = make.coordinator(rounds=2)
    plain_state = {name: one.clone() for name, one in plain.global_state.items()}
    plain.compression = {"up": "none"}  # this coordinator does not move its state then
    asyncio.run(make.worker(plain, settings=settings.model_copy(update={"state_dir": settings.state_dir / "p"})).run())
    changes = [arrays_of({name: update[name] - plain_state[name] for name in update}) for update in sent(plain)]

    coordinator = make.coordinator(rounds=2, compression={"up": up})
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert len(sent(coordinator)) == len(changes) == 2
    for round, (change, body) in enumerate(zip(changes, sent(coordinator), strict=True), 1):
        seed = derive_seed(7, "compression", round, "train", settings.name)
        wanted = compressed(change, up, np.random.default_rng(seed))
        assert body.keys() == wanted.keys()
        assert all(torch.equal(tensors_of(wanted)[name], body[name]) for name in wanted)


# Several coordinators: a client leaves one that is gone.


A, B, C = "https://a.example", "https://b.example", "https://c.example"


GONE = 0.15


Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENT_SECONDS", GONE)
    monkeypatch.setattr(addresses, "GONE_SECONDS", 60.0)
    monkeypatch.setattr(connection, "QUICK_BACKOFF", 0.01)


class Hosts:
    """Coordinators by their addresses; the requests that each was sent."""

    def __init__(self, **handlers: Handler):
        self.handlers = handlers
        self.asked: list[str] = []
        self.requests: list[httpx.Request] = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        name = request.url.host.partition(".")[0]
        self.asked.append(name)
        answer = await self.handlers[name](request)
        answer.headers[PROTOCOL] = str(VERSION)
        return answer

    def client(self, given: str, **options: Any) -> CoordinatorClient:
        http = httpx.AsyncClient(transport=httpx.MockTransport(self.answer))
        return CoordinatorClient(http, given, "fed", token="secret", **options)


async def silent(request: httpx.Request) -> httpx.Response:
    await asyncio.sleep(request.extensions["timeout"]["read"])
    raise httpx.ReadTimeout("nothing was heard")


async def refused(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


async def idle(request: httpx.Request) -> httpx.Response:
    return httpx.Response(204)


@pytest.mark.parametrize("gone", [silent, refused])
def test_a_poll_goes_to_the_next_one_and_stays_there(gone: Handler) -> None:
    hosts = Hosts(a=gone, b=idle)
    client = hosts.client(f"{A},{B}")

    async def play() -> float:
        begun = time.monotonic()
        assert await client.task(30) is None
        return time.monotonic() - begun

    assert asyncio.run(play()) < 20 * GONE
    assert hosts.asked == ["a", "b"]
    assert all(request.url.params["wait"] == "2" for request in hosts.requests), "soon another one can be asked"
    hosts.asked.clear()
    assert asyncio.run(client.task(30)) is None
    assert hosts.asked == ["b"]


def test_who_goes_silent_in_the_middle_of_an_answer_is_left() -> None:
    async def stops(request: httpx.Request) -> httpx.Response:
        async def begins() -> AsyncIterator[bytes]:
            yield b" "
            await silent(request)

        return httpx.Response(200, content=begins())

    hosts = Hosts(a=stops, b=idle)
    assert asyncio.run(hosts.client(f"{A},{B}").task(30)) is None
    assert hosts.asked == ["a", "b"]


def test_with_one_address_a_poll_waits_as_long_as_it_is_to() -> None:
    hosts = Hosts(a=idle)
    assert asyncio.run(hosts.client(A).task(30)) is None
    assert hosts.asked == ["a"]
    assert hosts.requests[0].url.params["wait"] == "30"
    assert hosts.requests[0].extensions["timeout"]["read"] == 45.0


def test_a_503_is_not_waited_for_where_another_one_may_answer() -> None:
    async def away(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503, headers={"Retry-After": "60"})

    hosts = Hosts(a=away, b=idle)
    begun = time.monotonic()
    assert asyncio.run(hosts.client(f"{A},{B}").task(30)) is None
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("waiting", [1, 3])
def test_one_that_waits_is_left_for_the_next_at_once(waiting: int) -> None:
    turns = 0

    async def waits(request: httpx.Request) -> httpx.Response:
        body = {"type": f"{PROBLEM_BASE}waiting", "title": "t", "status": 503, "detail": "d"}
        return httpx.Response(503, headers={"Retry-After": "1", "Connection": "close"}, json=body)

    async def takes_over(request: httpx.Request) -> httpx.Response:
        nonlocal turns
        turns += 1
        return await (waits if turns < waiting else idle)(request)

    hosts = Hosts(a=waits, b=takes_over)
    assert asyncio.run(hosts.client(f"{A},{B}").task(30)) is None
    assert hosts.asked == ["a", "b"] * waiting


def test_a_redirect_is_followed_to_nobody() -> None:
    async def moved(request: httpx.Request) -> httpx.Response:
        return httpx.Response(307, headers={"Location": B + request.url.raw_path.decode()})

    hosts = Hosts(a=moved, b=idle)
    with pytest.raises(connection.Refused, match="redirects are not followed"):
        asyncio.run(hosts.client(f"{A},{B}").task(0))
    assert hosts.asked == ["a"]


def test_addresses_that_were_given_are_known_to_later_starts(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)

    def started(given: str, allowed: Callable[[str], bool] = lambda address: True) -> list[str]:
        addresses = Addresses(given)
        add_known(addresses, tmp_path, allowed)
        keep_known(addresses, state)
        return addresses.all

    assert started(A) == [A]
    assert not (tmp_path / FILE).exists()
    assert started(f"{A},{B}") == [A, B]
    assert json.loads((tmp_path / FILE).read_text()) == [A, B]
    assert started(B) == [B, A]
    assert started(A, lambda address: address != B) == [A], "the site's policy does not list it"
    assert started(C) == [C], "they have moved: what is kept is of others"
    for damaged in (b"\xff", b"{}", b"[1]"):
        (tmp_path / FILE).write_bytes(damaged)
        assert started(A) == [A]


def test_several_addresses_are_one_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"federation": "f", "name": "n", "data": "d"}
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PROMPTFED_CLIENT_COORDINATOR", f"{A}/, {B}")
    settings = make_settings(**given)
    assert settings.coordinator == f"{A},{B}"
    assert settings.first_coordinator == A
    assert settings.state_dir == tmp_path / "promptfed" / "a.example" / "f" / "n"
    (tmp_path / "promptfed" / "b.example" / "f" / "n").mkdir(parents=True)
    assert make_settings(**given).state_dir.parts[-3] == "b.example", "where this client has its state already"
    with pytest.raises(ClientError, match=r"http://c\.example would carry the client's secret"):
        make_settings(**given, coordinator=f"{A},http://c.example")
    for empty in ("name", "state_dir", "data"):
        with pytest.raises(ClientError, match=f"--{empty.replace('_', '-')} is empty"):
            make_settings(**{"coordinator": "http://127.0.0.1:1", "federation": "f", "data": "digits", empty: ""})
    for idle, told in (({"client_key": "k"}, "goes with --client-cert"), ({"check": True, "sent": True}, "give one")):
        with pytest.raises(ClientError, match=told):
            make_settings(**given, **idle)
    with pytest.raises(ClientError, match="'c' is not an address"):
        make_settings(**given, coordinator=f"{A},c")
