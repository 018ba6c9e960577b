"""Choosing a federation's method before round 1: trials are made and started, and the best candidate is taken.

What comes next follows from the trials that are stored and from their accuracies, so that a restarted coordinator goes
on where it was.
"""

from __future__ import annotations

from promptfed.coordinator import problems
from promptfed.coordinator.domain import events
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.domain.trials import current, takes_part, trial_of, trials_of
from promptfed.coordinator.engine import jobs
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.operations import federations, tokens
from promptfed.coordinator.problems import Refusal
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.fault_points import point
from promptfed.shared.api.access_schemas import TokenRequest
from promptfed.shared.messages import ENDED, TrialOffer
from promptfed.shared.spec.tuning import WORST, following

TOKEN_HOURS = 1.0


def start(registry: Registry, id: str) -> None:
    """Start the rounds, or first the trials. Raises WrongState, and what ``jobs.start`` raises."""
    federation = registry.get(id)
    if not federation.tunes:
        jobs.start(registry, id)
        return
    jobs.expect_startable(federation)
    if trials_of(registry.federations.values(), id):
        text = f"{federation.name} compares its candidates, and starts by itself once one is chosen"
        raise problems.WrongState(text, state=federation.run.state)
    advance(registry, id)


def advance(registry: Registry, id: str) -> None:
    """Make the next trial or start it; once all have ended, choose the method."""
    federation = registry.get(id)
    if not federation.tunes or federation.run.state != "enrolling":
        return
    assert federation.spec.tuning is not None
    trials = trials_of(registry.federations.values(), id)
    open_trial = current(trials)
    if open_trial is not None:
        _start_trial(registry, open_trial)
        return
    scores = {place: _score(registry, trial) for place, trial in trials.items()}
    step = following(federation.spec.tuning, scores)
    if isinstance(step, int):
        _choose(registry, federation, step, trials, scores)
        return
    raw = trial_of(federation, *step)
    made = federations.create(registry, raw, queries.trial_key(id, *step), trial=True)
    with registry.change(id) as change:
        change.everyone = True
        change.emit("trial-created", trial=made.name, rung=step[0], candidate=step[1])
    point("trial-created")


def _score(registry: Registry, trial: Federation) -> float:
    """The mean accuracy on held-out images after the last round; `WORST` without one."""
    with registry.database.read() as session:
        return queries.score(session, trial.id, trial.spec.rounds) if trial.run.state == "finished" else WORST


def _start_trial(registry: Registry, trial: Federation) -> None:
    """Start a trial. A candidate that cannot be started fails; the others go on."""
    try:
        jobs.start(registry, trial.id)
    except Refusal as refusal:
        with registry.change(trial.id) as change:
            change.send(events.Fail(f"{refusal.kind}: {refusal.detail}"))


def _choose(
    registry: Registry,
    federation: Federation,
    number: int,
    trials: dict[tuple[int, int], Federation],
    scores: dict[tuple[int, int], float],
) -> None:
    """Resolve the spec with the chosen candidate, and write down what it was chosen by."""
    with registry.change(federation.id) as change:
        if max(scores.values()) == WORST:
            why = next((trial.run.reason for trial in trials.values() if trial.run.reason), "no accuracy was sent")
            change.send(events.Fail(f"no candidate could be compared: {why}"))
            return
        change.federation = change.federation.chosen(number)
        change.federation_row().spec = change.federation.spec.model_dump(mode="json")
        change.everyone = True
        told = [{"trial": trials[at].name, "rung": at[0], "candidate": at[1], "accuracy": scores[at]} for at in scores]
        change.emit("method-chosen", candidate=number, trials=told)
        change.note("method-chosen", candidate=number)
        point("choice-before-commit")
    point("choice-committed")


def offer(registry: Registry, id: str, name: str) -> TrialOffer | None:
    """What the client ``name`` is to do now; None if it has to wait.

    Raises:
        Withdrawn, Ended: it takes part no longer, or the federation is over.
    """
    federation = registry.get(id)
    if not federation.run.members[name].active:
        raise problems.Withdrawn("the operator has withdrawn this client from the federation")
    if federation.run.state in ENDED:
        raise problems.Ended(f"{federation.name} is {federation.run.state}: there will be no more tasks")
    if not federation.tunes:
        return TrialOffer(chosen=federation.spec.tuning.chosen if federation.spec.tuning is not None else None)
    trials = trials_of(registry.federations.values(), id)
    trial = current(trials)
    if trial is None or trial.spec.trial is None or not takes_part(federation, trials, name):
        return None
    token = None
    if name not in trial.run.members:
        if trial.run.state != "enrolling":
            return None
        for earlier in [token.name for token in trial.tokens.values() if token.client == name]:
            tokens.revoke(registry, trial.id, earlier)  # the answer was lost: one token for each client
        token = tokens.mint(registry, trial.id, TokenRequest(role="trainer"), TOKEN_HOURS, holder=name).token
    return TrialOffer(
        federation=trial.id, token=token, rung=trial.spec.trial.rung, candidate=trial.spec.trial.candidate
    )
