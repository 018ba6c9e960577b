"""What clients report of their tasks: accuracies, numbers, and that one cannot be carried out."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from promptfed.coordinator import problems
from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine import sums
from promptfed.coordinator.engine.answers import Answer, expect_open, task_in
from promptfed.coordinator.engine.log_lines import where
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.store.blobs import digest_of
from promptfed.coordinator.store.tables import TaskRow
from promptfed.shared.canonical import canonical_json
from promptfed.shared.messages import EvaluationRequest, FailureRequest
from promptfed.shared.methods.core import client_numbers
from promptfed.shared.plain_text import plain

log = logging.getLogger("promptfed.coordinator")
MOST_NAMED = 10  # of what is dropped, in a line of the log


def kept_numbers(
    federation: Federation, client: Client, numbers: Mapping[str, float], patterns: list[str]
) -> dict[str, float]:
    """The ``numbers`` that the method declares; the log names the others."""
    kept = client_numbers.declared(numbers, patterns)
    if dropped := sorted(numbers.keys() - kept.keys()):
        names = ", ".join(plain(name) for name in dropped[:MOST_NAMED])
        text = "%d numbers of %s are dropped, which %s does not declare, or which are too large: %s"
        log.warning(text, len(dropped), client.name, federation.method.name, names, extra=where(federation))
    return kept


async def accept_evaluation(
    registry: Registry, federation: Federation, client: Client, task_id: str, request: EvaluationRequest
) -> bool:
    """Store a client's accuracies; returns whether they are new."""
    digest, row = digest_of(canonical_json(request.model_dump(mode="json")).encode()), {}
    task = federation.tasks.get(client.name)
    if task is not None and (task.id, task.kind) == (task_id, "evaluate"):  # to another one nothing new is stored
        _check_counts(federation, request)
        patterns = client_numbers.of_evaluation(federation.method)
        metrics = kept_numbers(federation, client, request.metrics, patterns)
        row = {"digest": digest, "body": request.model_dump(mode="json") | {"metrics": metrics}}
    return await registry.committer.submit(Answer(federation.id, client, task_id, digest, "evaluate", row))


def _check_counts(federation: Federation, request: EvaluationRequest) -> None:
    """Refuse a cost of noisy counts that is not one of these accuracies in this federation."""
    if request.privacy is None:
        return
    a, most = federation.spec.privacy.evaluation_epsilon, len(request.splits) + len(request.zero_shot)
    events = request.privacy.events
    if [(event.mechanism, event.q, event.z) for event in events] != [("laplace", 1.0, a)] or events[0].count > most:
        counts = [event.model_dump() for event in events[:2]]
        text = f"the accuracies are said to have cost {counts}; they are at most {most} counts with laplace noise"
        raise problems.PrivacyMismatch(f"{text} of {a}")


def accept_failure(
    registry: Registry, federation: Federation, client: Client, task_id: str, request: FailureRequest
) -> None:
    """Record that a client cannot carry out its task. Repeating it changes nothing."""
    with registry.change(federation.id) as change:
        task = task_in(change, client, task_id)
        if task.status == "failed":
            return
        if task.accepted is not None:
            raise problems.AlreadyAnswered("this task was answered before it was reported as failed: its answer stands")
        expect_open(change.federation, task)
        change.session.get_one(TaskRow, task.id).failure = request.model_dump()
        if out := sums.blamed(change, task, request):
            sums.leave_out(change, task, out)
        else:
            change.send(run_state.Failed(client.name, clock.monotonic()))
    registry.metrics.failed(request.type)
