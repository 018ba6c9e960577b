"""What operators do: create, steer and delete federations, supply a start, mint tokens, withdraw and reset clients."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import select

from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Live, fresh
from promptfed.coordinator.domain.round_machine import WrongMoment
from promptfed.coordinator.domain.run_state import ENDED, Cancel, Event, Pause, Resume, Withdraw
from promptfed.coordinator.engine import jobs, retention
from promptfed.coordinator.engine.registry import Engine
from promptfed.coordinator.http.tokens import digest, new_token
from promptfed.coordinator.problems import InvalidSpec, KeyReused, NameTaken, NotFound, Refusal, WrongState
from promptfed.coordinator.store.fault_points import point
from promptfed.coordinator.store.tables import ClientRow, EventRow, FederationRow, TokenRow
from promptfed.coordinator.task_problems import TENSOR_REFUSALS, Ended
from promptfed.shared.methods import check_fits, resolve_spec
from promptfed.shared.methods.core.base import MethodError
from promptfed.shared.spec import FederationSpec, SpecError
from promptfed.shared.tensors import TensorError, canonical_json, check, decode, state_hash


def resolve(raw: dict[str, Any]) -> FederationSpec:
    """The spec with nothing left open. Raises InvalidSpec."""
    try:
        spec = resolve_spec(raw)
        _check_shape(spec)
    except SpecError as error:
        raise InvalidSpec(str(error), errors=error.errors) from None
    return spec


def _check_shape(spec: FederationSpec) -> None:
    """Where the spec says what the backbone looks like, the method must be able to run with it."""
    if spec.backbone.shape is None:
        return
    live = fresh("", spec)
    try:
        check_fits(live.method, spec.backbone.shape)
        live.method.dims(live.context())
    except MethodError as error:
        raise SpecError([{"path": "backbone.shape", "detail": str(error)}]) from None


def create(engine: Engine, raw: dict[str, Any], key: str | None = None) -> Live:
    """Create a federation, or find the one that this Idempotency-Key has created.

    Raises:
        InvalidSpec, NameTaken, KeyReused: it cannot.
    """
    request_digest = _digest_of(raw)
    with engine.exclusively():
        known = _created_with(engine, key, request_digest)
        if known is not None:
            return known
        spec = resolve(raw)
        if any(spec.name in (live.name, live.id) for live in engine.lives.values()):
            raise NameTaken(f"there is already a federation {spec.name!r}: choose another name, or delete that one")
        live = fresh("fed-" + secrets.token_hex(8), spec)
        with engine.database.write() as session:
            session.add(_row(live, key, request_digest))
            session.flush()
            session.add(EventRow(federation_id=live.id, kind="federation-created", data={}, at=clock.now()))
        engine.add(live)
    point("federation-created")
    return live


def _digest_of(raw: dict[str, Any]) -> str:
    try:
        return hashlib.sha256(canonical_json(raw).encode()).hexdigest()
    except ValueError:
        resolve(raw)  # It says where, but for what no spec has a place for.
        detail = "holds NaN, infinity or text that is no Unicode"
        raise InvalidSpec(detail, errors=[{"path": "(spec)", "detail": detail}]) from None


def _created_with(engine: Engine, key: str | None, request_digest: str) -> Live | None:
    if key is None:
        return None
    with engine.database.read() as session:
        row = session.scalars(select(FederationRow).where(FederationRow.idempotency_key == key)).one_or_none()
        if row is None:
            return None
        if row.request_digest != request_digest:
            raise KeyReused("this Idempotency-Key was used with another spec: use a fresh key for a fresh federation")
        return engine.live(row.id)


def _row(live: Live, key: str | None, request_digest: str) -> FederationRow:
    return FederationRow(
        id=live.id,
        name=live.name,
        spec=live.spec.model_dump(mode="json"),
        idempotency_key=key,
        request_digest=request_digest,
        created_at=clock.now(),
        state="enrolling",
        round=0,
        step=0,
        joining=[],
        fingerprint=live.fingerprint,
        shape=live.shape.model_dump() if live.shape else None,
    )


def delete(engine: Engine, id: str) -> None:
    """Delete a federation with all its data."""
    with engine.exclusively():
        engine.live(id)
        with engine.database.write() as session:
            digests = retention.digests_of(session, id)
            session.delete(session.get_one(FederationRow, id))
        engine.forget(id)
    retention.collect(engine, digests)


def steer(engine: Engine, id: str, verb: str) -> None:
    """Start, pause, resume or cancel. Raises WrongState, and what ``work.start`` raises."""
    if verb == "start":
        jobs.start(engine, id)
        return
    events: dict[str, Event] = {"pause": Pause(), "resume": Resume(clock.monotonic()), "cancel": Cancel()}
    try:
        with engine.change(id) as change:
            change.send(events[verb])
    except WrongMoment as error:
        state = str(error)
        raise WrongState(f"the federation is {state}: it cannot {verb} now", state=state) from None


def supply_state(engine: Engine, id: str, body: bytes) -> str:
    """Keep the tensors that the federation shall start from; their state hash.

    Raises:
        WrongState: it has started; or the refusal of a tensor.
    """
    live = engine.live(id)
    _expect_enrolling(live)
    try:
        tensors, _ = decode(body)
        _check_supplied(live, tensors)
    except TensorError as error:
        raise TENSOR_REFUSALS[error.kind](str(error)) from None
    with engine.blobs.hold() as held:
        digest_ = held.put(body)
        with engine.change(id) as change:
            _expect_enrolling(change.live)
            row = change.federation_row()
            row.supplied_state = digest_
            change.live = replace(change.live, supplied_state=digest_)
            change.tell("initial-state-supplied", state_hash=state_hash(tensors))
    return state_hash(tensors)


def _check_supplied(live: Live, tensors: dict[str, Any]) -> None:
    """All that can be said before the clients are known; the start checks the whole."""
    expected = {spec.name: spec for spec in live.method.state_tensors()}
    for name, spec in expected.items():
        found = tensors.get(name)
        if found is not None and found.dim() != len(spec.shape):
            text = f"tensor {name!r} has {found.dim()} dimensions; {len(spec.shape)} are expected"
            raise TensorError("wrong-shape", text)
    if live.shape is None:
        shapes = {name: tuple(tensors[name].shape) if name in tensors else () for name in expected}
        check(tensors, {name: (shapes[name], spec.dtype) for name, spec in expected.items()})
        return
    roster = [name for name, member in live.run.members.items() if member.active]
    context = live.context(roster)
    global_state.check_state(live, live.method.adopt(tensors, context), context)


def _expect_enrolling(live: Live) -> None:
    if live.run.state != "enrolling":
        text = f"{live.name} is {live.run.state}: its initial state can only be supplied before the start"
        raise WrongState(text, state=live.run.state)


def mint_token(engine: Engine, id: str, hours: float) -> tuple[str, datetime]:
    """A new enrolment token, and when it expires."""
    token, expires = new_token(), clock.later(hours * 3600)
    with engine.change(id) as change:
        row = TokenRow(digest=digest(token), federation_id=id, created_at=clock.now(), expires_at=expires)
        change.session.add(row)
        change.live = replace(change.live, tokens={**change.live.tokens, row.digest: clock.parse(expires)})
    return token, clock.parse(expires)


def withdraw(engine: Engine, id: str, client: str, discard: bool) -> None:
    """Take a client out; doing it again changes nothing.

    Raises:
        NotFound, WrongState: there is no such client, or the federation has ended.
    """
    try:
        with engine.change(id) as change:
            name = client_name(change.live, client)
            if not change.live.run.members[name].active:
                return
            change.send(Withdraw(name, discard, clock.monotonic()))
            change.client_row(name).active = False
            change.wake.add(name)
            change.tell("client-withdrawn", client=name, discard=discard)
    except WrongMoment as error:
        raise WrongState(f"the federation is {error}: nobody can be withdrawn any more", state=str(error)) from None


def delete_updates(engine: Engine, id: str, client: str) -> None:
    """Delete the tensors that a client has sent, in all rounds; what the reports say of them stays.

    Raises:
        NotFound, WrongState: there is no such client, it still takes part, or an update of its is yet to be counted.
    """
    with engine.change(id) as change:
        name, run = client_name(change.live, client), change.live.run
        if run.state not in ENDED and run.members[name].active:
            raise WrongState(f"{name!r} takes part in {change.live.name}: withdraw it first", state=run.state)
        if run.state not in ENDED and retention.awaits_computing(change.session, id, name):
            text = f"an update of {name!r} is yet to be counted: wait for its phase, or withdraw with discard=true"
            raise WrongState(text, state=run.state)
        digests = retention.remove_updates(change.session, id, name)
        change.tell("updates-deleted", client=name)
    retention.collect(engine, digests)


def reset(engine: Engine, id: str, client: str) -> None:
    """Free a client's name for a new secret; the old secret is void, the identity stays. Raises NotFound."""
    with engine.change(id) as change:
        name = client_name(change.live, client)
        change.client_row(name).secret_digest = None
        change.live = change.live.with_clients(replace(change.live.clients[name], secret_digest=None))
        change.wake.add(name)
        change.tell("client-reset", client=name)


def client_name(live: Live, id_or_name: str) -> str:
    """The name of the client with this id or name. Raises NotFound."""
    for client in live.clients.values():
        if id_or_name in (client.id, client.name):
            return client.name
    raise NotFound(f"{live.name} has no client {id_or_name[:100]!r}")


def record_refusal(engine: Engine, id: str, name: str, refusal: Refusal, path: str) -> None:
    """Count a client's refused request, and keep the last one; nothing else changes.

    That a federation has ended is how a client's asking for tasks always ends: it would hide the last real refusal.
    """
    if isinstance(refusal, Ended) and path.endswith("/task"):
        return
    with engine.database.write() as session:
        mine = (ClientRow.federation_id == id, ClientRow.name == name)
        row = session.scalars(select(ClientRow).where(*mine)).one_or_none()
        if row is None:
            return
        row.refusals += 1
        row.last_refusal = {
            "type": refusal.kind,
            "status": refusal.status,
            "detail": refusal.detail[:2000],
            "path": path[:500],
            "at": clock.now(),
        }
