"""Dependencies of the routes: the registry, the caller, and the federation. And plain routes.

Plain routes are calls of every round, which read the request themselves. The framework describes them like all others,
but `app.Application` calls them itself: solving a declared route's dependencies costs several times what an answer of
theirs does.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from email.message import Message as Header
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Path, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from promptfed.coordinator import problems
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.engine import audit
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http.bodies import JsonBody
from promptfed.coordinator.http.callers import ClientCaller, EnrollingCaller, OperatorCaller, address_of, authenticate
from promptfed.coordinator.problems import MEDIA_TYPE, MethodAbsent, NotFound, Refusal, Withdrawn, WrongRole
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.fault_points import point
from promptfed.coordinator.store.opening import Signer
from promptfed.shared.api.api_schemas import LEVELS, OperatorRole

Endpoint = Callable[[Request], Awaitable[Response]]
Model = TypeVar("Model", bound=BaseModel)

ROUTES: dict[tuple[str, str], APIRoute] = {}
"""By verb and the last part of the path, which no two of them share."""
FEDERATION = "/v1/federations/{federation}"
ROLE = "Promptfed-Role"
"""The header by which a page knows what its operator may do."""


def endpoint_of(scope: Scope) -> Endpoint | None:
    """What answers this request; ``scope`` gets its path's parameters."""
    path = scope["path"]
    route = ROUTES.get((scope["method"], path.rpartition("/")[2]))
    match = route.path_regex.match(path) if route is not None else None
    if route is None or match is None:
        return None
    scope.update(path_params=match.groupdict(), route=route, endpoint=route.endpoint)
    return route.endpoint


def plain(
    verb: str, path: str, tag: str, parameters: Callable[..., None], **described: Any
) -> Callable[[Endpoint], Endpoint]:
    """Answer this call of a federation by the decorated function; ``parameters`` describes what it reads."""

    def routed(endpoint: Endpoint) -> Endpoint:
        depends = [Depends(parameters)]
        ROUTES[verb, path.rpartition("/")[2]] = APIRoute(
            FEDERATION + path,
            endpoint,
            methods=[verb],
            tags=[tag],
            dependencies=depends,
            operation_id=endpoint.__name__,
            **described,
        )
        return endpoint

    return routed


def checked(kind: type[Model], given: Any, where: str) -> Model:
    """``given`` as a model. Raises RequestValidationError, as of a declared parameter in this place."""
    try:
        return kind.model_validate(given, from_attributes=True)
    except ValidationError as error:
        raise RequestValidationError([{**one, "loc": (where, *one["loc"])} for one in error.errors()]) from None


async def json_body(request: Request, kind: type[Model]) -> Model:
    """The body of a known caller as a model. Raises RequestValidationError and HTTPException."""
    seconds = request.app.state.settings.upload_timeout_seconds
    limited = JsonBody(request.scope, request.receive, seconds, known=True)
    try:
        body = await Request(request.scope, limited).body()
    except ClientDisconnect:
        raise HTTPException(400, "There was an error parsing the body") from None
    if not body:
        raise RequestValidationError([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    if not _is_json(request.headers):
        return checked(kind, body, "body")
    try:
        given = json.loads(body)
    except json.JSONDecodeError as error:
        told = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise RequestValidationError([{**told, "ctx": {"error": error.msg}}]) from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "There was an error parsing the body") from None
    return checked(kind, given, "body")


def _is_json(headers: Mapping[str, str]) -> bool:
    told = headers.get("content-type", "")
    if told == "application/json":
        return True
    header = Header()
    header["content-type"] = told
    subtype = header.get_content_subtype()
    return bool(told) and header.get_content_maintype() == "application" and f"+{subtype}".endswith("+json")


class Receipt(Response):
    """201 for what is new, 200 for what is there already."""

    media_type = "application/json"

    def __init__(self, receipt: str, new: bool):
        super().__init__(receipt, 201 if new else 200)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await super().__call__(scope, receive, send)
        point("answer-sent")


# Asynchronous although they wait for nothing: the others would each be sent to a thread.
def of_app(name: str) -> Callable[..., Awaitable[Any]]:
    """A dependency: an attribute of the application's state."""

    async def attribute(request: Request) -> Any:
        return getattr(request.app.state, name)

    return attribute


SignerOf = Annotated[Signer, Depends(of_app("signer"))]
RegistryOf = Annotated[Registry, Depends(of_app("registry"))]
SettingsOf = Annotated[Settings, Depends(of_app("settings"))]

_viewer_scheme = HTTPBearer(scheme_name="viewer", auto_error=False, description="an operator's, with any role")
_operator_scheme = HTTPBearer(
    scheme_name="operator", auto_error=False, description="an operator's, with the role operator or admin"
)
_admin_scheme = HTTPBearer(
    scheme_name="admin", auto_error=False, description="an admin's; the first is made at the first start"
)
_enrolment_scheme = HTTPBearer(scheme_name="enrolment", auto_error=False, description="minted by the operator")
_client_scheme = HTTPBearer(scheme_name="client", auto_error=False, description="the secret the client enrolled with")

NO_NUL = r"^[^\x00]*$"  # PostgreSQL's text holds none, and may not be asked for any

FederationId = Annotated[str, Path(description="id or name of the federation", max_length=100)]
ClientId = Annotated[str, Path(description="id or name of the client", max_length=100)]
OperatorId = Annotated[str, Path(description="an operator's name, or the id of a token", max_length=100)]
TokenId = Annotated[str, Path(description="id or name of the enrolment token", max_length=100)]
TaskId = Annotated[str, Path(max_length=100, pattern=NO_NUL)]
Limit = Annotated[int, Query(ge=1, le=1000, description="at most so many")]
After = Annotated[str | None, Query(max_length=100, pattern=NO_NUL, description="`next` of the page before")]


def _who_may(role: OperatorRole, scheme: HTTPBearer) -> Callable[..., Awaitable[OperatorCaller]]:
    """A dependency: the operator that calls. Refuses operators with a lower role."""

    async def operator(
        request: Request,
        response: Response,
        registry: RegistryOf,
        _: HTTPAuthorizationCredentials | None = Depends(scheme),
    ) -> OperatorCaller:
        caller = await authenticate(request, registry, _bearer(request))
        if not isinstance(caller, OperatorCaller):
            raise WrongRole("this call takes the operator token")
        if LEVELS[caller.role] < LEVELS[role]:
            raise WrongRole(f"this call takes the role {role}; {caller.name} has the role {caller.role}")
        audit.actor.set(audit.Actor(caller.name, caller.role, address_of(request)))
        response.headers[ROLE] = caller.role
        _expect_known_query(request)
        return caller

    return operator


def _expect_known_query(request: Request) -> None:
    """Refuse a known caller's query with a key that the declared route does not have, which it would ignore."""
    if request.scope["query_string"]:
        unknown = set(request.query_params).difference(_queries_of(request.scope["route"].dependant))
        if unknown:
            told = [{"type": "extra_forbidden", "loc": ("query", key), "msg": ""} for key in sorted(unknown)]
            raise RequestValidationError(told)


def _queries_of(dependant: Dependant) -> Iterator[str]:
    yield from (parameter.alias for parameter in dependant.query_params)
    for further in dependant.dependencies:
        yield from _queries_of(further)


IsViewer = Annotated[OperatorCaller, Depends(_who_may("viewer", _viewer_scheme))]
IsOperator = Annotated[OperatorCaller, Depends(_who_may("operator", _operator_scheme))]
IsAdmin = Annotated[OperatorCaller, Depends(_who_may("admin", _admin_scheme))]


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


async def _enrolling(
    request: Request,
    federation: FederationId,
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(_enrolment_scheme)],
) -> Federation:
    found = await enrolling(request)
    _expect_known_query(request)
    return found[0]


async def enrolling(request: Request) -> tuple[Federation, str]:
    """The federation of the enrolment token that was sent, and the token's digest."""
    asked, registry = _asked(request), request.app.state.registry
    caller = await authenticate(request, registry, _bearer(request))
    if not isinstance(caller, EnrollingCaller):
        raise WrongRole("this call takes an enrolment token")
    own = _own(registry, asked, caller.federation)
    known = own.tokens.get(caller.token)
    if known is not None:
        audit.actor.set(audit.Actor(known.name, "enrolment", address_of(request)))
    return own, caller.token


class _Asked(BaseModel):
    federation: Annotated[str, Field(max_length=100)]


def _asked(request: Request) -> str:
    return checked(_Asked, request.path_params, "path").federation


def _bearer(request: Request) -> str | None:
    scheme, token = get_authorization_scheme_param(request.headers.get("authorization"))
    return token if scheme.lower() == "bearer" and token else None


@dataclass(frozen=True)
class CallingClient:
    """The client that calls, and its federation at the moment of the call."""

    federation: Federation
    client: Client


async def _client(
    request: Request,
    federation: FederationId,
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(_client_scheme)],
) -> CallingClient:
    caller = await calling_client(request)
    _expect_known_query(request)
    return caller


async def calling_client(request: Request) -> CallingClient:
    """The client whose secret was sent, and its federation."""
    asked, registry = _asked(request), request.app.state.registry
    caller = await authenticate(request, registry, _bearer(request))
    if not isinstance(caller, ClientCaller):
        raise WrongRole("this call takes the secret that the client enrolled with")
    own = _own(registry, asked, caller.federation)
    request.state.client = (own.id, caller.client.name)
    registry.last_seen.seen(caller.client.id)
    if not caller.active:
        raise Withdrawn("the operator has withdrawn this client from the federation")
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
EnrollingAt = Annotated[Federation, Depends(_enrolling)]


Calling = Annotated[CallingClient, Depends(_client)]


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
