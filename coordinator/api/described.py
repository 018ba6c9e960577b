"""How a route describes in OpenAPI with what it refuses."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from promptfed.coordinator.problems import (
    MEDIA_TYPE,
    BodyTooLarge,
    FederationMoving,
    HeldElsewhere,
    InternalError,
    InvalidRequest,
    IssuerAway,
    MethodAbsent,
    NotFound,
    OtherCertificate,
    Refusal,
    StorageDamaged,
    StoreAway,
    TokenExpired,
    TooManyFailures,
    Unauthorized,
    Unreadable,
    UnreadableBody,
    UploadTimeout,
    WrongRole,
)

ANY_REQUEST: tuple[type[Refusal], ...] = (InvalidRequest, UnreadableBody, UploadTimeout, BodyTooLarge, InternalError)
ANY_CALLER: tuple[type[Refusal], ...] = (
    Unauthorized,
    TokenExpired,
    TooManyFailures,
    WrongRole,
    OtherCertificate,
    NotFound,
    StoreAway,
    FederationMoving,
    HeldElsewhere,
    StorageDamaged,
    IssuerAway,
    MethodAbsent,
    Unreadable,
)


def for_callers(*kinds: type[Refusal]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for a route that asks for a token, and refuses with ``kinds``."""
    return documented(*ANY_CALLER, *kinds)


def documented(*kinds: type[Refusal]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for a route that refuses with ``kinds``, besides those of any request."""
    texts: dict[int, dict[str, None]] = defaultdict(dict)  # as an ordered set
    for kind in (*kinds, *ANY_REQUEST):
        texts[kind.status][f"`{kind.kind}`: {kind.title}"] = None
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": "; ".join(kinds_), "content": content} for status, kinds_ in sorted(texts.items())}
