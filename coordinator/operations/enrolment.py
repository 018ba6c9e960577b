"""How a client enters a federation."""

from __future__ import annotations

import secrets
from dataclasses import replace

from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Client, Live
from promptfed.coordinator.domain.run_state import ENDED, Enrolled
from promptfed.coordinator.engine.recorder import Change
from promptfed.coordinator.engine.registry import Engine
from promptfed.coordinator.http.tokens import digest
from promptfed.coordinator.problems import (
    CannotStart,
    DomainMissing,
    LateJoin,
    NameTaken,
    NoSamples,
    OtherBackbone,
    ProtocolVersion,
    SecretTaken,
    UnfitClient,
    UnknownClass,
    Withdrawn,
    WrongState,
)
from promptfed.coordinator.store.fault_points import point
from promptfed.coordinator.store.tables import ClientRow
from promptfed.shared.messages import PROTOCOL_VERSION, EnrolmentInfo, EnrolRequest
from promptfed.shared.methods import METHODS, check_fits
from promptfed.shared.methods.core.base import MethodError
from promptfed.shared.spec import BackboneShape


def enrolment_info(live: Live) -> EnrolmentInfo:
    """What a client must know before it can enrol; the backbone's fingerprint may be the first enrolment's."""
    backbone = live.spec.backbone.model_copy(update={"fingerprint": live.fingerprint, "shape": live.shape})
    return EnrolmentInfo(
        federation_id=live.id,
        name=live.name,
        method=live.spec.method,
        method_package=METHODS.package(live.method.name),
        backbone=backbone,
        class_names=live.spec.class_names,
        template=live.spec.template,
        state=live.run.state,
    )


def enrol(engine: Engine, id: str, request: EnrolRequest) -> tuple[Client, bool]:
    """The client, and whether it is new (or back after its name was reset).

    Raises:
        A refusal of ``promptfed.coordinator.problems``: see ``_check``.
    """
    with engine.change(id) as change:
        live = change.live
        known = live.clients.get(request.name)
        _check_version_and_backbone(live, request)
        if known is not None and known.secret_digest is not None:
            return _recognise(live, known, request), False
        _check(live, request, newcomer=known is None)
        client = _client(request, known.id if known else "cli-" + secrets.token_hex(8))
        _check_method(live, client, request.backbone_shape)
        _store(change, client, request)
        change.live = change.live.with_clients(client)
        change.send(Enrolled(client.name, client.role))
        change.tell("client-enrolled", client=client.name, role=client.role)
    point("client-enrolled")
    return client, True


def _recognise(live: Live, known: Client, request: EnrolRequest) -> Client:
    if not secrets.compare_digest(known.secret_digest or "", digest(request.secret)):
        raise NameTaken(
            f"{request.name!r} has enrolled with another secret: choose another name, or ask the operator to reset it"
        )
    if not live.run.members[known.name].active:
        raise Withdrawn("the operator has withdrawn this client from the federation")
    return known


def _check_version_and_backbone(live: Live, request: EnrolRequest) -> None:
    if request.protocol_version != PROTOCOL_VERSION:
        text = f"the client speaks protocol version {request.protocol_version}, this coordinator {PROTOCOL_VERSION}"
        raise ProtocolVersion(f"{text}: install the matching release")
    if live.fingerprint is not None and request.backbone_fingerprint != live.fingerprint:
        raise OtherBackbone(
            f"the client's backbone is {request.backbone_fingerprint}; {live.name} runs on {live.fingerprint}: load "
            f"{live.spec.backbone.model!r} with weights {live.spec.backbone.pretrained!r}"
        )
    if live.shape is not None:
        given, wanted = request.backbone_shape.model_dump(), live.shape.model_dump()
        other = [key for key, size in wanted.items() if size is not None and given[key] != size]
        if other:
            told = ", ".join(f"{key} {given[key]} instead of {wanted[key]}" for key in other)
            raise OtherBackbone(f"the client's backbone has another shape: {told}")


def _check(live: Live, request: EnrolRequest, newcomer: bool) -> None:
    state, needs = live.run.state, live.method.needs
    if state in ENDED:
        raise WrongState(f"{live.name} is {state}: nobody can enrol any more", state=state)
    if newcomer and state != "enrolling" and not needs.late_join:
        raise LateJoin(f"{live.name} has started, and {live.method.name} takes no newcomers after the start")
    if digest(request.secret) in live.by_secret:
        raise SecretTaken("another client has this secret: every client makes its own")
    if request.role == "trainer" and request.num_samples == 0:
        raise NoSamples("a trainer needs at least one training sample: enrol as evaluator, or give it data")
    if needs.domain_descriptions and request.role == "trainer" and request.domain is None:
        raise DomainMissing(f"{live.method.name} needs each trainer's domain with its description")
    if live.spec.class_names is not None:
        unknown = sorted(set(request.class_names) - set(live.spec.class_names))
        if unknown:
            names = ", ".join(map(repr, unknown[:5]))
            raise UnknownClass(f"{live.name} has no class {names}: rename or leave out those images")


def _check_method(live: Live, client: Client, shape: BackboneShape) -> None:
    """The method must be able to run with the backbone that the first client brings, and to take this client."""
    seen = live if live.shape is not None else replace(live, shape=shape)
    try:
        if live.shape is None:
            check_fits(live.method, shape)
            live.method.dims(seen.context())
    except MethodError as error:
        raise CannotStart(str(error)) from None
    others = [name for name, member in live.run.members.items() if member.active and name != client.name]
    known = live.run.members.get(client.name)
    former = live.clients[client.name].info() if known is not None and known.joined else None
    context = seen.context(others)
    try:
        live.method.check_classes(live.method.label_space(context.class_names, client.class_names))
        live.method.admit(client.info(), former, context)
    except MethodError as error:
        raise UnfitClient(str(error)) from None


def _client(request: EnrolRequest, id: str) -> Client:
    return Client(
        id=id,
        name=request.name,
        role=request.role,
        secret_digest=digest(request.secret),
        num_samples=request.num_samples,
        class_names=tuple(request.class_names),
        domain=request.domain,
    )


def _store(change: Change, client: Client, request: EnrolRequest) -> None:
    _keep_reference(change, request)
    described = {
        "role": client.role,
        "secret_digest": client.secret_digest,
        "num_samples": client.num_samples,
        "class_names": list(client.class_names),
        "domain": client.domain.model_dump() if client.domain else None,
        "device": request.device,
        "active": True,
        "last_seen": clock.now(),
    }
    if client.name in change.live.clients:
        row = change.client_row(client.name)
        for key, value in described.items():
            setattr(row, key, value)
        return
    row = ClientRow(
        id=client.id,
        federation_id=change.live.id,
        name=client.name,
        joined=False,
        enrolled_at=clock.now(),
        refusals=0,
        **described,
    )
    change.session.add(row)


def _keep_reference(change: Change, request: EnrolRequest) -> None:
    """The first enrolment says what the spec left open about the backbone; ``start`` confirms it."""
    given, known = request.backbone_shape, change.live.shape
    if known is not None:
        said = {key: size for key, size in known.model_dump().items() if size is not None}
        given = given.model_copy(update=said)
    change.live = replace(change.live, fingerprint=request.backbone_fingerprint, shape=given)
    row = change.federation_row()
    row.fingerprint, row.shape = request.backbone_fingerprint, given.model_dump()
