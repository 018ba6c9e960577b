"""Refusals: named classes with status, kind, title and a sentence, answered as RFC 9457 problem details."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from fastapi.responses import JSONResponse

from promptfed.shared.messages import PROBLEM_BASE
from promptfed.shared.service.reasons import first_error as first_error

MEDIA_TYPE = "application/problem+json"


class Refusal(Exception):
    """Base of all refusals. ``detail`` says in one sentence what is wrong and what to do."""

    status: ClassVar[int]
    kind: ClassVar[str]
    title: ClassVar[str]
    retry_after: ClassVar[int | None] = None

    def __init_subclass__(
        cls, *, title: str, kind: str | None = None, status: int | None = None, retry_after: int | None = None
    ) -> None:
        """Declare a refusal.

        kind: the class's name in lower case with hyphens unless given. status: that of the base class, or of each
        instance, unless given. retry_after: seconds.
        """
        super().__init_subclass__()
        cls.kind = kind or re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()
        cls.title = title
        if retry_after is not None:
            cls.retry_after = retry_after
        if status is not None:
            cls.status = status

    def __init__(self, detail: str, *, headers: dict[str, str] | None = None, **members: Any):
        super().__init__(detail)
        self.detail = detail
        self.headers = headers or {}
        if self.retry_after is not None:
            self.headers.setdefault("Retry-After", str(self.retry_after))
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


class InvalidRequest(Refusal, status=422, title="The request is not what the schema says"):
    """A path, query, header or body that is not what the schema says."""


class UnreadableBody(Refusal, status=400, title="The body cannot be read"):
    """A JSON body that cannot be read at all."""


class NotFound(Refusal, status=404, title="There is no such thing here"):
    """Nothing lies at this address, or nothing that this caller may know of."""


class MethodNotAllowed(Refusal, status=405, title="This address does not know this verb"):
    """A verb that this address does not know."""


class BodyTooLarge(Refusal, status=413, kind="too-large", title="The body is too large"):
    """A body over the limit."""


class UploadTimeout(Refusal, status=408, title="The body took too long to arrive"):
    """A body that took too long to arrive."""


class HttpError(Refusal, title="The request was refused"):
    """Another refusal of the HTTP layer."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status = status  # type: ignore[misc]


class InternalError(Refusal, status=500, title="Something broke in the coordinator"):
    """Something broke here."""


class StorageFull(Refusal, status=507, title="The coordinator's disk is full"):
    """The disk is full: nothing was stored."""


class StorageDamaged(Refusal, status=503, title="What was stored is damaged", retry_after=2):
    """Stored bytes that are not what they were: they are not given out. Made or sent again, they are."""


class StoreAway(Refusal, status=503, title="The coordinator's database is away", retry_after=2):
    """The database does not answer: nothing was stored, or it was and sending it again will be told so."""

    def __init__(self) -> None:
        super().__init__("the coordinator's database is away: send it again later")


class ObjectsAway(
    Refusal, status=503, kind="store-away", title="The coordinator's object store is away", retry_after=2
):
    """The object store does not answer: nothing was stored."""


class Waiting(Refusal, status=503, title="This coordinator waits", retry_after=1):
    """Another one of several coordinators works: nothing was stored here. Ask the other addresses, or again."""

    def __init__(self) -> None:
        text = "of several coordinators another one works, and this one waits: ask that one, or send it again"
        super().__init__(text, headers={"Connection": "close"})


class MethodAbsent(Refusal, status=503, title="The coordinator cannot go on with this federation", retry_after=60):
    """A federation whose method is not installed here any more, or whose stored spec or rows cannot be read."""


class NotReady(Refusal, status=503, title="The coordinator is not ready"):
    """The store does not work, or the federations are not taken up yet."""


class Unauthorized(Refusal, status=401, title="A valid bearer token is needed"):
    """No bearer token, or one that nobody has."""

    def __init__(self, detail: str):
        super().__init__(detail, headers={"WWW-Authenticate": "Bearer"})


class TokenExpired(Unauthorized, title="This token has expired"):
    """An enrolment token, or an operator's, after its time."""


class TooManyFailures(Refusal, status=429, title="Too many wrong tokens came from this address"):
    """Too many wrong tokens came from one address: no token of its is looked at for a while."""

    def __init__(self, detail: str, seconds: int):
        super().__init__(detail, headers={"Retry-After": str(seconds)})


class WrongRole(Refusal, status=403, title="This token is not for this call"):
    """A token of another kind than this call takes."""


class OtherCertificate(Refusal, status=403, title="This client's certificate is needed"):
    """A client without a certificate in its name, where clients are asked for one."""


class Withdrawn(Refusal, status=403, title="This client has been withdrawn"):
    """A client that the operator has withdrawn."""


class InvalidSpec(Refusal, status=422, title="The spec cannot be run"):
    """A spec that cannot be run; ``errors`` has the path of each offence."""


class NameTaken(Refusal, status=409, title="The name is taken"):
    """The name belongs to another federation, or to a client with another secret."""


class KeyReused(
    Refusal, status=422, kind="idempotency-key-reused", title="This Idempotency-Key came with another body before"
):
    """An Idempotency-Key that came with another body before."""


class WrongState(Refusal, status=409, title="The federation is not in a state for this"):
    """A call at the wrong moment; ``state`` is the federation's."""


class NotEnoughClients(Refusal, status=409, title="Too few trainers are enrolled"):
    """A start with too few trainers; ``enrolled`` of ``needed``."""


class InitialStateMissing(Refusal, status=409, title="The initial state has to be supplied"):
    """The method's initial state takes a backbone."""


class InitialStateMismatch(Refusal, status=409, title="The supplied initial state does not fit"):
    """The supplied initial state is not what the method and the clients' backbone need."""


class OtherClasses(Refusal, status=409, title="Trainers have different class names"):
    """Trainers who have other class names than each other, where neither the spec nor the method allows it."""


class CannotStart(Refusal, status=409, title="The method cannot run with this backbone and these clients"):
    """The method cannot run with this backbone and these clients."""


class NoState(Refusal, status=404, title="There is no state of this round"):
    """No state of this round is there (any more)."""


class UpdatesGone(Refusal, status=410, title="The round's tensors are no longer kept"):
    """A replay of a round whose tensors were removed."""


class ExportDiffers(Refusal, status=409, title="The card is not what the coordinator knows"):
    """An export's card that says something else than the coordinator's store; ``errors`` has each place."""


class UpdatesMasked(Refusal, status=409, title="Only the sum of the updates is known"):
    """Something that needs a single update, of a federation with secure sums."""


class ProtocolVersion(Refusal, status=409, title="The client speaks another version of the protocol"):
    """A client that speaks another version."""


class OtherBackbone(Refusal, status=409, title="The client's backbone is not the federation's"):
    """A client whose backbone is not the federation's."""


class SecretTaken(Refusal, status=409, title="Another client has this secret"):
    """A secret that another client of the federation has."""


class TokenUsedUp(Refusal, status=409, title="Nobody new can enrol with this token"):
    """An enrolment token with which as many clients have enrolled as it was minted for, or one that was closed."""


class OtherToken(Refusal, status=409, title="This enrolment token is for somebody else"):
    """An enrolment token for another role, or for the one name that was reset."""


class Starting(Refusal, status=503, title="The federation is just being started", retry_after=1):
    """A newcomer while the initial state is made for the clients that there are."""


class TooManyClassNames(Refusal, status=422, title="The federation's class names would be too much text"):
    """Class names that would, with those of the other clients, be more text than a federation takes."""


class UnknownClass(Refusal, status=422, title="The federation does not have these classes"):
    """A client that names classes which the federation does not have."""


class DomainMissing(Refusal, status=422, title="This method needs each client's domain"):
    """A client without a domain where the method needs its description."""


class UnfitClient(Refusal, status=409, title="The method cannot take this client beside the others"):
    """A client that the method cannot take beside the others, or back with what it says now."""


class NoSamples(Refusal, status=422, title="A trainer needs at least one sample"):
    """A trainer without a training sample."""


class Ended(Refusal, status=410, kind="federation-ended", title="The federation has ended"):
    """The federation has ended: there will be no more tasks."""


class WrongTaskKind(Refusal, status=409, title="This task wants another kind of answer"):
    """An update for an evaluation task, or the other way round."""


class PayloadGone(Refusal, status=410, title="The payload is no longer kept"):
    """The payload of a task that is long over was removed."""


class DigestMissing(Refusal, status=400, title="A Content-Digest with sha-256 is needed"):
    """An update without a SHA-256 Content-Digest."""


class DigestMismatch(Refusal, status=400, title="The body does not have the announced digest"):
    """A body that is not what its Content-Digest says."""


class IncompleteBody(Refusal, status=400, title="The body was cut off"):
    """A body that was cut off."""


class TooManyUploads(Refusal, status=503, title="Too many uploads are under way", retry_after=2):
    """As many uploads as are allowed are under way."""


class AlreadyAnswered(Refusal, status=409, title="This task was already answered with something else"):
    """The task was already answered with something else."""


class PhaseClosed(Refusal, status=409, title="The task's phase is closed"):
    """The task's phase is over; ``round`` and ``phase`` are the current ones."""


class NotSafetensors(Refusal, status=415, title="The body is not a safetensors file"):
    """A body that is not a whole safetensors file."""


class HeaderTooLarge(Refusal, status=422, title="The safetensors header is too large"):
    """A safetensors header over 1 MB."""


class BadMetadata(Refusal, status=422, title="The metadata is not what an update must say"):
    """Metadata that is not what an update must say about itself."""


class WrongTask(Refusal, status=422, title="The metadata names another task"):
    """Metadata that names another task."""


class UnknownTensor(Refusal, status=422, title="A tensor was not asked for"):
    """A tensor that was not asked for."""


class MissingTensor(Refusal, status=422, title="A tensor is missing"):
    """A tensor that was asked for and is not there."""


class WrongShape(Refusal, status=422, title="A tensor has another shape"):
    """A tensor of another shape."""


class WrongDtype(Refusal, status=422, title="A tensor has another dtype"):
    """A tensor of another dtype."""


class NotFinite(Refusal, status=422, title="A tensor holds NaN or infinity"):
    """A tensor with NaN or infinity."""


class NormTooLarge(Refusal, status=422, title="The update's norm is over the limit"):
    """An update over the norm that the spec admits, or any federation."""


class WrongPayload(Refusal, status=422, title="The update was made from another payload"):
    """An update that was made from another payload than was served."""


class PrivacyMissing(Refusal, status=422, title="The update was not trained under protection"):
    """An update of a protected federation that does not say what it cost its client."""


class PrivacyMismatch(Refusal, status=422, title="The update cost something else than agreed"):
    """An update whose sampling, noise or steps are not those that the spec and the enrolled samples give."""


_OF_TENSORS: tuple[type[Refusal], ...]
_OF_TENSORS = (NotSafetensors, HeaderTooLarge, BadMetadata, UnknownTensor, MissingTensor, WrongShape, WrongDtype)
TENSOR_REFUSALS = {refusal.kind: refusal for refusal in (*_OF_TENSORS, NotFinite)}
