"""Refusals of what is asked or sent for a task: tasks that are over, uploads that broke off, updates that are none."""

from __future__ import annotations

from promptfed.coordinator.problems import Refusal


class Ended(Refusal):
    """The federation has ended: there will be no more tasks."""

    status, kind, title = 410, "federation-ended", "The federation has ended"


class WrongTaskKind(Refusal):
    """An update for an evaluation task, or the other way round."""

    status, kind, title = 409, "wrong-task-kind", "This task wants another kind of answer"


class PayloadGone(Refusal):
    """The payload of a task that is long over was removed."""

    status, kind, title = 410, "payload-gone", "The payload is no longer kept"


class DigestMissing(Refusal):
    """An update without a SHA-256 Content-Digest."""

    status, kind, title = 400, "digest-missing", "A Content-Digest with sha-256 is needed"


class DigestMismatch(Refusal):
    """A body that is not what its Content-Digest says."""

    status, kind, title = 400, "digest-mismatch", "The body does not have the announced digest"


class IncompleteBody(Refusal):
    """A body that was cut off."""

    status, kind, title = 400, "incomplete-body", "The body was cut off"


class TooManyUploads(Refusal):
    """As many uploads as are allowed are under way."""

    status, kind, title = 503, "too-many-uploads", "Too many uploads are under way"


class AlreadyAnswered(Refusal):
    """The task was already answered with something else."""

    status, kind, title = 409, "already-answered", "This task was already answered with something else"


class PhaseClosed(Refusal):
    """The task's phase is over; ``round`` and ``phase`` are the current ones."""

    status, kind, title = 409, "phase-closed", "The task's phase is closed"


class NotSafetensors(Refusal):
    """A body that is not a whole safetensors file."""

    status, kind, title = 415, "not-safetensors", "The body is not a safetensors file"


class HeaderTooLarge(Refusal):
    """A safetensors header over 1 MB."""

    status, kind, title = 422, "header-too-large", "The safetensors header is too large"


class BadMetadata(Refusal):
    """Metadata that is not what an update must say about itself."""

    status, kind, title = 422, "bad-metadata", "The metadata is not what an update must say"


class WrongTask(Refusal):
    """Metadata that names another task."""

    status, kind, title = 422, "wrong-task", "The metadata names another task"


class UnknownTensor(Refusal):
    """A tensor that was not asked for."""

    status, kind, title = 422, "unknown-tensor", "A tensor was not asked for"


class MissingTensor(Refusal):
    """A tensor that was asked for and is not there."""

    status, kind, title = 422, "missing-tensor", "A tensor is missing"


class WrongShape(Refusal):
    """A tensor of another shape."""

    status, kind, title = 422, "wrong-shape", "A tensor has another shape"


class WrongDtype(Refusal):
    """A tensor of another dtype."""

    status, kind, title = 422, "wrong-dtype", "A tensor has another dtype"


class NotFinite(Refusal):
    """A tensor with NaN or infinity."""

    status, kind, title = 422, "not-finite", "A tensor holds NaN or infinity"


class NormTooLarge(Refusal):
    """An update over the norm that the spec admits, or any federation."""

    status, kind, title = 422, "norm-too-large", "The update's norm is over the limit"


class WrongPayload(Refusal):
    """An update that was made from another payload than was served."""

    status, kind, title = 422, "wrong-payload", "The update was made from another payload"


_OF_TENSORS: tuple[type[Refusal], ...]
_OF_TENSORS = (NotSafetensors, HeaderTooLarge, BadMetadata, UnknownTensor, MissingTensor, WrongShape, WrongDtype)
TENSOR_REFUSALS = {one.kind: one for one in (*_OF_TENSORS, NotFinite)}
