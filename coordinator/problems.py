"""Refusals: named classes with status, kind and title, answered as RFC 9457 problem details.

Those of tasks and updates stand in `promptfed.coordinator.task_problems`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

from fastapi.responses import JSONResponse

from promptfed.shared.messages import PROBLEM_BASE

MEDIA_TYPE = "application/problem+json"


class Refusal(Exception):
    """Base of all refusals. ``detail`` says in one sentence what is wrong and what to do."""

    status: ClassVar[int]
    kind: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, detail: str, *, headers: dict[str, str] | None = None, **members: Any):
        super().__init__(detail)
        self.detail = detail
        self.headers = headers or {}
        self.members = members

    def response(self, instance: str) -> JSONResponse:
        """The answer; ``instance`` is the path that was asked for."""
        content = {
            "type": PROBLEM_BASE + self.kind,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "instance": instance,
            **self.members,
        }
        return JSONResponse(content, self.status, self.headers, MEDIA_TYPE)


# Any request


class InvalidRequest(Refusal):
    """A path, query, header or body that is not what the schema says."""

    status, kind, title = 422, "invalid-request", "The request is not what the schema says"


class UnreadableBody(Refusal):
    """A JSON body that cannot be read at all."""

    status, kind, title = 400, "unreadable-body", "The body cannot be read"


class NotFound(Refusal):
    """Nothing lies at this address, or nothing that this caller may know of."""

    status, kind, title = 404, "not-found", "There is no such thing here"


class MethodNotAllowed(Refusal):
    """A verb that this address does not know."""

    status, kind, title = 405, "method-not-allowed", "This address does not know this verb"


class BodyTooLarge(Refusal):
    """A body over the limit."""

    status, kind, title = 413, "too-large", "The body is too large"


class UploadTimeout(Refusal):
    """A body that took too long to arrive."""

    status, kind, title = 408, "upload-timeout", "The body took too long to arrive"


class HttpError(Refusal):
    """Another refusal of the HTTP layer."""

    kind, title = "http-error", "The request was refused"

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status = status  # type: ignore[misc]


class InternalError(Refusal):
    """Something broke here."""

    status, kind, title = 500, "internal-error", "Something broke in the coordinator"


class StorageFull(Refusal):
    """The disk is full: nothing was stored."""

    status, kind, title = 507, "storage-full", "The coordinator's disk is full"


class StoreAway(Refusal):
    """The database does not answer: nothing was stored, or it was and sending it again will be told so."""

    status, kind, title = 503, "store-away", "The coordinator's database is away"

    def __init__(self) -> None:
        super().__init__("the coordinator's database is away: send it again later", headers={"Retry-After": "2"})


class MethodAbsent(Refusal):
    """A federation whose method comes from a package that is not installed here any more, or is broken."""

    status, kind, title = 503, "method-absent", "The coordinator does not have this federation's method"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, headers={"Retry-After": "60"})


class NotReady(Refusal):
    """The store or the engine does not work."""

    status, kind, title = 503, "not-ready", "The coordinator is not ready"


# Access


class Unauthorized(Refusal):
    """No bearer token, or one that nobody has."""

    status, kind, title = 401, "unauthorized", "A valid bearer token is needed"

    def __init__(self, detail: str):
        super().__init__(detail, headers={"WWW-Authenticate": "Bearer"})


class TokenExpired(Unauthorized):
    """An enrolment token after its time."""

    kind, title = "token-expired", "This enrolment token has expired"


class TooManyFailures(Refusal):
    """Too many wrong tokens came from one address: no token of its is looked at for a while."""

    status, kind, title = 429, "too-many-failures", "Too many wrong tokens came from this address"

    def __init__(self, detail: str, seconds: int):
        super().__init__(detail, headers={"Retry-After": str(seconds)})


class WrongRole(Refusal):
    """A token of another kind than this call takes."""

    status, kind, title = 403, "wrong-role", "This token is not for this call"


class Withdrawn(Refusal):
    """A client that the operator has withdrawn."""

    status, kind, title = 403, "withdrawn", "This client has been withdrawn"


# Federations


class InvalidSpec(Refusal):
    """A spec that cannot be run; ``errors`` has the path of each offence."""

    status, kind, title = 422, "invalid-spec", "The spec cannot be run"


class NameTaken(Refusal):
    """The name belongs to another federation, or to a client with another secret."""

    status, kind, title = 409, "name-taken", "The name is taken"


class KeyReused(Refusal):
    """An Idempotency-Key that came with another body before."""

    status, kind, title = 422, "idempotency-key-reused", "This Idempotency-Key came with another body before"


class WrongState(Refusal):
    """A call at the wrong moment; ``state`` is the federation's."""

    status, kind, title = 409, "wrong-state", "The federation is not in a state for this"


class NotEnoughClients(Refusal):
    """A start with too few trainers; ``enrolled`` of ``needed``."""

    status, kind, title = 409, "not-enough-clients", "Too few trainers are enrolled"


class InitialStateMissing(Refusal):
    """The method's initial state takes a backbone."""

    status, kind, title = 409, "initial-state-missing", "The initial state has to be supplied"


class InitialStateMismatch(Refusal):
    """The supplied initial state is not what the method and the clients' backbone need."""

    status, kind, title = 409, "initial-state-mismatch", "The supplied initial state does not fit"


class CannotStart(Refusal):
    """The method cannot run with this backbone and these clients."""

    status, kind, title = 409, "cannot-start", "The method cannot run with this backbone and these clients"


class NotAGenerator(Refusal):
    """Prompts asked of a method that generates none."""

    status, kind, title = 409, "not-a-generator", "This method has no prompt generator"


class NoState(Refusal):
    """No state of this round is there (any more)."""

    status, kind, title = 404, "no-state", "There is no state of this round"


class UpdatesGone(Refusal):
    """A replay of a round whose tensors were removed."""

    status, kind, title = 410, "updates-gone", "The round's tensors are no longer kept"


class NotAMean(Refusal):
    """Another rule asked of a method whose aggregate is not a mean."""

    status, kind, title = 409, "not-a-mean", "This method's aggregate is not a mean"


class TooFewUpdates(Refusal):
    """A replay that leaves nothing, or too little for its rule, to aggregate."""

    status, kind, title = 409, "too-few-updates", "Too few updates are left to aggregate"


class NotAcceptable(Refusal):
    """No form of the answer is among those accepted, or JSON would be too large."""

    status, kind, title = 406, "not-acceptable", "The answer cannot be given in this form"


# Enrolment


class ProtocolVersion(Refusal):
    """A client that speaks another version."""

    status, kind, title = 409, "protocol-version", "The client speaks another version of the protocol"


class OtherBackbone(Refusal):
    """A client whose backbone is not the federation's."""

    status, kind, title = 409, "other-backbone", "The client's backbone is not the federation's"


class SecretTaken(Refusal):
    """A secret that another client of the federation has."""

    status, kind, title = 409, "secret-taken", "Another client has this secret"


class LateJoin(Refusal):
    """A newcomer to a running federation whose method does not take any."""

    status, kind, title = 409, "late-join", "This method takes no newcomers after the start"


class UnknownClass(Refusal):
    """A client that names classes which the federation does not have."""

    status, kind, title = 422, "unknown-class", "The federation does not have these classes"


class DomainMissing(Refusal):
    """A client without a domain where the method needs its description."""

    status, kind, title = 422, "domain-missing", "This method needs each client's domain"


class UnfitClient(Refusal):
    """A client that the method cannot take beside the others, or back with what it says now."""

    status, kind, title = 409, "unfit-client", "The method cannot take this client beside the others"


class NoSamples(Refusal):
    """A trainer without a training sample."""

    status, kind, title = 422, "no-samples", "A trainer needs at least one sample"


ANY_REQUEST: tuple[type[Refusal], ...] = (
    InvalidRequest,
    UnreadableBody,
    UploadTimeout,
    BodyTooLarge,
    InternalError,
)
ANY_CALLER: tuple[type[Refusal], ...] = (
    Unauthorized,
    TokenExpired,
    TooManyFailures,
    WrongRole,
    NotFound,
    StoreAway,
    MethodAbsent,
)


def documented(*kinds: type[Refusal]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for a route that refuses with ``kinds``, besides those of any request."""
    by_status: dict[int, list[type[Refusal]]] = defaultdict(list)
    for kind in (*kinds, *ANY_REQUEST):
        by_status[kind.status].append(kind)
    return {
        status: {
            "description": "; ".join(dict.fromkeys(f"`{kind.kind}`: {kind.title}" for kind in found)),
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status, found in sorted(by_status.items())
    }
