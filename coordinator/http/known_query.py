"""A query's keys have to be the route's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel

_QUERIES: dict[Callable[..., Any], frozenset[str]] = {}  # the keys of queries, by what answers a route


def expect_known_query(request: Request) -> None:
    """Refuse a known caller's query with a key that the route does not declare, which it would ignore."""
    if request.scope["query_string"]:
        unknown = set(request.query_params) - _queries_of(request.scope["route"])
        if unknown:
            errors = [{"type": "extra_forbidden", "loc": ("query", key), "msg": ""} for key in sorted(unknown)]
            raise RequestValidationError(errors)


def _queries_of(route: APIRoute) -> frozenset[str]:
    """The keys of all query parameters of a route."""
    keys = _QUERIES.get(route.endpoint)
    if keys is None:
        keys = _QUERIES[route.endpoint] = frozenset(_queries(route.dependant))
    return keys


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
