"""Operators' actions on federations: create (also at the first start), start, pause, resume, cancel, give a state."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from sqlalchemy import select

from promptfed.coordinator import problems
from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.domain.federation import Federation, new_federation
from promptfed.coordinator.domain.round_machine import WrongMoment
from promptfed.coordinator.engine import audit
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.engine.token_expiry import has_expired
from promptfed.coordinator.problems import Refusal
from promptfed.coordinator.resources.clients import tokens
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.tables import EventRow, FederationRow
from promptfed.coordinator.store.tokens import digest, write_secret
from promptfed.shared.api.api_schemas import TokenRequest
from promptfed.shared.canonical import canonical_json, parse_json
from promptfed.shared.clip.sizes import shape_by_name
from promptfed.shared.errors import BadInput
from promptfed.shared.methods import check_fits, make_method, resolve_spec, with_default_backbone
from promptfed.shared.methods.core.array_library import needs_torch_always
from promptfed.shared.methods.core.costs import allowed_rounds
from promptfed.shared.methods.core.default_backbone import data_in
from promptfed.shared.methods.core.interface import MethodError
from promptfed.shared.methods.core.refusals import check_hopeless, check_sizes, check_texts
from promptfed.shared.plain_text import plain
from promptfed.shared.privacy.noise import Noise
from promptfed.shared.service.fault_points import point
from promptfed.shared.service.reasons import why
from promptfed.shared.service.yaml_text import read_mapping, read_yaml
from promptfed.shared.spec.spec import FederationSpec, SpecError
from promptfed.shared.tensors import TensorError, check, decode, state_hash

log = logging.getLogger("promptfed.coordinator")


def resolve(raw: dict[str, Any]) -> FederationSpec:
    """The complete spec, with the method's defaults. Raises InvalidSpec."""
    try:
        spec = resolve_spec(raw)
        _check_torch(spec)
        _check_shape(spec)
        with _offence_at("privacy.epsilon"):
            allowed_rounds(make_method(spec.method), spec)
    except SpecError as error:
        raise problems.InvalidSpec(str(error), errors=error.errors) from None
    return spec


def _check_torch(spec: FederationSpec) -> None:
    """If the method computes with torch on the coordinator, torch must be installed."""
    method = make_method(spec.method)
    with _offence_at("method.name"):
        if needs_torch_always(method) and not global_state.has_torch():
            why = f"{method.name} computes with torch on the coordinator, and this one has no torch"
            raise MethodError(f"{why}: {global_state.GET_TORCH}")


def _check_shape(spec: FederationSpec) -> None:
    """If the backbone's shape is known, the method must support it, and learn beside the noise."""
    shape = spec.backbone.shape or shape_by_name(spec.backbone.model)
    if shape is None or (shape.d_v is not None and shape.positions is None and spec.backbone.shape is None):
        return  # what towers that are not plain take, the first client tells
    backbone = spec.backbone.model_copy(update={"shape": shape})
    federation = new_federation("", spec.model_copy(update={"backbone": backbone}))
    with _offence_at("backbone.shape" if spec.backbone.shape else "backbone.model"):
        check_fits(federation.method, shape)
        federation.method.dims(federation.context())
    with _offence_at("class_names" if spec.class_names else "template"):
        check_texts(federation.method, spec, shape.context_length)
    with _offence_at("method"):
        check_sizes(spec, federation.method, federation.context(), spec.participation.min_clients)
    with _offence_at("privacy.noise_multiplier"):
        check_hopeless(federation.method, spec, federation.context(), spec.participation.min_clients)


@contextmanager
def _offence_at(path: str) -> Iterator[None]:
    """A block whose MethodError becomes a SpecError at ``path`` of the spec."""
    try:
        yield
    except MethodError as error:
        raise SpecError([{"path": path, "detail": str(error)}]) from None


def _budgeted(federation: Federation, noise: Noise) -> Federation:
    """The federation with its sampling key, and the rounds that its privacy budget allows."""
    poisson = federation.spec.participation.sampling == "poisson"
    key = noise.key("sampling", federation.name).hex() if poisson else None
    return federation.sampling_with(key, allowed_rounds(federation.method, federation.spec))


def create(registry: Registry, raw: dict[str, Any], key: str | None = None) -> Federation:
    """Create a federation, or return the one that this Idempotency-Key has created.

    Raises:
        InvalidSpec, NameTaken, KeyReused: it cannot be created.
    """
    request_digest = _digest_of(raw)
    with registry.exclusively():
        earlier = _created_with(registry, key, request_digest)
        if earlier is not None:
            return earlier
        spec = resolve(raw)
        if any(spec.name in (federation.name, federation.id) for federation in registry.federations.values()):
            text = f"there is already a federation {spec.name!r}: choose another name, or delete that one"
            raise problems.NameTaken(text)
        federation = new_federation("fed-" + secrets.token_hex(8), spec)
        federation = _budgeted(federation, registry.noise)
        if spec.participation.draw == "secret" and federation.sampling_key is None:
            federation = federation.drawing_with(secrets.token_hex(32))
        with registry.database.write() as session:
            session.add(_row(federation, key, request_digest))
            session.flush()
            session.add(EventRow(federation_id=federation.id, kind="federation-created", data={}, at=clock.now()))
            audit.note(session, "federation-created", federation, spec_sha256=request_digest)
        registry.add(federation)
    point("federation-created")
    return federation


def _digest_of(raw: dict[str, Any]) -> str:
    try:
        return hashlib.sha256(canonical_json(raw).encode()).hexdigest()
    except ValueError:
        resolve(raw)  # Its error names the place, except in unknown keys.
        detail = "holds NaN, infinity or text that is no Unicode"
        raise problems.InvalidSpec(detail, errors=[{"path": "(spec)", "detail": detail}]) from None


def _created_with(registry: Registry, key: str | None, request_digest: str) -> Federation | None:
    if key is None:
        return None
    with registry.database.read() as session:
        row = session.scalars(select(FederationRow).where(FederationRow.idempotency_key == key)).one_or_none()
        if row is None:
            return None
        if row.request_digest != request_digest:
            raise problems.KeyReused(
                "this Idempotency-Key was used with another spec: use a fresh key for a fresh federation"
            )
        return registry.get(row.id)


def _row(federation: Federation, key: str | None, request_digest: str) -> FederationRow:
    return FederationRow(
        id=federation.id,
        name=federation.name,
        spec=federation.spec.model_dump(mode="json"),
        idempotency_key=key,
        request_digest=request_digest,
        created_at=clock.now(),
        state="enrolling",
        round=0,
        step=0,
        joining=[],
        fingerprint=federation.fingerprint,
        shape=federation.shape.model_dump() if federation.shape else None,
        draw_secret=federation.draw_secret,
        sampling_key=federation.sampling_key,
        budget_rounds=federation.rules.budget_rounds,
    )


def steer(registry: Registry, id: str, verb: str) -> None:
    """Pause, resume or cancel. Raises WrongState."""
    steps: dict[str, run_state.Event] = {
        "pause": run_state.Pause(),
        "resume": run_state.Resume(clock.monotonic()),
        "cancel": run_state.Cancel(),
    }
    try:
        with registry.change(id) as change:
            change.send(steps[verb])
            change.note(f"federation-{verb}")
    except WrongMoment as error:
        state = str(error)
        raise problems.WrongState(f"the federation is {state}: it cannot {verb} now", state=state) from None


def supply_state(registry: Registry, id: str, body: bytes) -> str:
    """Keep the tensors that the federation shall start from; their state hash.

    Raises:
        WrongState: it has started; or the refusal of a tensor.
    """
    federation = registry.get(id)
    _expect_enrolling(federation)
    try:
        tensors, _ = decode(body)
        _check_supplied(federation, tensors)
    except TensorError as error:
        raise problems.TENSOR_REFUSALS[error.kind](str(error)) from None
    continues = federation.spec.continues
    if continues not in (None, state_hash(tensors)):
        text = f"{federation.name} continues the state {continues}, and these tensors are {state_hash(tensors)}"
        raise problems.InitialStateMismatch(f"{text}: PUT the state of the export that it was created from")
    with registry.blobs.hold() as held:
        digest_ = held.put(body)
        with registry.change(id) as change:
            _expect_enrolling(change.federation)
            change.keep(held)
            row = change.federation_row()
            row.supplied_state = digest_
            change.federation = replace(change.federation, supplied_state=digest_)
            change.emit("initial-state-supplied", state_hash=state_hash(tensors))
            change.note("initial-state-supplied", state_hash=state_hash(tensors))
    return state_hash(tensors)


def _check_supplied(federation: Federation, tensors: dict[str, Any]) -> None:
    """Check what does not depend on the clients; ``start`` checks the rest."""
    expected = {spec.name: spec for spec in federation.method.state_tensors()}
    for name, spec in expected.items():
        tensor = tensors.get(name)
        if tensor is not None and tensor.ndim != len(spec.shape):
            text = f"tensor {name!r} has {tensor.ndim} dimensions; {len(spec.shape)} are expected"
            raise TensorError("wrong-shape", text)
    if federation.shape is None:
        shapes = {name: tuple(tensors[name].shape) if name in tensors else () for name in expected}
        check(tensors, {name: (shapes[name], spec.dtype) for name, spec in expected.items()})
        return
    roster = [name for name, member in federation.run.members.items() if member.active]
    context = federation.context(roster)
    global_state.check_state(federation, global_state.adopted(federation, tensors, context), context)


def _expect_enrolling(federation: Federation) -> None:
    if federation.run.state != "enrolling":
        text = f"{federation.name} is {federation.run.state}: its initial state can only be supplied before the start"
        raise problems.WrongState(text, state=federation.run.state)


def bootstrap(registry: Registry, settings: Settings) -> None:
    """Create the settings' federation if it does not exist, and write an enrolment token unless there is a valid one.

    The token is for as many clients as the settings say, or the spec's ``min_clients``, minus the enrolled ones.

    Raises:
        BadInput: the file cannot be read, or its spec cannot be run here.
    """
    if settings.bootstrap is None:
        return
    raw = read_mapping(settings.bootstrap)
    federation = next((one for one in registry.federations.values() if one.name == raw.get("name")), None)
    path = settings.enrolment_token_file
    try:
        if federation is None:
            federation = create(registry, raw)
        elif other := _differing(raw, _plain(federation.spec), _plain(resolve(raw))):
            text = "%s is not the spec of %s, which goes on as it was created (%s): give a new one another name"
            log.warning(text, settings.bootstrap, federation.name, "; ".join(other[:5]))
        if path is not None and not _is_good(federation, path):
            uses = settings.enrolment_token_uses or federation.spec.participation.min_clients
            missing = uses - len(registry.get(federation.id).clients)
            if missing > 0:
                minted = tokens.mint(registry, federation.id, TokenRequest(uses=missing), settings.token_hours)
                write_secret(path, minted.token)
    except Refusal as refusal:
        raise BadInput(f"{settings.bootstrap}: {refusal.detail}") from None


def _plain(spec: FederationSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json")


def _differing(part: dict[str, Any], there: dict[str, Any], here: dict[str, Any], path: str = "") -> list[str]:
    """Of the keys of ``part``, each whose value is another ``here`` than ``there``."""
    differences = []
    for key in part:
        then, now = there.get(key), here.get(key)
        if isinstance(part[key], dict) and isinstance(then, dict) and isinstance(now, dict):
            differences += _differing(part[key], then, now, f"{path}{key}.")
        elif then != now:
            differences.append(f"{path}{key} is {plain(str(then))[:80]}, not {plain(str(now))[:80]}")
    return differences


def read_run(text: str) -> dict[str, Any]:
    """The mapping in the text of a run file, of values that JSON has.

    Raises:
        InvalidSpec: it is neither YAML nor JSON, has an alias, or holds no mapping of such values.
    """
    try:
        raw = parse_json(json.dumps(read_yaml(text, aliases=False), allow_nan=False).encode())
    except yaml.YAMLError as error:
        raise problems.InvalidSpec(f"this is not YAML: {why(error)}") from None
    except (TypeError, ValueError) as error:
        raise problems.InvalidSpec(f"write numbers, texts, lists and mappings: {why(error)}") from None
    if not isinstance(raw, dict):
        raise problems.InvalidSpec("this is no run file: it begins with settings, such as `name: eyes`")
    return with_default_backbone(raw, data_in(raw.get("clients")))[0]


def _is_good(federation: Federation, path: Path) -> bool:
    """Whether the file holds a token of this federation that has not expired."""
    try:
        token = federation.tokens.get(digest(path.read_text().strip()))
    except (OSError, UnicodeDecodeError):
        return False
    return token is not None and not has_expired(token)
