"""Authentication by bearer tokens, whose hashes are compared in constant time, and by the names in certificates.

Wrong tokens are limited by the caller's address, connections by the open files of the process.

Where a process has no open file left, asyncio fills the log with thousands of lines a second and answers nobody, and
neither the database nor an update can be opened: whoever can reach the port could bring that about.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import ssl
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hmac import compare_digest
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine.audit import Operator
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.engine.scheduler import has_expired
from promptfed.coordinator.problems import OtherCertificate, StoreAway, TokenExpired, TooManyFailures, Unauthorized
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.tokens import digest
from promptfed.shared.api.api_schemas import LEVELS, OperatorRole
from promptfed.shared.service.http_connection import LimitedHttpProtocol
from promptfed.shared.service.net import certificate_hash, certificates_in, most_connections

SHOWN = "promptfed.certificate_names"
log = logging.getLogger("promptfed.coordinator")
MOST_ADDRESSES = 10_000
MOST_TOKENS = 100_000
GUESSES = 100  # times the failures: so many different wrong tokens no broken script and no lost federation sends
FIRST_ADMIN = "operator.token"
ACCEPTED_AT_ONCE = 32  # several times as many may have been accepted before the first of them is looked at
QUEUE = 2048  # connections that the system keeps until they are accepted


def names_shown(transport: asyncio.BaseTransport) -> frozenset[str]:
    """The common name and the DNS names of the caller's certificate, which TLS has verified; empty without one."""
    ssl_object: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    certificate: dict[str, Any] | None = ssl_object.getpeercert() if ssl_object is not None else None
    if not certificate:
        return frozenset()
    common = {value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"}
    others = {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}
    return frozenset(common | others)


def with_certificate(app: ASGIApp, names: frozenset[str]) -> ASGIApp:
    """The application for one connection: adds the certificate's names to each request."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SHOWN] = names
        await app(scope, receive, send)

    return call


def check_certificate(connection: HTTPConnection, name: str | None) -> None:
    """Refuse a client without a certificate for ``name`` (None: any), if the settings require certificates.

    Raises:
        OtherCertificate: it has not.
    """
    settings: Settings = connection.app.state.settings
    if settings.tls_client_ca is None:
        return
    shown: frozenset[str] = connection.scope.get(SHOWN, frozenset())
    if not shown:
        raise OtherCertificate("clients show a certificate here: give --client-cert and --client-key")
    if name is not None and name not in shown:
        raise OtherCertificate(f"the certificate is for {', '.join(sorted(shown))[:200]}, not for the client {name!r}")


def authority(settings: Settings) -> str | None:
    """The last certificate of the coordinator's chain, in PEM: its authority's if the chain is complete.

    None where the coordinator serves no TLS.
    """
    if settings.tls_cert is None:
        return None
    chain = certificates_in(settings.tls_cert.read_text())
    return chain[-1] if chain else None


def fingerprint(settings: Settings) -> str | None:
    """The SHA-256 of `authority`, in hexadecimal."""
    certificate = authority(settings)
    return certificate_hash(certificate) if certificate is not None else None


@dataclass
class _Bucket:
    """The failures that an address has left, as of ``at`` (monotonic seconds)."""

    left: float
    at: float


class AuthThrottle:
    """Failures by address: ``per_minute`` at once, and per minute. Used on the event loop only.

    All tables are bounded; the least recently used entries go first.
    """

    def __init__(self, per_minute: int):
        self._most = float(per_minute)
        self._failures: OrderedDict[str, _Bucket] = OrderedDict()
        self._guesses: OrderedDict[str, _Bucket] = OrderedDict()
        self._wrong: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._trusted: OrderedDict[tuple[str, str], None] = OrderedDict()

    def check_wrong(self, address: str, token_digest: str) -> None:
        """Count a wrong token, once. Raises TooManyFailures if the address has failed too often."""
        key = _network(address)
        if (key, token_digest) not in self._wrong:
            _take(self._guesses, key, self._most * GUESSES)
        _remember(self._wrong, (key, token_digest))
        self._expect_left(self._failures, address, self._most)

    def check_right(self, address: str, token_digest: str) -> None:
        """Raises TooManyFailures for a valid token that is new to an address which guesses tokens."""
        if (_network(address), token_digest) not in self._trusted:
            self._expect_left(self._guesses, address, self._most * GUESSES)

    def failed(self, address: str) -> None:
        """Count a call that was refused for its token."""
        key = _network(address)
        if _take(self._failures, key, self._most) < 1:
            log.warning("wrong tokens from %s: more of them are refused for now", key)

    def succeeded(self, address: str, token_digest: str) -> None:
        """Remember a valid token: this address may always use it again."""
        _remember(self._trusted, (_network(address), token_digest))

    def _expect_left(self, buckets: OrderedDict[str, _Bucket], address: str, most: float) -> None:
        bucket = buckets.get(_network(address))
        left = _filled(bucket, most) if bucket is not None else most
        if left < 1:
            seconds = math.ceil((1 - left) * 60 / most)
            raise TooManyFailures(f"too many wrong tokens came from {address}: try again in {seconds} s", seconds)


def _take(buckets: OrderedDict[str, _Bucket], key: str, most: float) -> float:
    """Take one failure out of an address's bucket, unless it is empty; returns how many are left."""
    bucket = buckets.setdefault(key, _Bucket(most, clock.monotonic()))
    buckets.move_to_end(key)
    bucket.left, bucket.at = max(0.0, _filled(bucket, most) - 1), clock.monotonic()
    while len(buckets) > MOST_ADDRESSES:
        buckets.popitem(last=False)
    return bucket.left


def _filled(bucket: _Bucket, most: float) -> float:
    return min(most, bucket.left + (clock.monotonic() - bucket.at) * most / 60)


def _remember(pairs: OrderedDict[tuple[str, str], None], pair: tuple[str, str]) -> None:
    pairs[pair] = None
    pairs.move_to_end(pair)
    while len(pairs) > MOST_TOKENS:
        pairs.popitem(last=False)


@lru_cache(maxsize=1024)
def _network(address: str) -> str:
    """The address, or the /64 network of an IPv6 address, all of which one caller may have."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address  # a Unix socket, or a call within the process
    if isinstance(ip, ipaddress.IPv4Address):
        return address
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, 64), strict=False))


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
        known = registry.operators.get(self.token)
        if known is None or has_expired(known):
            return 0.0
        return max(0.0, (known.expires - clock.utc()).total_seconds())


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


def is_let_in(caller: Caller, scheme: str, asked: str | None, registry: Registry) -> bool:
    """Whether ``caller`` may call a route of the security ``scheme``, for the federation ``asked`` (id or name).

    ``scheme``: "viewer", "operator" or "admin" for an operator with this role or a higher one; "enrolment"; "client".
    """
    if isinstance(caller, OperatorCaller):
        return scheme in LEVELS and LEVELS[caller.role] >= LEVELS[scheme]
    own = registry.federations.get(caller.federation)
    if own is None or asked not in (own.id, own.name):
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
    asked = connection.path_params.get("federation")
    federations = _asked_first(registry, asked)
    try:
        caller = _identify(token_digest, state.operator_digest, registry.operators, federations)
    except Unauthorized:
        auth_throttle.check_wrong(address_of(connection), token_digest)
        raise
    auth_throttle.check_right(address_of(connection), token_digest)
    if not isinstance(caller, OperatorCaller):
        check_certificate(connection, caller.client.name if isinstance(caller, ClientCaller) else None)
    return caller


def _asked_first(registry: Registry, asked: str | None) -> Iterator[Federation]:
    """All federations, the one with this id or name first: a site may use the same secret in several of them."""
    federations = registry.federations.values()
    yield from (federation for federation in federations if asked in (federation.id, federation.name))
    yield from (federation for federation in federations if asked not in (federation.id, federation.name))


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


class LimitedConnection(LimitedHttpProtocol):
    """Hangs up on whoever is one too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or end it at once where there are too many."""
        super().connection_made(transport)
        shown = names_shown(transport)
        if shown:
            self.app = with_certificate(self.app, shown)
        if len(self.connections) > most_connections():
            transport.abort()
