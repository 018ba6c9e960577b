"""Taking part: wait for a task, carry it out, send the answer; until the federation ends."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from promptfed.client_service.exits import ClientError, Failure
from promptfed.client_service.http.connection import BadAnswer, Refused
from promptfed.client_service.http.coordinator_client import CoordinatorClient
from promptfed.client_service.monitor import Monitor
from promptfed.client_service.privacy.agreement import NotAgreed
from promptfed.client_service.privacy.ledger import expect_head
from promptfed.client_service.privacy.policy import Policy
from promptfed.client_service.privacy.protection import unexplained
from promptfed.client_service.privacy.secure import SecureWork, StepAnswer
from promptfed.client_service.state.private_state import PAYLOADS, Pending
from promptfed.client_service.task_watch import watched
from promptfed.client_service.training.compute import Compute
from promptfed.client_service.training.data import TEST, TRAIN
from promptfed.client_service.training.trainer import TaskWork
from promptfed.shared.api.api_schemas import SpendList
from promptfed.shared.clip import BackboneError
from promptfed.shared.data import DataError
from promptfed.shared.messages import INLINE_BYTES, FailureRequest, Task
from promptfed.shared.methods.core.interface import MethodError
from promptfed.shared.methods.core.training import TaskCancelled
from promptfed.shared.metrics.figures import nearly_one_class
from promptfed.shared.secagg.messages import Limits
from promptfed.shared.service.fault_points import point
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import TensorError
from promptfed.shared.tensors.torch_tensors import decode_place

log = logging.getLogger("promptfed.client")
POLL_SECONDS = 15  # less than the 20 s after which many proxies end a connection on which nothing passes
SHORTEST_POLL = 0.5  # seconds between polls where the coordinator has no task for us and says so at once
RESENDS = 3  # of one accepted update, where the coordinator asks for it again

# What may be said of a failure outside: these texts name settings, tensors and classes, never a path or an image.
TELLABLE = (NotAgreed, MethodError, BackboneError, TensorError, SpecError, BadAnswer)


@dataclass
class TaskLoop:
    """An enrolled client at work."""

    coordinator: CoordinatorClient
    work: TaskWork
    compute: Compute
    monitor: Monitor
    _settled: set[str] = field(default_factory=set)  # tasks that are answered, or can no longer be
    _epoch: str = ""
    _next: Task | None = None  # from the receipt of the last answer
    _again: dict[str, int] = field(default_factory=dict)  # how often an accepted update was sent again, by its task

    def __post_init__(self) -> None:
        self.state, self.agreement = self.work.state, self.work.agreement
        self._watched = partial(watched, self.coordinator, self.compute, progress=self._progress)
        terms = self.agreement.consent.terms
        self._secure = None
        if terms.secure_aggregation is not None:
            samples = self.work.data.count(TRAIN)
            self._secure = SecureWork(self.state, terms.federation_id, _limits(self.work.rules.policy), samples)

    async def take_part(self) -> None:
        """Send what an earlier run left unsent, then carry out tasks.

        Raises:
            Refused: 410 when the federation has ended, 401 or 403 when this client is no longer part of it.
        """
        await self._expect_whole_ledger()
        if self.state.pending() is not None:
            await self._send_pending()
            await self.compute.run(lambda: self.work.restore_serving(self.compute.stopped))  # by what it committed
        await self._send_unsent()
        while True:
            self.monitor.stage("waiting")
            begun = time.monotonic()
            task, self._next = self._next, None
            if task is None:
                task = await self.coordinator.task(POLL_SECONDS)
            if task is not None and task.epoch != self._epoch:
                # Another process of the coordinator, perhaps on a backup: it knows which tasks are open.
                self._settled.clear()
                self._epoch = task.epoch
            if task is not None and (answered := self._answered(task)) is not None:
                await self._send_again(task, answered)
            elif task is not None and task.task_id not in self._settled:
                async with AsyncExitStack() as turn:
                    await turn.enter_async_context(self.compute.turn())
                    await self._carry_out(task, turn)
            else:
                await asyncio.sleep(max(0.0, SHORTEST_POLL - (time.monotonic() - begun)))

    async def _expect_whole_ledger(self) -> None:
        """Raise ClientError (LEDGER) if the ledger is an old copy, which lacks spends of this client."""
        protection = self.work.protection
        if protection is None or protection.ledger.path is None:
            return
        # What this folder itself has seen comes first: a coordinator may say that it has had nothing.
        await self.compute.run(lambda: expect_head(protection.ledger, self.state))
        spends = await self.coordinator.ask(SpendList, "spends")
        await self.compute.run(lambda: protection.ledger.expect_whole(spends))

    async def _carry_out(self, task: Task, turn: AsyncExitStack) -> None:
        self.monitor.task(task.round, task.phase, "training" if task.kind == "train" else "evaluating")
        try:
            self.work.expect_policy(task)
            self.agreement.expect(task)
            await self._expect_whole_ledger()
            if self._secure is not None:
                secure = self._secure
                await self.compute.run(lambda: secure.settle(task))
            if self._secure is not None and task.kind != "evaluate":
                await self._exchange(self._secure, task)
                return
            await (self._train if task.kind == "train" else self._evaluate)(task, turn)
        except Refused as refused:
            self._note(refused, task)
        except TaskCancelled:
            if self.compute.stopped():
                raise asyncio.CancelledError from None
            self.monitor.tell("cancelled", task=task.task_id, round=task.round)
        except ClientError:
            raise
        except Failure as failure:
            await self._give_up(task, failure.kind, str(failure))
        except TELLABLE as error:
            await self._give_up(task, type(error).__name__, str(error))
        except (DataError, ValidationError) as error:
            log.error("task %s cannot be carried out: %s", task.task_id, " ".join(str(error).split()))
            await self._give_up(task, type(error).__name__, "the client's own log says why")
        except Exception as error:
            log.exception("task %s failed", task.task_id)
            if self.state.ephemeral:
                raise  # a simulation ends with what is wrong in its method
            await self._give_up(task, type(error).__name__, "the client's own log says why")

    async def _payload(self, task: Task) -> bytes | Path:
        """The task's payload, which the task itself no longer contains."""
        content = await self.coordinator.payload(task, self.state.folder / PAYLOADS)
        task.payload.data = None
        return content

    async def _train(self, task: Task, turn: AsyncExitStack) -> None:
        # No variable has the payload: hundreds of clients in one process do not keep it while their receipts wait.
        metrics = await self._watched(task, partial(self.work.train, task, await self._payload(task)))
        self._note_sending(task)
        self.monitor.tell("trained", **_facts(task), payload=task.payload.sha256, **metrics)
        await self._send_pending(turn)

    async def _exchange(self, secure: SecureWork, task: Task) -> None:
        """Answer a step of a secure sum. The answer is on the disk before it is sent."""
        payload = await self._payload(task)
        secure.expect(task)
        if task.kind == "train" and not secure.is_trained(task):
            trained = await self._watched(task, partial(self.work.trained, task, payload))
            with unexplained(self.work.hides_failures):
                await self.compute.run(lambda: secure.keep(task, decode_place(payload)[0], trained))
            self.monitor.tell("trained", **_facts(task), payload=task.payload.sha256, **trained.metrics)
        elif task.kind != "train":
            self.monitor.task(task.round, task.phase, "summing")
        step = partial(secure.keys, task) if task.kind == "train" else partial(secure.answer, task, payload)
        answer = await self.compute.run(step)
        self.work.expect_policy()
        await self._pay_masked(secure, answer)
        if task.kind in ("train", "mask"):  # the other answers tell nothing of the data, and are kept by ``secure``
            self._note_sending(task)
        if task.kind == "mask":
            self.monitor.tell("sending", round=task.round, phase=task.phase, bytes=len(answer.body))
        try:
            await self._send_answer(secure, answer)
        except Refused as refused:
            if (task.kind, refused.kind) != ("unmask", "phase-closed"):  # the sum was opened before, by others' shares
                raise
        self._settled.add(task.task_id)
        if task.kind == "share" and secure.met is not None:
            self.monitor.tell("met", **secure.met.as_dict())
        if task.kind == "mask":
            self.monitor.tell("accepted", round=task.round, phase=task.phase, bytes=len(answer.body))

    async def _send_answer(self, secure: SecureWork, answer: StepAnswer) -> None:
        try:
            await self.coordinator.send_exchange(answer.task_id, answer.body)
        except Refused as refused:
            if refused.status not in (401, 403) and refused.status >= 400:
                secure.note_refused(answer)
            raise
        point("keys-sent" if answer.kind == "train" else f"{answer.kind}-sent")
        secure.note_accepted(answer)

    async def _pay_masked(self, secure: SecureWork, answer: StepAnswer) -> None:
        """Write the cost of a change into the ledger before it is sent under masks; delete one that no longer fits.

        Raises:
            Failure: privacy-budget-exhausted.
        """
        protection = self.work.protection
        if protection is None or answer.kind != "mask":
            return

        def pay() -> None:
            if (cost := secure.cost()) is not None:
                about = cost.provenance
                protection.pay_for(cost.release, cost.spent, about.round, about.phase, about.task_id)

        try:
            await self.compute.run(pay)
        except Failure:
            secure.drop()
            raise

    async def _send_unsent(self) -> None:
        """An answer that was under way when this client was killed: the same bytes, which may have arrived."""
        answer = self._secure.unsent() if self._secure is not None else None
        if self._secure is None or answer is None:
            return
        try:
            self.work.expect_policy()
            await self._pay_masked(self._secure, answer)
            await self._send_answer(self._secure, answer)
        except Failure as failure:
            self._secure.note_refused(answer)
            self.monitor.tell("failed", type=failure.kind, detail=str(failure))
            await self._report(answer.task_id, failure.kind, str(failure))
        except Refused as refused:
            if refused.status in (401, 403, 410) or refused.status < 400:
                raise
            log.info("the answer that was under way was refused: %s", refused)

    async def _evaluate(self, task: Task, turn: AsyncExitStack) -> None:
        payload = await self._payload(task)
        with unexplained(self.work.hides_failures, "evaluation"):
            result = await self._watched(task, partial(self.work.evaluate, task, payload))
        del payload  # as in training
        self.work.expect_policy()
        self._note_sending(task)
        await turn.aclose()  # the receipt waits for the next task: others' turns do not
        learned, template = (
            splits[TEST].accuracy if TEST in splits else None for splits in (result.splits, result.zero_shot)
        )
        main = result.splits.get(TEST)
        shifted = main is not None and nearly_one_class(main.one_answer, main.majority)
        accuracies = {"accuracy": learned, "zero_shot": template, "one_class": shifted}
        self.monitor.tell("evaluated", round=task.round, rounds=task.config.rounds, **accuracies)
        self.monitor.stage("waiting")
        self._next = await self.coordinator.send_evaluation(task.task_id, result, POLL_SECONDS)
        self._settled.add(task.task_id)
        self.agreement.note_settled("evaluate", task.round, task.phase)

    async def _send_pending(self, turn: AsyncExitStack | None = None) -> None:
        """Send the stored update until it is settled: accepted commits its private state, a refusal discards it.

        The receipt of a small one waits for the next task, after the end of the ``turn``. A large one would have to be
        sent again if that were cut off.
        """
        pending = self.state.pending()
        if pending is None or self._secure is not None:  # with secure sums no update leaves in the clear
            return
        self.monitor.task(pending.round, pending.phase, "sending")
        if not await self._may_leave(pending):
            return
        wait = POLL_SECONDS if turn is not None and pending.update.size <= INLINE_BYTES else 0
        self.monitor.tell("sending", round=pending.round, phase=pending.phase, bytes=pending.update.size)
        if turn is not None and wait:
            await turn.aclose()
            self.monitor.stage("waiting")
        try:
            self._next = await self.coordinator.send_update(pending.task_id, pending.update, wait)
        except Refused as refused:
            # Not allowed, or a redirect: no verdict on the update, which stays for when that is repaired.
            if refused.status in (401, 403) or refused.status < 400:
                raise
            self.state.discard()
            self._settled.add(pending.task_id)
            if refused.kind in ("phase-closed", "already-answered"):
                self.agreement.note_settled("train", pending.round, pending.phase)
            self._record(refused, pending.task_id, pending.round)
            if refused.status == 410:
                raise
            if refused.kind not in ("phase-closed", "already-answered"):
                await self._report(pending.task_id, "update-refused", f"{refused.kind}: {refused.detail}")
            return
        point("update-sent")
        self.agreement.note_settled("train", pending.round, pending.phase)
        self.state.commit()
        self._settled.add(pending.task_id)
        self.monitor.tell("accepted", round=pending.round, phase=pending.phase, bytes=pending.update.size)

    async def _may_leave(self, pending: Pending) -> bool:
        """Whether an update is allowed still, and paid, in the ledger before it leaves. Else it is deleted."""
        protection = self.work.protection
        try:
            self.work.expect_policy()
            if protection is not None:
                release = pending.update.sha256
                await self.compute.run(lambda: protection.pay(pending, release))
        except Failure as failure:
            self.state.discard()
            await self._give_up(pending, failure.kind, str(failure))
            return False
        return True

    def _answered(self, task: Task) -> Pending | None:
        """The update that was accepted for this very task, unless it has been sent again often enough."""
        answered = self.state.answered() if task.kind == "train" else None
        if answered is None or self._again.get(task.task_id, 0) >= RESENDS:
            return None
        same = (answered.task_id, answered.round, answered.phase) == (task.task_id, task.round, task.phase)
        return answered if same else None

    async def _send_again(self, task: Task, answered: Pending) -> None:
        """The coordinator asks for what it had accepted: its disk has lost it. The same bytes tell it nothing new."""
        self.agreement.expect_consent()
        try:
            self.work.expect_policy()
        except Failure as failure:
            await self._give_up(task, failure.kind, str(failure))
            return
        self._again[task.task_id] = self._again.get(task.task_id, 0) + 1
        try:
            await self.coordinator.send_update(task.task_id, answered.update)
        except Refused as refused:
            self._note(refused, task)
        else:
            self.monitor.tell("sent_again", **_facts(task), bytes=answered.update.size)
            await asyncio.sleep(SHORTEST_POLL)

    def _note_sending(self, task: Task) -> None:
        """Count the answer before it is sent; tell the owner if a round is answered again."""
        if self.agreement.goes_back(task):
            self.monitor.tell("again", **_facts(task))
        self.agreement.note_sending(task)

    async def _give_up(self, task: Task | Pending, kind: str, detail: str) -> None:
        self.monitor.tell("failed", round=task.round, phase=task.phase, type=kind, detail=detail)
        await self._report(task.task_id, kind, detail)

    async def _report(self, task_id: str, kind: str, detail: str) -> None:
        """Tell the coordinator not to wait for this task."""
        self._settled.add(task_id)
        try:
            await self.coordinator.send_failure(task_id, FailureRequest(type=kind[:100], detail=detail[:2000] or kind))
        except Refused as refused:
            if refused.status in (401, 403, 410):
                raise
            log.info("the failure report was refused: %s", refused)

    def _progress(self) -> float | None:
        """The part of the task's steps that is done; None if that is unknown, or is not to leave this machine."""
        terms, policy = self.agreement.consent.terms, self.work.rules.policy
        hidden = terms.privacy is not None or terms.secure_aggregation is not None
        return None if hidden or (policy is not None and not policy.metrics.training) else self.work.progress

    def _note(self, refused: Refused, task: Task) -> None:
        """A refusal of one task is noted; one of this client, or a redirect, is raised again."""
        if refused.status in (401, 403, 410) or refused.status < 400:
            raise refused
        self._settled.add(task.task_id)
        self._record(refused, task.task_id, task.round)

    def _record(self, refused: Refused, task_id: str, round: int) -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {"task_id": task_id, "round": round, "status": refused.status, "kind": refused.kind, "at": at}
        self.state.write_as("last-refusal.json", facts | {"detail": refused.detail})
        event = "discarded" if refused.kind == "phase-closed" else "refused"
        self.monitor.tell(event, round=round, status=refused.status, kind=refused.kind, detail=refused.detail)


def _facts(task: Task) -> dict[str, Any]:
    return {"round": task.round, "rounds": task.config.rounds, "phase": task.phase}


def _limits(policy: Policy | None) -> Limits:
    """What the site's policy says of secure sums."""
    if policy is None:
        return Limits()
    limits = policy.secure_aggregation.model_dump(exclude={"require"})
    return Limits(**{**limits, "peers": frozenset(limits["peers"])})
