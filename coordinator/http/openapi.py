"""What the description of the API says of refusals and bodies."""

from __future__ import annotations

from collections import defaultdict
from enum import Enum
from operator import attrgetter
from typing import Any

from fastapi import APIRouter

from promptfed.coordinator import problems
from promptfed.coordinator.problems import MEDIA_TYPE, Refusal

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


def router(prefix: str = "", tags: list[Enum | str] | None = None) -> APIRouter:
    """A router whose operations have the names of their routes, as generated clients call them."""
    return APIRouter(prefix=prefix, tags=tags, generate_unique_id_function=attrgetter("name"))


def for_callers(*kinds: type[Refusal]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for a route that asks for a token, and refuses with ``kinds``."""
    return documented(*ANY_CALLER, *kinds)


def for_clients(*kinds: type[Refusal]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for a route that only clients may call, and that refuses with ``kinds``."""
    return for_callers(problems.Withdrawn, problems.TooManyUploads, *kinds)


def documented(*kinds: type[Refusal]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for a route that refuses with ``kinds``, besides those of any request."""
    texts: dict[int, dict[str, None]] = defaultdict(dict)  # as an ordered set
    for kind in (*kinds, *ANY_REQUEST):
        texts[kind.status][f"`{kind.kind}`: {kind.title}"] = None
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": "; ".join(kinds_), "content": content} for status, kinds_ in sorted(texts.items())}


def body(media_type: str, schema: dict[str, Any], description: str | None = None) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that reads its required body itself."""
    extra = {} if description is None else {"description": description}
    return {"requestBody": {"required": True, **extra, "content": {media_type: {"schema": schema}}}}
