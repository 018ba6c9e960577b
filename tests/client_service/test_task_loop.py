"""What a client sends of its work and makes of each verdict; with secure sums, never an update in the clear."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from promptfed.client_service import task_loop
from promptfed.client_service.exits import ClientError, Exit, Failure
from promptfed.client_service.http.connection import BadAnswer, Refused
from promptfed.client_service.privacy.agreement import WITHDRAWN, Agreement, NotAgreed
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.privacy.policy import Policy
from promptfed.client_service.privacy.protection import PrivacyPlan, SiteProtection
from promptfed.client_service.privacy.secure import SecureWork, StepAnswer, Trained
from promptfed.client_service.state.private_state import PrivateState, TensorOrigin
from promptfed.client_service.task_loop import TaskLoop
from promptfed.shared.clip import BackboneError
from promptfed.shared.data import DataError
from promptfed.shared.messages import INLINE_BYTES, FailureRequest, PrivacyEvent, SpendReport, Task
from promptfed.shared.methods.core.interface import MethodError
from promptfed.shared.methods.core.training import TaskCancelled
from promptfed.shared.privacy.accounting import epsilon_of
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.secagg import opening
from promptfed.shared.secagg.messages import ConfirmAnswer, KeysAnswer, Limits, SharesAnswer
from promptfed.shared.spec.sections import PrivacySpec, SecureAggregationSpec
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import TensorError
from promptfed.shared.tensors.torch_tensors import encode
from tests.privacy.mutants import PLAIN_PATH, UNPAID
from tests.support.agreed import agreed
from tests.support.malicious import World

EVENT = PrivacyEvent(mechanism="gaussian", q=0.25, z=2.0, count=4)

SPENT = SpendReport(events=[EVENT], epsilon=1.0, delta=1e-3, noise="seeded")


class Coordinator:
    """Notes what it is sent, and refuses all of it where it has a ``verdict``."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.bodies: list[bytes] = []
        self.verdict: Refused | None = None
        self.tasks: list[Task | None] = []
        self.told = b""

    def _take(self, what: str) -> None:
        self.sent.append(what)
        if self.verdict is not None:
            raise self.verdict

    async def task(self, wait: float) -> Task | None:
        if not self.tasks:
            raise Refused(410, "ended", "it is over")
        return self.tasks.pop(0)

    async def payload(self, task: Task, folder: Path) -> bytes:
        return self.told

    async def send_update(self, task_id: str, body: Any, wait: int = -1) -> None:
        self._take(task_id if wait <= 0 else f"{task_id}, {wait}")

    async def send_exchange(self, task_id: str, body: bytes) -> None:
        self.bodies.append(body)
        self._take(task_id)

    async def send_failure(self, task_id: str, failure: Any) -> None:
        self._take(failure.type)


class Here:
    """Computes at once."""

    is_stopped = False

    async def run(self, work: Any) -> Any:
        return work()

    def stopped(self) -> bool:
        return self.is_stopped

    def turn(self) -> AsyncExitStack:
        return AsyncExitStack()


class Told:
    """What the owner is told: events with their facts, stages."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.stages: list[str] = []

    def tell(self, event: str, **facts: Any) -> None:
        self.events.append((event, facts))

    def task(self, round: int, phase: str, stage: str) -> None:
        self.stages.append(stage)

    def stage(self, stage: str) -> None:
        self.stages.append(stage)


def loop_of(state: PrivateState, protection: SiteProtection | None = None, secure: bool = True) -> Any:
    spec = SecureAggregationSpec() if secure else None
    agreement = agreed(state, {"name": "promptfl", "m": 4}, secure_aggregation=spec)
    data = SimpleNamespace(count=lambda which: 4)
    rules = SimpleNamespace(policy=None, payloads=None)
    own = {"state": state, "agreement": agreement, "rules": rules, "data": data, "protection": protection}
    work = SimpleNamespace(**own, expect_policy=lambda task=None: None, hides_failures=False, progress=0.25)
    return TaskLoop(*cast(Any, (Coordinator(), work, Here(), Told())))


@pytest.mark.parametrize("mutant", [False, True])
def test_an_update_in_the_clear_never_leaves(mutant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant:
        PLAIN_PATH.apply(monkeypatch)
    loop = loop_of(PrivateState(tmp_path))
    loop.state.write_pending(b"an update", {}, TensorOrigin("task-1", 1, "train"))
    asyncio.run(loop._send_pending())
    assert loop.coordinator.sent == (["task-1"] if mutant else [])


def protected(ledger: Ledger, most: float = 8.0) -> SiteProtection:
    plan = PrivacyPlan(24, 2.0, 1e-3, 8, 0.25, 1.0, 1.0, most)
    ledger.open(1e-3)
    return SiteProtection(PrivacySpec(level="sample", clip=0.3), plan, ledger, SeededNoise(1), "http://x", "fed-1")


def trained_work(folder: Path) -> SecureWork:
    """A client that has trained under protection."""
    world = World(folder, count=1)
    task, work = world.task("train", 0), world.works[0]
    update = {"context": torch.full((70,), 0.5)}
    trained = Trained(update, {}, TensorOrigin(task.task_id, 1, "train", privacy="sample"), {}, SPENT)
    work.keep(task, {"context": torch.zeros(70)}, trained)
    return work


def test_a_change_is_paid_for_once_whatever_the_attempt(tmp_path: Path) -> None:
    work, ledger = trained_work(tmp_path / "work"), Ledger(None)
    loop = loop_of(PrivateState(tmp_path / "state"), protected(ledger))
    asyncio.run(loop_of(PrivateState(tmp_path / "plain"))._pay_masked(work, StepAnswer("mask-0", "mask", b"")))
    for attempt in (1, 2):
        asyncio.run(loop._pay_masked(work, StepAnswer(f"keys-{attempt}", "train", b"")))
        assert len(ledger.spends()) == attempt - 1, "keys cost nothing, nor does another attempt"
        asyncio.run(loop._pay_masked(work, StepAnswer(f"mask-{attempt}", "mask", b"")))
        (spend,) = ledger.spends()
        content = work._state.read_file("secure-work.safetensors") or b""
        assert spend.release == hashlib.sha256(content).hexdigest()
        assert spend.epsilon == epsilon_of(spend.events, 1e-3)
        assert (spend.round, spend.phase, spend.noise) == (1, "train", "seeded")


@pytest.mark.parametrize("mutant", [False, True])
def test_what_the_data_set_cannot_afford_is_deleted_unsent(
    mutant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mutant:
        UNPAID.apply(monkeypatch)
    work, ledger = trained_work(tmp_path / "work"), Ledger(None)
    loop = loop_of(PrivateState(tmp_path / "state"), protected(ledger, most=0.1))
    try:
        asyncio.run(loop._pay_masked(work, StepAnswer("mask-1", "mask", b"")))
        kind = "left"
    except Failure as failure:
        kind = failure.kind
    assert kind == ("left" if mutant else "privacy-budget-exhausted")
    assert (work.cost() is None) is not mutant
    assert ledger.spends() == []


def test_what_was_trained_without_protection_is_no_masked_change_of_a_protected_federation(tmp_path: Path) -> None:
    world = World(tmp_path / "work", count=1)
    world.keys(0)
    loop = loop_of(PrivateState(tmp_path / "state"), protected(Ledger(None)))
    with pytest.raises(Failure, match="not trained under protection") as refused:
        asyncio.run(loop._pay_masked(world.works[0], StepAnswer("mask-1", "mask", b"")))
    assert refused.value.kind == "privacy-missing"


def test_a_kept_attempt_is_gone_on_with_and_a_damaged_one_ends_the_client_by_name(tmp_path: Path) -> None:
    world = World(tmp_path, count=1)
    sent = world.keys(0)
    work, note = world.works[0], "secure-attempt.json"
    kept = json.loads(work._state.read_note(note) or "")
    needed = {name: kept[name] for name in ("about", "secrets", "answers", "accepted", "last")}
    assert {len(bytes.fromhex(secret)) for secret in needed["secrets"].values()} == {32}
    work._state.write_note(note, json.dumps(needed))
    assert world.keys(0) == sent
    without = {name: value for name, value in needed["about"].items() if name != "samples"}
    for damaged in (needed | {"about": without}, {"about": needed["about"]}):
        work._state.write_note(note, json.dumps(damaged))
        with pytest.raises(ClientError, match=r"secure-attempt\.json is damaged: restore it, or enrol anew"):
            world.keys(0)


@pytest.fixture
def anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked has been agreed to."""
    monkeypatch.setattr(Agreement, "expect", lambda self, task: None)


def test_each_step_of_a_secure_sum_is_answered_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anything: None
) -> None:
    """Trained once for two attempts, paid once; the private tensors are committed with the next evaluation."""
    world, ledger, points = World(tmp_path / "all"), Ledger(None), list[str]()
    loop = loop_of(PrivateState(tmp_path / "state"), protected(ledger))
    loop._secure, payload, trained = world.works[0], encode({"context": world.prompts}), list[str]()

    async def at_once(task: Task, job: Callable[[Callable[[], bool]], Any]) -> Any:
        return job(lambda: False)

    def train(task: Task, payload: bytes, cancelled: Callable[[], bool]) -> Trained:
        trained.append(task.task_id)
        about = TensorOrigin(task.task_id, 1, "train", privacy="sample")
        return Trained({"context": world.prompts + 0.25}, {"own": torch.ones(2)}, about, {"loss": 0.5}, SPENT)

    async def evaluate(task: Task, turn: AsyncExitStack) -> None:
        points.append("evaluated")

    monkeypatch.setattr(task_loop, "point", points.append)
    loop._watched, loop.work.trained, loop._evaluate = at_once, train, evaluate

    def carried(kind: str, told: bytes, attempt: int = 2, round: int = 1) -> bytes:
        loop.coordinator.told = told
        task = world.task(kind, 0, told, attempt=attempt, round=round)
        asyncio.run(loop._carry_out(task, AsyncExitStack()))
        return cast(bytes, loop.coordinator.bodies[-1])

    carried("train", payload, 1)
    first = KeysAnswer.model_validate_json(carried("train", payload))
    world.entries = {0: first} | {k: world.keys(k, payload, attempt=2) for k in range(1, world.count)}
    world.gather()
    here = world.place[0]
    told = world.roster.message(world.signed).model_dump_json().encode()
    world.shares[here] = SharesAnswer.model_validate_json(carried("share", told))
    for k in range(1, world.count):
        answer = world.ask("share", k, world.roster.message(world.signed), attempt=2)
        world.shares[world.place[k]] = SharesAnswer.model_validate_json(answer)
    masked = carried("mask", world.mask_job(0).model_dump_json().encode())
    for k in range(1, world.count):
        world.ask("mask", k, world.mask_job(k), attempt=2)
    confirm = world.listed().model_dump_json().encode()
    signed = {here: ConfirmAnswer.model_validate_json(carried("confirm", confirm))}
    signed |= {world.place[k]: world.confirm(k, world.listed(), attempt=2) for k in range(1, world.count)}
    unmask = opening.unmask_job(signed).model_dump_json().encode()
    loop.coordinator.verdict = Refused(409, "phase-closed", "the sum was opened by others' shares")
    carried("unmask", unmask)
    assert trained == ["train-0-1-1"]
    assert [spend.release for spend in ledger.spends()] == [world.works[0].cost().release]
    steps = ["train-0-1-1", *(f"{kind}-0-1-2" for kind in ("train", "share", "mask", "confirm", "unmask"))]
    assert (loop.coordinator.sent, loop._settled) == (steps, set(steps))
    about, size = {"round": 1, "phase": "train"}, {"bytes": len(masked)}
    digest = world.task("train", 0, payload).payload.sha256
    assert loop.monitor.events == [
        ("trained", about | {"rounds": 9, "payload": digest, "loss": 0.5}),
        ("met", {"round": 1, "members": 4, "new": 4, "listed": 0}),
        *[(event, about | size) for event in ("sending", "accepted")],
    ]  # fmt: skip
    assert loop.monitor.stages == ["training"] * 2 + ["evaluating", "summing"] * 4
    assert loop.agreement.sent.sent == {"train train": 2, "mask train": 1}
    loop.coordinator.verdict = None
    carried("evaluate", b"", round=2)
    assert points == ["keys-sent", "keys-sent", "share-sent", "mask-sent", "confirm-sent", "evaluated"]
    assert (world.works[0].cost(), world.works[0]._state.committed()[0]["own"].tolist()) == (None, [1, 1])


# What a refusal means: 401 and 403 end this client, 410 its federation, a redirect nobody follows; all else one answer.

STATUSES = (307, 400, 401, 402, 403, 404, 409, 410, 411)
ENDS, NO_VERDICT = {307, 401, 403, 410}, {307, 401, 403}


def refused_with(loop: Any, status: int, sending: Coroutine[Any, Any, None]) -> bool:
    """Whether the refusal ends taking part."""
    loop.coordinator.verdict = Refused(status, "phase-closed" if status == 409 else "unwanted", "not so")
    with suppress(Refused):
        asyncio.run(sending)
        return False
    return True


def last_refusal(loop: Any) -> tuple[Any, ...]:
    """The status that was kept, and the event that was told."""
    kept = json.loads(loop.state.read_note("last-refusal.json") or "{}")
    events = [event for event, facts in loop.monitor.events if facts.get("status") == kept.get("status", 0)]
    return kept.get("status"), *events


@pytest.mark.parametrize("status", STATUSES)
def test_what_a_refusal_means(status: int, tmp_path: Path, anything: None) -> None:
    ends, judged = status in ENDS, status not in NO_VERDICT
    noted = (None,) if ends else (status, "discarded" if status == 409 else "refused")

    for name in ("a step", "a step of before"):
        world = World(tmp_path / name, count=1)
        loop = loop_of(PrivateState(tmp_path / f"{name}, state"))
        loop._secure, loop.coordinator.told, task = world.works[0], b"prompts", world.task("train", 0)
        world.keys(0)
        sending = loop._carry_out(task, AsyncExitStack()) if name == "a step" else loop._send_unsent()
        assert refused_with(loop, status, sending) is ends
        assert (world.works[0].unsent() is None) is judged, "one without a verdict is sent again"
        assert last_refusal(loop) == (noted if name == "a step" else (None,))
        assert (task.task_id in loop._settled) is (name == "a step" and not ends)

    loop = loop_of(PrivateState(tmp_path / "state"), secure=False)
    loop.state.write_pending(b"an update", {}, TensorOrigin("task-1", 1, "train"))
    assert refused_with(loop, status, loop._send_pending()) is ends
    assert (loop.state.pending() is None) is judged
    told = (status, "discarded" if status == 409 else "refused") if judged else (None,)
    assert (last_refusal(loop), "task-1" in loop._settled) == (told, judged)
    reported = judged and status not in (409, 410)
    assert loop.coordinator.sent == ["task-1", *["update-refused"] * reported]
    assert loop.agreement.sent.settled == (["train train"] if status == 409 else [])

    loop = loop_of(PrivateState(tmp_path / "again"), secure=False)
    loop.state.write_pending(b"an update", {}, TensorOrigin("train-0-1-1", 1, "train"))
    loop.state.commit()
    assert refused_with(loop, status, loop._send_again(world.task("train", 0), loop.state.answered())) is ends
    assert last_refusal(loop) == noted
    assert refused_with(loop, status, loop._report("task-1", "kind", "")) is (status in (401, 403, 410))


class Asked(Exception):
    """Nobody expected it."""


@pytest.mark.parametrize(("error", "said"), [
    (Refused(409, "phase-closed", "late"), None), (TaskCancelled(), None),
    (Failure("bad-roster", "why"), "bad-roster: why"), (NotAgreed("why"), "NotAgreed: why"),
    (MethodError("why"), "MethodError: why"),
    (BackboneError("why"), "BackboneError: why"), (TensorError("kind", "why"), "TensorError: why"),
    (SpecError([{"path": "a", "detail": "why"}]), "SpecError: a: why"), (BadAnswer("why"), "BadAnswer: why"),
    (DataError("/a/path"), "DataError: the client's own log says why"),
    (Asked("/a/path"), "Asked: the client's own log says why"),
])  # fmt: skip
def test_what_is_told_of_a_failure(error: Exception, said: str | None, tmp_path: Path, anything: None) -> None:
    loop = loop_of(PrivateState(tmp_path), secure=False)

    async def fails(task: Task, turn: AsyncExitStack) -> None:
        raise error

    loop._train = fails
    task = World(tmp_path / "world", count=0).task("train", 0)
    asyncio.run(loop._carry_out(task, AsyncExitStack()))
    told = [f"{facts['type']}: {facts['detail']}" for event, facts in loop.monitor.events if event == "failed"]
    assert told == ([said] if said is not None else [])
    assert loop.coordinator.sent == ([said.partition(":")[0]] if said is not None else [])
    assert (task.task_id in loop._settled) is not isinstance(error, TaskCancelled)
    if isinstance(error, TaskCancelled):
        assert loop.monitor.events == [("cancelled", {"task": task.task_id, "round": 1})]
        loop.compute.is_stopped = True
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(loop._carry_out(task, AsyncExitStack()))
    if isinstance(error, Asked):
        loop.state = PrivateState(tmp_path, ephemeral=True)
        with pytest.raises(Asked):
            asyncio.run(loop._carry_out(task, AsyncExitStack()))


@pytest.mark.parametrize(("main", "shifted"), [(None, False), ((1.0, 0.25), True), ((1.0, 1.0), False)])
def test_an_accuracy_is_counted_and_told_before_it_is_sent(
    main: tuple[float, float] | None, shifted: bool, tmp_path: Path, anything: None
) -> None:
    """Outside of the client's turn, which waits for no other; twice where a coordinator was restored."""
    loop, world, seen = loop_of(PrivateState(tmp_path), secure=False), World(tmp_path / "world", count=0), list[Any]()
    task, following = world.task("evaluate", 0), world.task("train", 0, round=2)
    figures = {"novel": SimpleNamespace(accuracy=0.0, one_answer=1.0, majority=0.0)}
    if main is not None:
        figures["test"] = SimpleNamespace(accuracy=0.75, one_answer=main[0], majority=main[1])
    result = SimpleNamespace(splits=figures, zero_shot={"test": SimpleNamespace(accuracy=0.5)})

    async def at_once(task: Task, job: Callable[[Callable[[], bool]], Any]) -> Any:
        return job(lambda: False)

    async def send(task_id: str, sent: Any, wait: int) -> Task:
        seen.append((task_id, sent, wait, dict(loop.agreement.sent.sent), loop.monitor.stages[-1]))
        return following

    loop._watched, loop.work.evaluate, loop.coordinator.send_evaluation = at_once, lambda *given: result, send
    for _ in range(2):
        turn = AsyncExitStack()
        turn.callback(seen.append, "turn over")
        asyncio.run(loop._evaluate(task, turn))
    sent = [(task.task_id, result, 15, {"evaluate train": 1}, "waiting")]
    assert seen == ["turn over", *sent] * 2
    about = {"round": 1, "rounds": 9}
    told = ("evaluated", {**about, "accuracy": None if main is None else 0.75, "zero_shot": 0.5, "one_class": shifted})
    assert loop.monitor.events == [told, ("again", {**about, "phase": "train"}), told]
    assert (loop._next, loop._settled) == (following, {task.task_id})
    assert (loop.agreement.sent.settled, loop.agreement.sent.restores) == (["evaluate train"], 1)

    def changed(task: Task | None = None) -> None:
        raise Failure("policy-changed", "the policy allows this no longer")

    loop.work.expect_policy, before = changed, loop.agreement.sent
    with pytest.raises(Failure):
        asyncio.run(loop._evaluate(task, turn))
    assert (len(seen), loop.agreement.sent) == (4, before)


def test_who_has_withdrawn_ends_and_whose_policy_has_changed_sends_nothing(tmp_path: Path, anything: None) -> None:
    world = World(tmp_path / "world", count=1)
    world.keys(0)
    loop, plain = (loop_of(PrivateState(tmp_path / f"{one}"), secure=one) for one in (True, False))
    loop._secure = world.works[0]

    def changed(task: Task | None = None) -> None:
        raise Failure("policy-changed", "the policy allows this no longer")

    loop.work.expect_policy = plain.work.expect_policy = changed
    asyncio.run(loop._send_unsent())
    assert (world.works[0].unsent(), loop.coordinator.bodies, loop._settled) == (None, [], {"train-0-1-1"})
    origin = TensorOrigin("train-0-1-1", 1, "train")
    plain.state.write_pending(b"an update", {}, origin)
    asyncio.run(plain._send_pending())
    assert plain.state.pending() is None
    plain.work.expect_policy = lambda task=None: None
    plain.state.write_pending(b"an update", {}, origin)
    plain.state.commit()
    plain.work.expect_policy, answered = changed, plain.state.answered()
    asyncio.run(plain._send_again(world.task("train", 0), answered))
    for one, times in ((loop, 1), (plain, 2)):
        assert one.coordinator.sent == ["policy-changed"] * times
        assert [event for event, _ in one.monitor.events] == ["failed"] * times
    plain.state.write_note(WITHDRAWN, "today")
    with pytest.raises(ClientError, match="has withdrawn consent"):
        asyncio.run(plain._send_again(world.task("train", 0), answered))


@pytest.mark.parametrize(
    ("size", "turn", "wait"), [(INLINE_BYTES, True, 15), (INLINE_BYTES + 1, True, 0), (9, False, 0)]
)
def test_a_large_update_is_sent_within_its_turn(
    size: int, turn: bool, wait: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = list[str]()
    monkeypatch.setattr(task_loop, "point", points.append)
    loop, ended = loop_of(PrivateState(tmp_path), secure=False), list[int]()
    loop.state.write_pending(bytes(size), {}, TensorOrigin("task-1", 1, "train"))
    stack = AsyncExitStack()
    stack.callback(lambda: ended.append(len(loop.coordinator.sent)))
    asyncio.run(loop._send_pending(stack if turn else None))
    assert loop.coordinator.sent == (["task-1, 15"] if wait else ["task-1"])
    assert (ended, loop.monitor.stages) == (([0], ["sending", "waiting"]) if wait else ([], ["sending"]))
    assert (loop.state.pending(), loop._settled, loop.state.committed()[1].round) == (None, {"task-1"}, 1)
    assert [event for event, _ in loop.monitor.events] == ["sending", "accepted"]
    assert loop.agreement.sent.settled == ["train train"]
    before = list(loop.coordinator.sent)
    assert points == ["update-sent"]
    asyncio.run(loop._send_pending())
    assert loop.coordinator.sent == before, "none is left"


def test_an_accepted_update_is_sent_again_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause follows each answer that came at once; a coordinator that was started anew knows which tasks are open."""
    loop, paused, carried = loop_of(PrivateState(tmp_path), secure=False), list[float](), list[str]()
    world = World(tmp_path / "world", count=0)
    loop.state.write_pending(b"an update", {}, TensorOrigin("train-0-1-1", 1, "train"))
    loop.state.commit()

    async def pause(seconds: float) -> None:
        paused.append(seconds)

    async def carry_out(task: Task, turn: AsyncExitStack) -> None:
        carried.append(task.task_id)
        loop._settled.add(task.task_id)

    clock = iter(range(99))
    monkeypatch.setattr(task_loop, "time", SimpleNamespace(monotonic=lambda: next(clock) / 5))
    monkeypatch.setattr(asyncio, "sleep", pause)
    loop._carry_out, again = carry_out, world.task("train", 0)
    other = world.task("evaluate", 0)
    late = world.task("train", 0, round=2)
    loop.coordinator.tasks = [again] * 4 + [again, None, other, other, late, other.model_copy(update={"epoch": "b"})]
    with pytest.raises(Refused, match="it is over"):
        asyncio.run(loop.take_part())
    assert loop.coordinator.sent == ["train-0-1-1"] * 3
    assert [event for event, _ in loop.monitor.events] == ["sent_again"] * 3
    assert carried == [again.task_id, other.task_id, late.task_id, other.task_id]
    assert paused == [0.5] * 3 + [pytest.approx(0.3)] * 3, "settled before, no task, settled before"


def noting(course: list[str], *names: str) -> dict[str, Any]:
    """Steps that note that they were taken."""

    def step(name: str) -> Any:
        async def taken(*given: Any) -> None:
            course.append(name)

        return taken

    return {name: step(name) for name in names}


@pytest.mark.parametrize("pending", [True, False])
def test_what_was_left_is_sent_before_a_task_is_asked_for(pending: bool, tmp_path: Path) -> None:
    loop, course = loop_of(PrivateState(tmp_path), secure=False), list[str]()
    vars(loop).update(noting(course, "_expect_whole_ledger", "_send_pending", "_send_unsent", "_carry_out"))
    loop.work.restore_serving = lambda cancelled: course.append("predictions come back")
    if pending:
        loop.state.write_pending(b"an update", {}, TensorOrigin("task-1", 1, "train"))

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        course.append("turn")
        yield
        course.append("turn over")

    loop.compute.turn, loop.coordinator.tasks = turn, [World(tmp_path / "world", count=0).task("evaluate", 0)]
    with pytest.raises(Refused, match="it is over"):
        asyncio.run(loop.take_part())
    left = ["_send_pending", "predictions come back"] if pending else []
    assert course == ["_expect_whole_ledger", *left, "_send_unsent", "turn", "_carry_out", "turn over"]
    assert loop.monitor.stages == ["waiting"] * 2


def test_a_ledger_is_compared_with_what_was_seen_here_and_then_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, course = loop_of(PrivateState(tmp_path), secure=False), list[Any]()

    async def ask(kind: Any, resource: str) -> str:
        course.append(resource)
        return "told"

    monkeypatch.setattr(task_loop, "expect_head", lambda ledger, state: course.append((ledger, state)))
    ledger = SimpleNamespace(path=None, expect_whole=course.append)
    loop.coordinator.ask = ask
    for loop.work.protection in (None, SimpleNamespace(ledger=ledger)):
        asyncio.run(loop._expect_whole_ledger())
    assert course == [], "one in memory is of this run alone"
    ledger.path = tmp_path / "ledger"
    asyncio.run(loop._expect_whole_ledger())
    assert course == [(ledger, loop.state), "spends", "told"]


@pytest.mark.parametrize(("kind", "secure", "ends"), [
    ("train", False, "_train"), ("evaluate", False, "_evaluate"), ("train", True, "_exchange"),
    ("mask", True, "_exchange"), ("evaluate", True, "_evaluate"),
])  # fmt: skip
def test_a_task_is_begun_after_all_that_may_forbid_it(
    kind: str, secure: bool, ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, course = loop_of(PrivateState(tmp_path), secure=secure), list[str]()
    vars(loop).update(noting(course, "_expect_whole_ledger", "_train", "_evaluate", "_exchange"))
    loop.work.expect_policy = lambda task: course.append("policy")
    monkeypatch.setattr(Agreement, "expect", lambda self, task: course.append("agreement"))
    if secure:
        loop._secure = SimpleNamespace(settle=lambda task: course.append("settled"))
    asyncio.run(loop._carry_out(World(tmp_path / "world", count=0).task(kind, 0), AsyncExitStack()))
    assert course == ["policy", "agreement", "_expect_whole_ledger", *["settled"] * secure, ends]
    assert loop.monitor.stages == ["training" if kind == "train" else "evaluating"]


def test_what_is_wrong_with_this_machine_ends_the_client(tmp_path: Path, anything: None) -> None:
    loop = loop_of(PrivateState(tmp_path), secure=False)

    async def fails(task: Task, turn: AsyncExitStack) -> None:
        raise ClientError(Exit.STATE, "no room")

    loop._train = fails
    with pytest.raises(ClientError, match="no room"):
        asyncio.run(loop._carry_out(World(tmp_path / "world", count=0).task("train", 0), AsyncExitStack()))
    assert (loop.coordinator.sent, loop.monitor.events) == ([], [])


def test_a_training_is_counted_and_told_before_its_update_is_sent(tmp_path: Path) -> None:
    loop, turn, sent = loop_of(PrivateState(tmp_path), secure=False), AsyncExitStack(), list[Any]()
    task = World(tmp_path / "world", count=0).task("train", 0)

    async def watched(task: Task, job: Callable[[Callable[[], bool]], Any]) -> Any:
        return job(lambda: False)

    async def send(turn: AsyncExitStack) -> None:
        sent.append((turn, dict(loop.agreement.sent.sent), list(loop.monitor.events)))

    loop.coordinator.told, loop._watched, loop._send_pending = b"prompts", watched, send
    loop.work.train = lambda task, payload, cancelled: {"bytes": len(payload)}
    asyncio.run(loop._train(task, turn))
    about = {"round": 1, "rounds": 9, "phase": "train", "payload": task.payload.sha256, "bytes": 7}
    assert sent == [(turn, {"train train": 1}, [("trained", about)])]


@pytest.mark.parametrize(("kind", "allowed"), [("mask", True), ("mask", False), ("share", True), ("confirm", True)])
def test_a_step_of_a_sum_is_looked_at_and_paid_before_it_is_sent(kind: str, allowed: bool, tmp_path: Path) -> None:
    loop, course = loop_of(PrivateState(tmp_path)), list[str]()
    vars(loop).update(noting(course, "_pay_masked", "_send_answer"))

    def policy() -> None:
        course.append("policy")
        if not allowed:
            raise Failure("policy-changed", "the policy allows this no longer")

    def answer(task: Task, payload: bytes) -> StepAnswer:
        course.append("answer")
        return StepAnswer(task.task_id, task.kind, b"")

    loop.work.expect_policy = policy
    secure = SimpleNamespace(expect=lambda task: course.append("expected"), answer=answer, met=None)
    task = World(tmp_path / "world", count=0).task(kind, 0)
    with nullcontext() if allowed else pytest.raises(Failure):
        asyncio.run(loop._exchange(secure, task))
    assert course == ["expected", "answer", "policy", *["_pay_masked", "_send_answer"] * allowed]
    assert loop._settled == ({task.task_id} if allowed else set())
    masked = allowed and kind == "mask"
    assert loop.agreement.sent.sent == ({"mask train": 1} if masked else {})
    assert [event for event, _ in loop.monitor.events] == (["sending", "accepted"] if masked else [])


def test_what_was_under_way_is_paid_and_sent_and_nothing_else(tmp_path: Path) -> None:
    loop, course = loop_of(PrivateState(tmp_path)), list[str]()
    vars(loop).update(noting(course, "_pay_masked", "_send_answer"))
    for loop._secure in (None, SimpleNamespace(unsent=lambda: None)):
        asyncio.run(loop._send_unsent())
    assert course == []
    loop._secure = SimpleNamespace(unsent=lambda: StepAnswer("mask-1", "mask", b""))
    loop.work.expect_policy = lambda: course.append("policy")
    asyncio.run(loop._send_unsent())
    assert course == ["policy", "_pay_masked", "_send_answer"]


@pytest.mark.parametrize("affordable", [True, False])
def test_an_update_is_paid_before_it_leaves_or_deleted(affordable: bool, tmp_path: Path) -> None:
    paid = list[tuple[str, str]]()

    def pay(pending: Any, release: str) -> None:
        paid.append((pending.task_id, release))
        if not affordable:
            raise Failure("privacy-budget-exhausted", "nothing is left")

    loop = loop_of(PrivateState(tmp_path), cast(Any, SimpleNamespace(pay=pay)), secure=False)
    loop.state.write_pending(b"an update", {}, TensorOrigin("task-1", 1, "train"))
    asyncio.run(loop._send_pending())
    assert paid == [("task-1", hashlib.sha256(b"an update").hexdigest())]
    assert loop.coordinator.sent == (["task-1"] if affordable else ["privacy-budget-exhausted"])
    assert loop.state.pending() is None
    assert loop.state.committed()[1].task_id == ("task-1" if affordable else None)


def test_a_report_has_a_bounded_length_and_always_a_reason(tmp_path: Path) -> None:
    loop, told = loop_of(PrivateState(tmp_path), secure=False), list[tuple[str, str]]()

    async def send(task_id: str, failure: FailureRequest) -> None:
        told.append((failure.type, failure.detail))

    loop.coordinator.send_failure = send
    for kind, detail in (("k" * 101, "d" * 2001), ("kind", "why"), ("kind", "")):
        asyncio.run(loop._report("task-1", kind, detail))
    assert told == [("k" * 100, "d" * 2000), ("kind", "why"), ("kind", "kind")]


def test_progress_is_told_of_what_may_be_known(tmp_path: Path) -> None:
    privacy, limits = PrivacySpec(level="client", clip=1.0), {"minimum": 7, "peers": []}
    open_, secure = loop_of(PrivateState(tmp_path / "a"), secure=False), loop_of(PrivateState(tmp_path / "b"))
    assert (open_._progress(), secure._progress()) == (0.25, None)
    for training, told in ((True, 0.25), (False, None)):
        policy = Policy.model_validate({"version": 1, "metrics": {"training": training}, "secure_aggregation": limits})
        open_.work.rules.policy = policy
        assert open_._progress() == told
    assert (task_loop._limits(None), task_loop._limits(policy).minimum) == (Limits(), 7)
    terms = open_.agreement.consent.terms.model_copy(update={"privacy": privacy})
    open_.work.rules.policy, open_.agreement.consent = None, open_.agreement.consent.model_copy(update={"terms": terms})
    assert open_._progress() is None
