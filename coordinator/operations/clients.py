"""Operators' actions on clients: withdraw, reset, delete updates. Also records clients' refused requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from sqlalchemy.orm import Session

from promptfed.coordinator import problems
from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.domain.round_machine import WrongMoment
from promptfed.coordinator.engine import jobs, retention
from promptfed.coordinator.engine.recorder import Change
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.store.tables import TokenRow
from promptfed.shared.messages import ENDED


def client_name(federation: Federation, id_or_name: str) -> str:
    """The name of the client with this id or name. Raises NotFound."""
    for client in federation.clients.values():
        if id_or_name in (client.id, client.name):
            return client.name
    raise problems.NotFound(f"{federation.name} has no client {id_or_name[:100]!r}: check its name")


def _is_summed(federation: Federation) -> bool:
    """Whether the masked vectors have arrived: then none can be removed from the sum."""
    stage = federation.run.stage
    return stage is not None and stage.kind in ("confirm", "unmask")


def expect_discardable(federation: Federation) -> None:
    """Raise UpdatesMasked if an accepted update cannot be dropped."""
    if _is_summed(federation):
        text = f"the masked vectors of round {federation.run.round} are there, and none can be taken out of their sum"
        raise problems.UpdatesMasked(f"{text}: withdraw without discard, or wait for the next round")


def withdraw(registry: Registry, id: str, client: str, discard: bool) -> None:
    """Withdraw a client. Repeating it changes nothing.

    Raises:
        NotFound, WrongState: there is no such client, or the federation has ended.
    """
    try:
        with registry.change(id) as change:
            name = client_name(change.federation, client)
            if not change.federation.run.members[name].active:
                return
            discard = discard and not _is_summed(change.federation)
            change.send(run_state.Withdraw(name, discard, clock.monotonic()))
            row = change.client_row(name)
            row.active = False
            _close_tokens(change, name, row.token_id)
            change.federation = change.federation.recounted()
            change.wake.add(name)
            change.emit("client-withdrawn", client=name, discard=discard)
            change.note("client-withdrawn", client=name, discard=discard)
    except WrongMoment as error:
        raise problems.WrongState(
            f"the federation is {error}: nobody can be withdrawn any more", state=str(error)
        ) from None


async def delete_updates(registry: Registry, id: str, client: str) -> None:
    """Delete the tensors that a client sent in all rounds, and the client's own part of the current state.

    Reports stay.

    Raises:
        NotFound, WrongState: there is no such client, it still takes part, or one of its updates awaits aggregation.
    """
    name = await asyncio.to_thread(_name_of_deletable, registry, id, client)
    # On the thread for tensor work, so that no aggregate is computed from the earlier state.
    await registry.compute(lambda: jobs.forget(registry, id, name))
    await asyncio.to_thread(_delete_updates, registry, id, client)


def _name_of_deletable(registry: Registry, id: str, client: str) -> str:
    federation = registry.get(id)
    with registry.database.read() as session:
        return _expect_deletable(federation, session, client)


def _expect_deletable(federation: Federation, session: Session, client: str) -> str:
    name, run = client_name(federation, client), federation.run
    if run.state not in ENDED and run.members[name].active:
        raise problems.WrongState(f"{name!r} takes part in {federation.name}: withdraw it first", state=run.state)
    if run.state not in ENDED and retention.awaits_computing(session, federation.id, name):
        text = f"an update of {name!r} is yet to be counted: wait for its phase, or withdraw with discard=true"
        raise problems.WrongState(text, state=run.state)
    return name


def _delete_updates(registry: Registry, id: str, client: str) -> None:
    with registry.change(id) as change:
        name = _expect_deletable(change.federation, change.session, client)
        digests = retention.remove_updates(change.session, id, name)
        change.emit("updates-deleted", client=name)
        change.note("updates-deleted", client=name)
    retention.collect(registry, digests)
    registry.database.erase()


def reset(registry: Registry, id: str, client: str) -> None:
    """Void a client's secret, so that its name can enrol again with a new one. Raises NotFound.

    The client keeps its id. Enrolling again takes a token that was created for this name.
    """
    with registry.change(id) as change:
        name = client_name(change.federation, client)
        change.client_row(name).secret_digest = None
        change.federation = change.federation.with_clients(replace(change.federation.clients[name], secret_digest=None))
        change.wake.add(name)
        change.emit("client-reset", client=name)
        change.note("client-reset", client=name)


async def record_refusal(registry: Registry, id: str, name: str, refusal: problems.Refusal, path: str) -> None:
    """Count a client's refused request, and store the last one.

    Polls that are refused since the federation or a task is over are ignored: they would hide the last real refusal.
    """
    if isinstance(refusal, problems.Ended | problems.PhaseClosed) and path.endswith("/task"):
        return
    about = {"type": refusal.kind, "status": refusal.status, "detail": refusal.detail[:2000], "path": path[:500]}
    await registry.committer.submit(_Refused(id, name, about | {"at": clock.now()}))


@dataclass(frozen=True)
class _Refused:
    """A refusal that is stored together with the answers of others."""

    federation: str
    client: str
    about: dict[str, object]
    task_id: str | None = None

    def enter(self, change: Change) -> bool:
        """Count it."""
        change.batch.refuse(self.federation, self.client, self.about)
        return True


def _close_tokens(change: Change, client: str, token_id: str | None) -> None:
    """Close the token that a withdrawn client enrolled with, or that was created for its name.

    The client knows the token, and could enrol again under another name.
    """
    closed = {
        key: replace(token, closed=True)
        for key, token in change.federation.tokens.items()
        if token.id == token_id or token.client == client
    }
    for key in closed:
        change.session.get_one(TokenRow, key).closed = True
    change.federation = replace(change.federation, tokens={**change.federation.tokens, **closed})
