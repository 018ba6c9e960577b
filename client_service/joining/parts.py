"""Objects that a worker can be given instead of making them from its settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from promptfed.client_service.joining.checks import Check
from promptfed.client_service.joining.disclosure import Disclosure
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.training.trainer import TaskWork
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import Source
from promptfed.shared.metrics.outcomes import Record
from promptfed.shared.privacy.noise import Noise, SecretNoise

Consent = Callable[[Sequence[Check], Disclosure], Awaitable[bool]]
"""Decides on the checks and on what will leave this machine; False ends the client before anything is sent."""


@dataclass(frozen=True)
class PrivacyParts:
    """For simulations of protected federations.

    ``ledger``: by default the data set's file. ``plain_evaluations``: accuracies leave unprotected where the spec
    allows it too. ``floor``: of disclosure, instead of the policy's.
    """

    noise: Noise = field(default_factory=SecretNoise)
    ledger: Ledger | None = None
    plain_evaluations: bool = False
    floor: int | None = None


@dataclass(frozen=True)
class Parts:
    """Parts of a worker that exist already, so that many workers share one process.

    Attributes:
        secret: of the client's identity, if another process will continue with it.
        consent: asked before a client that has not enrolled yet sends anything.
        record: receives, in this process, the answer for each test image.
        work: makes the object that carries out tasks; it takes the fields of `TaskWork`.
    """

    backbone: Backbone | None = None
    source: Source | None = None
    tests: Mapping[str, Source] | None = None
    features: FeatureCache | None = None
    enrolment_token: str | None = None
    secret: str | None = None
    consent: Consent | None = None
    record: Record | None = None
    privacy: PrivacyParts = field(default_factory=PrivacyParts)
    work: Callable[..., TaskWork] = TaskWork
