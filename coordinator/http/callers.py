"""Authentication by bearer tokens, whose hashes are compared in constant time, and by the names in certificates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hmac import compare_digest

from starlette.requests import HTTPConnection

from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine.audit import Operator
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.engine.token_expiry import has_expired
from promptfed.coordinator.http.certificates import check_certificate
from promptfed.coordinator.http.throttle import AuthThrottle
from promptfed.coordinator.problems import StoreAway, TokenExpired, Unauthorized
from promptfed.coordinator.store.tokens import digest
from promptfed.shared.api.api_schemas import LEVELS, OperatorRole

FIRST_ADMIN = "operator.token"


@dataclass(frozen=True)
class OperatorCaller:
    """An operator with a name, or the holder of the data folder's token, who is the first admin.

    ``token``: the digest of a named operator's token, which can be taken back.
    """

    name: str = FIRST_ADMIN
    role: OperatorRole = "admin"
    token: str | None = None

    def seconds_left(self, registry: Registry) -> float:
        """How long the token is still valid; 0 if it has expired or was revoked."""
        if self.token is None:
            return math.inf
        operator = registry.operators.get(self.token)
        if operator is None or has_expired(operator):
            return 0.0
        return max(0.0, (operator.expires - clock.utc()).total_seconds())


@dataclass(frozen=True)
class EnrollingCaller:
    """The holder of a federation's enrolment token; ``token``: its digest."""

    federation: str
    token: str


@dataclass(frozen=True)
class ClientCaller:
    """A client of a federation."""

    federation: str
    client: Client
    active: bool


Caller = OperatorCaller | EnrollingCaller | ClientCaller


def is_let_in(caller: Caller, scheme: str, federation: str | None, registry: Registry) -> bool:
    """Whether ``caller`` may call a route of the security ``scheme``, for the ``federation`` (id or name).

    ``scheme``: "viewer", "operator" or "admin" for an operator with this role or a higher one; "enrolment"; "client".
    """
    if isinstance(caller, OperatorCaller):
        return scheme in LEVELS and LEVELS[caller.role] >= LEVELS[scheme]
    of_caller = registry.federations.get(caller.federation)
    if of_caller is None or federation not in (of_caller.id, of_caller.name):
        return False
    return scheme == "enrolment" if isinstance(caller, EnrollingCaller) else scheme == "client" and caller.active


async def authenticate(request: HTTPConnection, registry: Registry, token: str | None) -> Caller:
    """The caller with this ``token``. Counts for the throttle of its address. Raises as ``look_up`` does."""
    if registry.away:
        raise StoreAway
    if token is None:
        raise Unauthorized("send the token as `Authorization: Bearer <token>`")
    auth_throttle: AuthThrottle = request.app.state.auth_throttle
    token_digest = digest(token)
    try:
        caller = look_up(request, registry, token_digest)
    except Unauthorized:
        auth_throttle.failed(address_of(request))
        raise
    auth_throttle.succeeded(address_of(request), token_digest)
    return caller


def look_up(connection: HTTPConnection, registry: Registry, token_digest: str) -> Caller:
    """The caller whose token has this digest. Raises StoreAway, TooManyFailures, Unauthorized, TokenExpired."""
    if registry.away:
        raise StoreAway
    state = connection.app.state
    auth_throttle: AuthThrottle = state.auth_throttle
    federations = _named_first(registry, connection.path_params.get("federation"))
    try:
        caller = _identify(token_digest, state.operator_digest, registry.operators, federations)
    except Unauthorized:
        auth_throttle.check_wrong(address_of(connection), token_digest)
        raise
    auth_throttle.check_right(address_of(connection), token_digest)
    if not isinstance(caller, OperatorCaller):
        check_certificate(connection, caller.client.name if isinstance(caller, ClientCaller) else None)
    return caller


def _named_first(registry: Registry, name: str | None) -> Iterator[Federation]:
    """All federations, the one with this id or name first: a site may use the same secret in several of them."""
    federations = registry.federations.values()
    yield from (federation for federation in federations if name in (federation.id, federation.name))
    yield from (federation for federation in federations if name not in (federation.id, federation.name))


def address_of(connection: HTTPConnection) -> str:
    """The caller's address."""
    client = connection.scope.get("client")
    return str(client[0]) if client is not None else "no address"


def _identify(
    token_digest: str, first_admin: str, operators: Mapping[str, Operator], federations: Iterable[Federation]
) -> Caller:
    # Tokens are looked up by their SHA-256, whose beginning nobody can choose: how long that takes tells nothing.
    if compare_digest(token_digest, first_admin):
        return OperatorCaller()
    operator = operators.get(token_digest)
    if operator is not None:
        if has_expired(operator):
            raise TokenExpired(f"this token of {operator.name}'s has expired: ask an admin for another")
        return OperatorCaller(operator.name, operator.role, token=token_digest)
    for federation in federations:
        token = federation.tokens.get(token_digest)
        if token is not None:
            if has_expired(token):
                raise TokenExpired("this enrolment token has expired: ask the operator for another")
            return EnrollingCaller(federation.id, token_digest)
        client = federation.by_secret.get(token_digest)
        if client is not None and compare_digest(client.secret_digest or "", token_digest):
            return ClientCaller(federation.id, client, federation.run.members[client.name].active)
    raise Unauthorized("this token is not known here")
