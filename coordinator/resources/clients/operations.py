"""Enrolment of clients, and operators' actions on them: withdraw, reset, delete updates.

Also records clients' refused requests.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator import problems
from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.domain.federation import Client, EnrolmentToken, Federation, differing
from promptfed.coordinator.domain.round_machine import WrongMoment
from promptfed.coordinator.engine import audit, jobs, retention
from promptfed.coordinator.engine.recorder import Change
from promptfed.coordinator.engine.recovery import client_of
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.store.queries import Row
from promptfed.coordinator.store.tables import ClientRow, EventRow, TokenRow
from promptfed.coordinator.store.tokens import digest
from promptfed.shared.messages import ENDED, MOST_PEERS, EnrolmentInfo, EnrolRequest
from promptfed.shared.methods import METHODS, check_fits
from promptfed.shared.methods.core.interface import MethodError, ServerContext, check_admission
from promptfed.shared.methods.core.refusals import check_clients, check_hopeless, check_sizes
from promptfed.shared.plain_text import beside_known, shortened
from promptfed.shared.secagg.keys import is_identity, is_signed
from promptfed.shared.service.fault_points import point
from promptfed.shared.spec.spec import BackboneShape

# Of all different class names of a federation in UTF-8; those of ImageNet-21k have 0.4 MB. They are kept in memory and
# sent to every client, and a text tower encodes each.
CLASS_NAME_BYTES = 1 << 20
REFUSED = "enrolment-refused"  # the event
MOST_REFUSED = 500  # events of a federation: names are the newcomers' choice


def enrolment_info(federation: Federation) -> EnrolmentInfo:
    """What a client must know before it enrols. The first enrolment may set the backbone's fingerprint."""
    spec = federation.spec
    return EnrolmentInfo(
        **dict(federation.training_terms()),
        federation_id=federation.id,
        name=federation.name,
        method_package=METHODS.package(federation.method.name),
        state=federation.run.state,
        evaluate_every=spec.evaluation.every,
        evaluation=spec.evaluations if spec.secure_aggregation is not None else None,
    )


async def enrol(registry: Registry, id: str, request: EnrolRequest, token_digest: str) -> tuple[Client, bool]:
    """The client, and whether it is new (or back after its name was reset). Simultaneous enrolments share a commit.

    Raises:
        A refusal of ``promptfed.coordinator.problems``: see ``_check`` and ``_check_token``.
    """
    entry = _Enrolment(id, request, token_digest, audit.actor.get())
    new = await registry.committer.submit(entry)
    if new:
        point("client-enrolled")
    return registry.get(id).clients[request.name], new


class IdentityMissing(problems.Refusal, status=422, title="The identity key is missing"):
    """A client without an identity key in a federation with secure sums."""


class BadProof(problems.Refusal, status=422, kind="bad-signature", title="The signature is not the client's"):
    """An identity key without the signature that proves it."""


class IdentityChanged(problems.Refusal, status=409, title="The identity key has changed"):
    """A known client with another identity key than it enrolled with."""


class KeyTaken(problems.Refusal, status=409, title="Another client has this identity key"):
    """An identity key that another client has."""


@dataclass(frozen=True)
class _Enrolment:
    """A request to enrol, for the committer. ``actor`` is named in the audit log."""

    federation: str
    request: EnrolRequest
    token_digest: str
    actor: audit.Actor
    task_id: ClassVar[None] = None

    def enter(self, change: Change) -> bool:
        """Enrol the client, or recognise it; returns whether it is new."""
        federation, request = change.federation, self.request
        before = federation.clients.get(request.name)
        _check_backbone(federation, request)
        if before is not None and before.secret_digest is not None:
            _recognise(federation, before, request)
            _note_release(change, request)
            return False
        token = _check_token(federation, self.token_digest, request, before)
        row = _row(federation, request, before.id if before else "cli-" + secrets.token_hex(8), token.id)
        client = client_of(ClientRow(**row))
        _check(federation, request)
        _check_method(federation, client, request.backbone_shape)
        _keep_reference(change, request)
        _store(change, row)
        _use(change, self.token_digest)
        change.federation = change.federation.with_clients(client).with_named(client.class_names)
        change.send(run_state.Enrolled(client.name, client.role))
        change.emit("client-enrolled", client=client.name, role=client.role, token=token.name)
        with audit.acting(self.actor):
            change.note("client-enrolled", client=client.name, role=client.role)
        return True


def _recognise(federation: Federation, client: Client, request: EnrolRequest) -> None:
    if not secrets.compare_digest(client.secret_digest or "", digest(request.secret)):
        raise problems.NameTaken(
            f"{request.name!r} has enrolled with another secret: choose another name, or ask the operator to reset it"
        )
    if not federation.run.members[client.name].active:
        raise problems.Withdrawn("the operator has withdrawn this client from the federation")
    if federation.spec.secure_aggregation is not None and request.identity_key != client.identity_key:
        text = f"{request.name!r} has enrolled with another identity key, which others remember"
        raise IdentityChanged(f"{text}: restore its state folder, or ask the operator to reset its name")


def _note_release(change: Change, request: EnrolRequest) -> None:
    row = change.client_row(request.name)
    if row.software != _software(request):
        row.software = _software(request)


def _software(request: EnrolRequest) -> dict[str, Any] | None:
    return request.model_dump(mode="json", include={"release", "system", "grey"}) or None


def _check_token(
    federation: Federation, token_digest: str, request: EnrolRequest, client: Client | None
) -> EnrolmentToken:
    """The enrolment token, which must be valid for this client."""
    token = federation.tokens.get(token_digest)
    if token is None:  # It was revoked after the request was authenticated.
        raise problems.Unauthorized("this token is not known here")
    if federation.starting:
        raise problems.Starting(f"{federation.name} is just being started: send it again in a moment")
    if token.client is not None and token.client != request.name:
        raise problems.OtherToken(f"this enrolment token is for {token.client!r} alone, whose name was reset")
    if token.role is not None and token.role != request.role:
        raise problems.OtherToken(f"this enrolment token is for an {token.role}, not for an {request.role}")
    if client is not None and token.client != request.name:
        text = f"the operator has reset the name {request.name!r}: it takes the enrolment token that was minted for it"
        raise problems.NameTaken(f"{text}, or choose another name")
    if token.closed:
        text = "a client that came with this enrolment token was withdrawn: nobody new comes in by it"
        raise problems.TokenUsedUp(f"{text}; ask the operator for another")
    if token.is_used_up:
        text = f"{token.used} of {token.uses} clients have enrolled with this enrolment token"
        raise problems.TokenUsedUp(f"{text}: ask the operator for another")
    return token


def _use(change: Change, token_digest: str) -> None:
    before = change.federation.tokens[token_digest]
    token = replace(before, used=before.used + 1)
    change.batch.tokens[token_digest] = token.used
    change.federation = replace(change.federation, tokens={**change.federation.tokens, token_digest: token})


def _check_backbone(federation: Federation, request: EnrolRequest) -> None:
    if federation.fingerprint is not None and request.backbone_fingerprint != federation.fingerprint:
        backbone = federation.spec.backbone
        raise problems.OtherBackbone(
            f"the client's backbone is {request.backbone_fingerprint}; {federation.name} runs on "
            f"{federation.fingerprint}: load {backbone.model!r} with weights {backbone.pretrained!r}"
        )
    if federation.shape is not None and (other := federation.shape.differences(request.backbone_shape)):
        raise problems.OtherBackbone(f"the client's backbone has another shape: {other}")


def _check(federation: Federation, request: EnrolRequest) -> None:
    state, needs = federation.run.state, federation.method.needs
    if state in ENDED:
        raise problems.WrongState(f"{federation.name} is {state}: nobody can enrol any more", state=state)
    if digest(request.secret) in federation.by_secret:
        raise problems.SecretTaken("another client has this secret: every client makes its own")
    if request.role == "trainer" and request.num_samples == 0:
        raise problems.NoSamples("a trainer needs at least one training sample: enrol as evaluator, or give it data")
    if needs.domain_descriptions and request.role == "trainer" and request.domain is None:
        raise problems.DomainMissing(f"{federation.method.name} needs each trainer's domain with its description")
    if needs.domain_descriptions:
        _check_peers(federation, request.name)
    _check_identity(federation, request)
    _check_protection(federation, request)
    _check_class_names(federation, request)


def _check_peers(federation: Federation, name: str) -> None:
    """Every task describes all active clients, and clients refuse tasks that describe more than `MOST_PEERS`."""
    others = sum(member.active for other, member in federation.run.members.items() if other != name)
    if others >= MOST_PEERS:
        text = f"{federation.name} has {others:,} clients, and {federation.method.name} describes each to all others"
        raise problems.UnfitClient(f"{text}: it takes {MOST_PEERS:,} at most")


def _check_identity(federation: Federation, request: EnrolRequest) -> None:
    """In secure sums clients sign. The client must prove that the key is its own, and no other client may have it."""
    if federation.spec.secure_aggregation is None:
        return
    if request.identity_key is None or request.identity_proof is None:
        text = f"{federation.name} has secure sums, and this client sends no identity key"
        raise IdentityMissing(f"{text}: install a version of promptfed that has them")
    key, proof = bytes.fromhex(request.identity_key), bytes.fromhex(request.identity_proof)
    if not is_identity(key):
        raise BadProof("identity_key is a point of small order, with which anybody can sign: make another")
    if not is_signed(key, proof, "identity", request.proof_body()):
        raise BadProof("identity_proof is not the identity key's signature of this name and secret")
    others = (client for client in federation.clients.values() if client.name != request.name)
    if any(client.identity_key == request.identity_key for client in others):
        raise KeyTaken("another client of this federation has this identity key: every client makes its own")


def _check_protection(federation: Federation, request: EnrolRequest) -> None:
    """A trainer's protection must match the federation's: it counts groups itself; records are its images."""
    privacy, plan = federation.spec.privacy, request.protection
    if not privacy.protects_records or request.role != "trainer":
        if plan is not None:
            raise problems.PrivacyMismatch(f"{federation.name} asks no {request.role} for protection of its own")
        return
    if plan is None and privacy.unit == "group":
        raise problems.PrivacyMissing(
            f"{federation.name} protects groups, and this client does not say how many it has"
        )
    if plan is not None and privacy.unit == "record" and plan.units != request.num_samples:
        text = f"{plan.units} protected records and {request.num_samples} training images"
        raise problems.PrivacyMismatch(f"{text}: {federation.name} protects every image")
    if plan is not None and plan.units > request.num_samples:
        raise problems.PrivacyMismatch(f"{plan.units} groups of {request.num_samples} images: some would be empty")
    if plan is not None and privacy.noise_multiplier not in (None, plan.noise_multiplier):
        text = f"the client plans noise of {plan.noise_multiplier:g}, the spec has {privacy.noise_multiplier:g}"
        raise problems.PrivacyMismatch(text)


def _check_class_names(federation: Federation, request: EnrolRequest) -> None:
    if federation.spec.class_names is not None:
        unknown = sorted(set(request.class_names) - set(federation.spec.class_names))
        if unknown:
            text = f"{federation.name} has no class {shortened(map(repr, unknown))}: rename or leave out those images"
            raise problems.UnknownClass(text + beside_known(unknown, federation.spec.class_names))
        return
    agreed = federation.class_names
    if agreed is not None and request.role == "trainer" and not federation.may_differ:
        differences = differing({"those who have started": agreed, request.name: tuple(request.class_names)})
        if differences is not None:
            raise problems.OtherClasses(f"{differences}: give the images the names of those who have started")
    size = federation.with_named(request.class_names).named_bytes
    if size > CLASS_NAME_BYTES:
        text = f"with this client's, the class names of {federation.name} would have {size:,} bytes of text"
        raise problems.TooManyClassNames(
            f"{text}; {CLASS_NAME_BYTES:,} are taken, unless its spec lists them under class_names"
        )


def _check_method(federation: Federation, client: Client, shape: BackboneShape) -> None:
    """The method must support the first client's backbone, and accept this client."""
    seen = federation if federation.shape is not None else replace(federation, shape=shape)
    try:
        if federation.shape is None:
            check_fits(federation.method, shape)
            federation.method.dims(seen.context())
            check_sizes(federation.spec, federation.method, seen.context(), federation.rules.min_clients)
            check_hopeless(federation.method, federation.spec, seen.context(), federation.rules.min_clients)
    except MethodError as error:
        raise problems.CannotStart(str(error)) from None
    member = federation.run.members.get(client.name)
    former = federation.clients[client.name] if member is not None and member.joined else None
    alone = seen.context([])
    try:
        _check_delta(federation, client)
        federation.method.check_classes(federation.method.label_space(alone.class_names, client.class_names))
        check_admission(federation.method, client, former, lambda: _others(seen, client))
    except MethodError as error:
        raise problems.UnfitClient(str(error)) from None


def _others(federation: Federation, client: Client) -> ServerContext:
    """All active clients but one. Asked for only where a method compares: there may be thousands."""
    members = federation.run.members.items()
    return federation.context([name for name, member in members if member.active and name != client.name])


def _check_delta(federation: Federation, client: Client) -> None:
    """At level ``client``, δ must stay below 1/N with one more trainer."""
    if client.role == "trainer" and federation.spec.privacy.protects_clients:
        others = [name for name in federation.run.trainers() if name != client.name]
        check_clients(federation.spec, len(others) + 1)


def _row(federation: Federation, request: EnrolRequest, id: str, token_id: str) -> Row:
    """The columns of the client's row that an enrolment sets, also when a client returns."""
    return {
        "id": id,
        "federation_id": federation.id,
        "name": request.name,
        "role": request.role,
        "secret_digest": digest(request.secret),
        "num_samples": request.num_samples,
        "class_names": list(request.class_names),
        "domain": request.domain.model_dump() if request.domain else None,
        "device": request.device,
        "software": _software(request),
        "active": True,
        "token_id": token_id,
        "last_seen": clock.now(),
        "identity_key": request.identity_key,
        "protection": request.protection.model_dump() if request.protection is not None else None,
    }


def _store(change: Change, row: Row) -> None:
    if row["name"] in change.federation.clients:
        stored = change.client_row(row["name"])
        for key, value in row.items():
            setattr(stored, key, value)
    else:
        change.batch.clients.append({**row, "joined": False, "enrolled_at": clock.now(), "refusals": 0})


def _keep_reference(change: Change, request: EnrolRequest) -> None:
    """Take what the spec leaves open about the backbone from the first enrolment; ``start`` confirms it."""
    shape, reference = request.backbone_shape, change.federation.shape
    if reference is not None:
        stated = {key: size for key, size in reference.model_dump().items() if size is not None}
        shape = shape.model_copy(update=stated)
    if (request.backbone_fingerprint, shape) == (change.federation.fingerprint, reference):
        return
    change.federation = replace(change.federation, fingerprint=request.backbone_fingerprint, shape=shape)
    row = change.federation_row()
    row.fingerprint, row.shape = request.backbone_fingerprint, shape.model_dump()


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
        """Count the refusal."""
        change.batch.refuse(self.federation, self.client, self.about)
        return True


def record_refused_enrolment(
    registry: Registry, id: str, name: str, token_digest: str, refusal: problems.Refusal
) -> None:
    """Tell operators why a newcomer cannot join, by an event: often only they can mend it.

    A client that tries again and again makes one.
    """
    with registry.change(id) as change:
        token = change.federation.tokens.get(token_digest)
        refusals = [entry for entry, _ in refused_enrolments(change.session, id)]
        if token is None or len(refusals) >= MOST_REFUSED:
            return
        about = {"client": name, "token": token.name, "type": refusal.kind, "detail": refusal.detail[:2000]}
        if about != next((one for one in refusals if one["client"] == name), None):
            change.emit(REFUSED, **about)


def refused_enrolments(session: Session, id: str) -> list[tuple[dict[str, Any], str]]:
    """What newcomers were refused, and when, the last one first."""
    query = select(EventRow.data, EventRow.at).where(EventRow.federation_id == id, EventRow.kind == REFUSED)
    return [(data, at) for data, at in session.execute(query.order_by(EventRow.id.desc()))]


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
