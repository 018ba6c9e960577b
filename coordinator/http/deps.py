"""Dependencies of the routes: the registry, the caller, and the federation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Path, Query, Request, Response
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase
from fastapi.security.utils import get_authorization_scheme_param

from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine import audit
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http.callers import ClientCaller, EnrollingCaller, OperatorCaller, address_of, authenticate
from promptfed.coordinator.http.known_query import expect_known_query
from promptfed.coordinator.problems import MethodAbsent, NotFound, Withdrawn, WrongRole
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.signing import Signer
from promptfed.shared.api.api_schemas import LEVELS, OperatorRole

Caller = TypeVar("Caller", OperatorCaller, EnrollingCaller, ClientCaller)
ROLE = "Promptfed-Role"
"""The header by which a page knows what its operator may do."""

NO_NUL = r"^[^\x00]*$"  # PostgreSQL's text holds none, and may not be asked for any
FederationId = Annotated[str, Path(description="id or name of the federation", max_length=100)]
ClientId = Annotated[str, Path(description="id or name of the client", max_length=100)]
OperatorId = Annotated[str, Path(description="an operator's name, or the id of a token", max_length=100)]
TokenId = Annotated[str, Path(description="id or name of the enrolment token", max_length=100)]
TaskId = Annotated[str, Path(max_length=100, pattern=NO_NUL)]
Limit = Annotated[int, Query(ge=1, le=1000, description="at most so many")]
After = Annotated[str | None, Query(max_length=100, pattern=NO_NUL, description="`next` of the page before")]


# Asynchronous although they wait for nothing: the others would each be sent to a thread.
def of_app(name: str) -> Callable[..., Awaitable[Any]]:
    """A dependency: an attribute of the application's state."""

    async def attribute(request: Request) -> Any:
        return getattr(request.app.state, name)

    return attribute


SignerOf = Annotated[Signer, Depends(of_app("signer"))]
RegistryOf = Annotated[Registry, Depends(of_app("registry"))]
SettingsOf = Annotated[Settings, Depends(of_app("settings"))]


class _Caller(SecurityBase):
    """A dependency that is a caller of one kind; the route's description names it as a security scheme.

    One dependency without others below it: the framework solves each of them anew for every request.
    """

    def __init__(self, name: str, description: str):
        self.scheme_name = name
        self.model = HTTPBearer(description=description)

    async def _of_kind(self, kind: type[Caller], token: str, request: Request) -> Caller:
        """The caller, if it is of this kind. Raises Refusal, which names the ``token`` that this call takes."""
        caller = await authenticate(request, request.app.state.registry, _bearer(request))
        if not isinstance(caller, kind):
            raise WrongRole(f"this call takes {token}")
        return caller


class _OperatorCaller(_Caller):
    """The operator that calls. Refuses operators with a lower role."""

    def __init__(self, role: OperatorRole, name: str, description: str):
        super().__init__(name, description)
        self._role = role

    async def __call__(self, request: Request, response: Response) -> OperatorCaller:
        caller = await self._of_kind(OperatorCaller, "the operator token", request)
        if LEVELS[caller.role] < LEVELS[self._role]:
            raise WrongRole(f"this call takes the role {self._role}; {caller.name} has the role {caller.role}")
        audit.actor.set(audit.Actor(caller.name, caller.role, address_of(request)))
        response.headers[ROLE] = caller.role
        expect_known_query(request)
        return caller


IsViewer = Annotated[OperatorCaller, Depends(_OperatorCaller("viewer", "viewer", "an operator's, with any role"))]
IsOperator = Annotated[
    OperatorCaller, Depends(_OperatorCaller("operator", "operator", "an operator's, with the role operator or admin"))
]
IsAdmin = Annotated[
    OperatorCaller, Depends(_OperatorCaller("admin", "admin", "an admin's; the first is made at the first start"))
]


async def _viewed(registry: RegistryOf, federation: FederationId, _: IsViewer) -> Federation:
    return registry.find(federation)


async def _informed(registry: RegistryOf, federation: FederationId, caller: IsViewer) -> Federation:
    """The federation, for routes that tell who takes part in which round; refuses viewers if that is secret."""
    informed = registry.find(federation)
    if informed.spec.participation.is_secret and not is_operator(caller):
        text = f"{informed.name} samples its clients in secret, and this tells who took part"
        raise WrongRole(f"{text}: it takes the role operator; {caller.name} has the role {caller.role}")
    return informed


def is_operator(caller: OperatorCaller) -> bool:
    """Whether the caller is more than a viewer: it may sign, and learn who takes part even if that is secret."""
    return LEVELS[caller.role] >= LEVELS["operator"]


async def _operated(registry: RegistryOf, federation: FederationId, _: IsOperator) -> Federation:
    return registry.find(federation)


async def _operated_any(registry: RegistryOf, federation: FederationId, _: IsOperator) -> Federation:
    return registry.find_any(federation)


@dataclass(frozen=True)
class Enrolling:
    """Whoever has a token of enrolment: the token's federation, and its digest."""

    federation: Federation
    token: str


class _EnrollingCaller(_Caller):
    async def __call__(self, request: Request, federation: FederationId) -> Enrolling:
        caller = await self._of_kind(EnrollingCaller, "an enrolment token", request)
        found = _of_caller(request.app.state.registry, federation, caller.federation)
        token = found.tokens.get(caller.token)
        if token is not None:
            audit.actor.set(audit.Actor(token.name, "enrolment", address_of(request)))
        expect_known_query(request)
        return Enrolling(found, caller.token)


def _bearer(request: Request) -> str | None:
    scheme, token = get_authorization_scheme_param(request.headers.get("authorization"))
    return token if scheme.lower() == "bearer" and token else None


@dataclass(frozen=True)
class CallingClient:
    """The client that calls, and its federation at the moment of the call."""

    federation: Federation
    client: Client


class _ClientCaller(_Caller):
    async def __call__(self, request: Request, federation: FederationId) -> CallingClient:
        caller = await self._of_kind(ClientCaller, "the secret that the client enrolled with", request)
        registry = request.app.state.registry
        found = _of_caller(registry, federation, caller.federation)
        request.state.client = (found.id, caller.client.name)
        registry.last_seen.seen(caller.client.id)
        if not caller.active:
            raise Withdrawn("the operator has withdrawn this client from the federation")
        expect_known_query(request)
        return CallingClient(found, caller.client)


def _of_caller(registry: Registry, name: str, id: str) -> Federation:
    federation = registry.find_any(id)
    if name not in (federation.id, federation.name):
        raise NotFound(f"there is no federation {name[:100]!r} here: check its name")
    if federation.absent is not None:
        # Why, which may hold a package's own error with this machine's paths, is for the operator.
        raise MethodAbsent(f"{federation.name} cannot go on at this coordinator now: ask its operator")
    return federation


Viewed = Annotated[Federation, Depends(_viewed)]
Informed = Annotated[Federation, Depends(_informed)]
"""The federation for viewers; if participation is secret, only for operators."""
Operated = Annotated[Federation, Depends(_operated)]
OperatedAny = Annotated[Federation, Depends(_operated_any)]
"""The federation for operators, also if its method is absent."""
EnrollingBy = Annotated[Enrolling, Depends(_EnrollingCaller("enrolment", "minted by the operator"))]
Calling = Annotated[CallingClient, Depends(_ClientCaller("client", "the secret the client enrolled with"))]
