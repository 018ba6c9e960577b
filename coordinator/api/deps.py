"""What routes ask for in their signatures: the engine, who is calling, and which federation it is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import HTTPConnection

from promptfed.coordinator.domain.federation import Client, Live
from promptfed.coordinator.engine.registry import Engine
from promptfed.coordinator.http.auth_throttle import Guessing
from promptfed.coordinator.http.tokens import Caller, ClientCaller, Enrolling, Operator, digest, identify
from promptfed.coordinator.problems import NotFound, StoreAway, Unauthorized, Withdrawn, WrongRole
from promptfed.coordinator.settings import Settings


# Asynchronous although they wait for nothing: the others would each be sent to a thread.
async def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


async def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


EngineOf = Annotated[Engine, Depends(_engine)]
SettingsOf = Annotated[Settings, Depends(_settings)]

_operator_scheme = HTTPBearer(
    scheme_name="operator", auto_error=False, description="made at the first start, in the data folder"
)
_enrolment_scheme = HTTPBearer(scheme_name="enrolment", auto_error=False, description="minted by the operator")
_client_scheme = HTTPBearer(scheme_name="client", auto_error=False, description="the secret the client enrolled with")

NO_NUL = r"^[^\x00]*$"  # PostgreSQL's text holds none, and may not be asked for any

FederationId = Annotated[str, Path(description="id or name of the federation", max_length=100)]
ClientId = Annotated[str, Path(description="id or name of the client", max_length=100)]
TaskId = Annotated[str, Path(max_length=100, pattern=NO_NUL)]
Limit = Annotated[int, Query(ge=1, le=1000, description="at most so many")]
After = Annotated[str | None, Query(max_length=100, pattern=NO_NUL, description="`next` of the page before")]


def look_up(connection: HTTPConnection, engine: Engine, token: str) -> Caller:
    """Who calls with ``token``; nothing is counted. Raises StoreAway, TooManyFailures, Unauthorized, TokenExpired."""
    if engine.away:
        raise StoreAway
    state, found = connection.app.state, digest(token)
    wanted = connection.path_params.get("federation")
    # The asked-for federation first: a site may use one secret with several federations.
    lives = sorted(engine.lives.values(), key=lambda live: wanted not in (live.id, live.name))
    guessing: Guessing = state.guessing
    guessing.check(_address(connection), found)
    return identify(found, state.operator_digest, lives)


def _identify(request: Request, engine: Engine, credentials: HTTPAuthorizationCredentials | None) -> Caller:
    if engine.away:
        raise StoreAway
    if credentials is None:
        raise Unauthorized("send the token as `Authorization: Bearer <token>`")
    guessing: Guessing = request.app.state.guessing
    try:
        caller = look_up(request, engine, credentials.credentials)
    except Unauthorized:
        guessing.failed(_address(request))
        raise
    guessing.succeeded(_address(request), digest(credentials.credentials))
    return caller


def _address(connection: HTTPConnection) -> str:
    return connection.client.host if connection.client is not None else "no address"


async def _operator(
    request: Request,
    engine: EngineOf,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_operator_scheme)],
) -> Operator:
    caller = _identify(request, engine, credentials)
    if not isinstance(caller, Operator):
        raise WrongRole("this call takes the operator token")
    return caller


IsOperator = Annotated[Operator, Depends(_operator)]


async def _operated(engine: EngineOf, federation: FederationId, _: IsOperator) -> Live:
    return engine.find(federation)


async def _enrolling(
    request: Request,
    engine: EngineOf,
    federation: FederationId,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_enrolment_scheme)],
) -> Live:
    caller = _identify(request, engine, credentials)
    if not isinstance(caller, Enrolling):
        raise WrongRole("this call takes an enrolment token")
    return _own(engine, federation, caller.federation)


@dataclass(frozen=True)
class CallingClient:
    """The client that calls, and its federation at the moment of the call."""

    live: Live
    client: Client


async def _client(
    request: Request,
    engine: EngineOf,
    federation: FederationId,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_client_scheme)],
) -> CallingClient:
    caller = _identify(request, engine, credentials)
    if not isinstance(caller, ClientCaller):
        raise WrongRole("this call takes the secret that the client enrolled with")
    live = _own(engine, federation, caller.federation)
    request.state.client = (live.id, caller.client.name)
    engine.activity.seen(caller.client.id)
    if not caller.active:
        raise Withdrawn("the operator has withdrawn this client from the federation")
    return CallingClient(live, caller.client)


def _own(engine: Engine, asked: str, own: str) -> Live:
    live = engine.live(own)
    if asked not in (live.id, live.name):
        raise NotFound(f"there is no federation {asked[:100]!r}")
    return live


Operated = Annotated[Live, Depends(_operated)]
EnrollingAt = Annotated[Live, Depends(_enrolling)]
Calling = Annotated[CallingClient, Depends(_client)]
