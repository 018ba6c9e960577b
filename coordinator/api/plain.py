"""Plain routes: calls of every round, which read the request themselves.

The framework describes them like all others, but `app.Application` calls them itself: solving a declared route's
dependencies costs several times what an answer of theirs does.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from email.message import Message as Header
from typing import Any, TypeVar

from fastapi import Depends
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from promptfed.coordinator.http.bodies import JsonBody
from promptfed.coordinator.store.fault_points import point

Endpoint = Callable[[Request], Awaitable[Response]]
Model = TypeVar("Model", bound=BaseModel)

ROUTES: dict[tuple[str, str], APIRoute] = {}
"""By verb and the last part of the path, which no two of them share."""
FEDERATION = "/v1/federations/{federation}"


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
            FEDERATION + path, endpoint, methods=[verb], tags=[tag], dependencies=depends, **described
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

    def __init__(self, receipt: BaseModel, new: bool):
        super().__init__(receipt.model_dump_json(), 201 if new else 200)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await super().__call__(scope, receive, send)
        point("answer-sent")
