"""Who may do what: bearer tokens, whose hashes are compared in constant time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hmac import compare_digest

from starlette.requests import HTTPConnection, Request

from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine.registry import Operator, Registry
from promptfed.coordinator.http.auth_throttle import AuthThrottle
from promptfed.coordinator.http.oidc import Issuer
from promptfed.coordinator.problems import StoreAway, TokenExpired, Unauthorized
from promptfed.coordinator.store.tokens import digest
from promptfed.shared.access_schemas import OperatorRole

FIRST_ADMIN = "operator.token"


@dataclass(frozen=True)
class OperatorCaller:
    """An operator: by name, or whoever holds the token of the data folder, who is the first admin."""

    name: str = FIRST_ADMIN
    role: OperatorRole = "admin"


@dataclass(frozen=True)
class EnrollingCaller:
    """Whoever holds an enrolment token of a federation, known by its digest."""

    federation: str
    token: str


@dataclass(frozen=True)
class ClientCaller:
    """A client of a federation."""

    federation: str
    client: Client
    active: bool


Caller = OperatorCaller | EnrollingCaller | ClientCaller


async def authenticate(request: Request, registry: Registry, token: str | None) -> Caller:
    """Who calls with ``token``; whether it was right counts for the address. Raises as ``look_up`` does."""
    if registry.away:
        raise StoreAway
    if token is None:
        raise Unauthorized("send the token as `Authorization: Bearer <token>`")
    auth_throttle: AuthThrottle = request.app.state.auth_throttle
    try:
        caller = await look_up(request, registry, token)
    except Unauthorized:
        auth_throttle.failed(address_of(request))
        raise
    auth_throttle.succeeded(address_of(request), digest(token))
    return caller


async def look_up(connection: HTTPConnection, registry: Registry, token: str) -> Caller:
    """Who calls with ``token``; nothing is counted. Raises StoreAway, TooManyFailures, Unauthorized, TokenExpired."""
    if registry.away:
        raise StoreAway
    state, token_digest = connection.app.state, digest(token)
    wanted = connection.path_params.get("federation")
    # The asked-for federation first: a site may use one secret with several federations.
    federations = sorted(
        registry.federations.values(), key=lambda federation: wanted not in (federation.id, federation.name)
    )
    auth_throttle: AuthThrottle = state.auth_throttle
    auth_throttle.check(address_of(connection), token_digest)
    issuer: Issuer | None = state.issuer
    if issuer is not None and issuer.may_have_issued(token):
        name, role = await issuer.identify(token)
        return OperatorCaller(name, role)
    return _identify(token_digest, state.operator_digest, registry.operators, federations)


def address_of(connection: HTTPConnection) -> str:
    """Where the call comes from."""
    return connection.client.host if connection.client is not None else "no address"


def _identify(
    token_digest: str, first_admin: str, operators: Mapping[str, Operator], federations: Iterable[Federation]
) -> Caller:
    # Tokens are looked up by their SHA-256, whose beginning nobody can choose: how long that takes tells nothing.
    if compare_digest(token_digest, first_admin):
        return OperatorCaller()
    operator = operators.get(token_digest)
    if operator is not None:
        if operator.expires <= datetime.now(UTC):
            raise TokenExpired(f"this token of {operator.name}'s has expired: ask an admin for another")
        return OperatorCaller(operator.name, operator.role)
    for federation in federations:
        token = federation.tokens.get(token_digest)
        if token is not None:
            if token.expires <= datetime.now(UTC):
                raise TokenExpired("this enrolment token has expired: ask the operator for another")
            return EnrollingCaller(federation.id, token_digest)
        client = federation.by_secret.get(token_digest)
        if client is not None and compare_digest(client.secret_digest or "", token_digest):
            return ClientCaller(federation.id, client, federation.run.members[client.name].active)
    raise Unauthorized("this token is not known here")
