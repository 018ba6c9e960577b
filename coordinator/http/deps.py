"""Dependencies of the routes: the registry, the caller, and the federation; what the description says of refusals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Path, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.models import HTTPBearer
from fastapi.routing import APIRoute
from fastapi.security.base import SecurityBase
from fastapi.security.utils import get_authorization_scheme_param
from pydantic import BaseModel

from promptfed.coordinator import problems
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine import audit
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http.callers import ClientCaller, EnrollingCaller, OperatorCaller, address_of, authenticate
from promptfed.coordinator.problems import MEDIA_TYPE, MethodAbsent, NotFound, Refusal, Withdrawn, WrongRole
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.signing import Signer
from promptfed.shared.api.api_schemas import LEVELS, OperatorRole

Known = TypeVar("Known", OperatorCaller, EnrollingCaller, ClientCaller)
_QUERIES: dict[Callable[..., Any], frozenset[str]] = {}  # the keys of queries, by what answers a route
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
ANY_REQUEST: tuple[type[Refusal], ...] = (
    problems.InvalidRequest,
    problems.UnreadableBody,
    problems.DigestMismatch,
    problems.UploadTimeout,
    problems.BodyTooLarge,
    problems.InternalError,
    problems.Waiting,
)
ANY_CALLER: tuple[type[Refusal], ...] = (
    problems.ProtocolVersion,
    problems.Unauthorized,
    problems.TokenExpired,
    problems.TooManyFailures,
    problems.WrongRole,
    problems.OtherCertificate,
    problems.NotFound,
    problems.StoreAway,
    problems.StorageDamaged,
    problems.MethodAbsent,
)


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

    async def _of_kind(self, kind: type[Known], wanted: str, request: Request) -> Known:
        """The caller, if it is of this kind. Raises Refusal, which names the ``wanted`` token."""
        caller = await authenticate(request, request.app.state.registry, _bearer(request))
        if not isinstance(caller, kind):
            raise WrongRole(f"this call takes {wanted}")
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
        _expect_known_query(request)
        return caller


def _expect_known_query(request: Request) -> None:
    """Refuse a known caller's query with a key that the route does not declare, which it would ignore."""
    if request.scope["query_string"]:
        unknown = set(request.query_params) - _queries_of(request.scope["route"])
        if unknown:
            errors = [{"type": "extra_forbidden", "loc": ("query", key), "msg": ""} for key in sorted(unknown)]
            raise RequestValidationError(errors)


def _queries_of(route: APIRoute) -> frozenset[str]:
    """The keys of all query parameters of a route."""
    known = _QUERIES.get(route.endpoint)
    if known is None:
        known = _QUERIES[route.endpoint] = frozenset(_queries(route.dependant))
    return known


def _queries(dependant: Dependant) -> Iterator[str]:
    """Query parameters of a route or dependency and of those below it; those of a model are its fields."""
    for parameter in dependant.query_params:
        kind = parameter.field_info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from (field.alias or name for name, field in kind.model_fields.items())
        else:
            yield parameter.alias
    for inner in dependant.dependencies:
        yield from _queries(inner)


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
    if informed.spec.participation.is_secret and not knows_who_takes_part(caller):
        text = f"{informed.name} samples its clients in secret, and this tells who took part"
        raise WrongRole(f"{text}: it takes the role operator; {caller.name} has the role {caller.role}")
    return informed


def knows_who_takes_part(caller: OperatorCaller) -> bool:
    """Whether an operator with this role may learn who takes part, even if that is secret."""
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
        own = _own(request.app.state.registry, federation, caller.federation)
        known = own.tokens.get(caller.token)
        if known is not None:
            audit.actor.set(audit.Actor(known.name, "enrolment", address_of(request)))
        _expect_known_query(request)
        return Enrolling(own, caller.token)


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
        own = _own(registry, federation, caller.federation)
        request.state.client = (own.id, caller.client.name)
        registry.last_seen.seen(caller.client.id)
        if not caller.active:
            raise Withdrawn("the operator has withdrawn this client from the federation")
        _expect_known_query(request)
        return CallingClient(own, caller.client)


def _own(registry: Registry, asked: str, own_id: str) -> Federation:
    federation = registry.find_any(own_id)
    if asked not in (federation.id, federation.name):
        raise NotFound(f"there is no federation {asked[:100]!r} here: check its name")
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


def for_callers(*kinds: type[Refusal]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for a route that asks for a token, and refuses with ``kinds``."""
    return documented(*ANY_CALLER, *kinds)


def for_clients(*kinds: type[Refusal]) -> dict[int | str, dict[str, Any]]:
    """The same for a route that only clients may call."""
    return for_callers(problems.Withdrawn, *kinds)


def documented(*kinds: type[Refusal]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for a route that refuses with ``kinds``, besides those of any request."""
    texts: dict[int, dict[str, None]] = defaultdict(dict)  # as an ordered set
    for kind in (*kinds, *ANY_REQUEST):
        texts[kind.status][f"`{kind.kind}`: {kind.title}"] = None
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": "; ".join(kinds_), "content": content} for status, kinds_ in sorted(texts.items())}


def body(media_type: str, schema: dict[str, Any], description: str | None = None) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that reads its required body itself."""
    told = {} if description is None else {"description": description}
    return {"requestBody": {"required": True, **told, "content": {media_type: {"schema": schema}}}}
