"""Who may do what: bearer tokens, whose hashes are compared in constant time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from hmac import compare_digest

from starlette.requests import HTTPConnection, Request

from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http.auth_throttle import AuthThrottle
from promptfed.coordinator.problems import StoreAway, TokenExpired, Unauthorized
from promptfed.coordinator.store.tokens import digest


@dataclass(frozen=True)
class OperatorCaller:
    """Whoever holds the operator token."""


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


def authenticate(request: Request, registry: Registry, token: str | None) -> Caller:
    """Who calls with ``token``; whether it was right counts for the address. Raises as ``look_up`` does."""
    if registry.away:
        raise StoreAway
    if token is None:
        raise Unauthorized("send the token as `Authorization: Bearer <token>`")
    auth_throttle: AuthThrottle = request.app.state.auth_throttle
    try:
        caller = look_up(request, registry, token)
    except Unauthorized:
        auth_throttle.failed(_address(request))
        raise
    auth_throttle.succeeded(_address(request), digest(token))
    return caller


def look_up(connection: HTTPConnection, registry: Registry, token: str) -> Caller:
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
    auth_throttle.check(_address(connection), token_digest)
    return _identify(token_digest, state.operator_digest, federations)


def _address(connection: HTTPConnection) -> str:
    return connection.client.host if connection.client is not None else "no address"


def _identify(token_digest: str, operator_digest: str, federations: Iterable[Federation]) -> Caller:
    if compare_digest(token_digest, operator_digest):
        return OperatorCaller()
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
