"""The policy of a site: a file at the client, which no coordinator can change.

It is read once and never leaves the machine. It is enforced at each task, and at joining before anything but the
enrolment token is sent. Every check is a function of plain values. An unknown key is refused, not ignored, because this
version could not keep what the key promises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import Field, ValidationError, model_validator

from promptfed.client_service.exits import ClientError, Exit, Failure
from promptfed.shared.messages import EnrolmentInfo, Role, Task
from promptfed.shared.privacy.accounting import LEAST_DELTA, MOST_EPSILON, steps_of
from promptfed.shared.service.addresses import addresses_of
from promptfed.shared.service.reasons import offence, why
from promptfed.shared.service.yaml_text import read_yaml
from promptfed.shared.spec.section import Section
from promptfed.shared.spec.spec import Name
from promptfed.shared.spec.training_terms import TrainingTerms

EXAMPLE = (files(__package__) / "policy_example.yaml").read_text()
"""A policy with comments, to begin with (`promptfed policy example`)."""

FLOOR = 10  # of disclosure (`noisy_counts`), where a policy names none
STATES = 15  # that are answered on one test set under a floor, where a policy names no number
Fingerprint = Annotated[str, Field(pattern=r"^ed25519:[0-9a-f]{64}$")]


class Allow(Section):
    """Lists of what is allowed; None: everything."""

    coordinators: list[str] | None = None
    federations: list[str] | None = None
    methods: list[str] | None = None
    backbones: list[str] | None = None
    class_names: Literal["own", "federation"] = "own"


class WorkLimits(Section):
    """Bounds of the work and of the data."""

    rounds: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    min_steps: int | None = Field(default=None, ge=1)
    min_images: int | None = Field(default=None, ge=1)
    until: date | None = None


class Privacy(Section):
    """What training has to be protected by, and the budget."""

    require: Literal["none", "sample", "client"] = "none"
    unit: Literal["record", "group"] | None = None
    max_epsilon: float = Field(default=8.0, gt=0, le=MOST_EPSILON)
    max_test_epsilon: float = Field(default=4.0, gt=0, le=MOST_EPSILON)
    delta: float | None = Field(default=None, ge=LEAST_DELTA, lt=1)
    partial: bool = False


class SentNumbers(Section):
    """The numbers that may leave; accuracy None: as the federation says, withheld if it is protected.

    ``floor``: numbers of fewer images or patients leave only as "fewer than that". ``states``: while the floor is over
    1, so many different states at most are answered on one test set.
    """

    accuracy: Literal["withheld", "noisy", "plain"] | None = None
    training: bool = True
    floor: int = Field(default=FLOOR, ge=1, le=1000)
    states: int = Field(default=STATES, ge=1, le=100_000)


class SecureAggregation(Section):
    """Whether updates may leave only inside a sum; of how many clients at least, and how much of it this site's own.

    ``min_effective``: as how many clients of equal weight a sum has to count, (Σ a)²/Σ a² of its weights a.
    ``min_move``: how far a payload must be from that of an earlier sum of other members, as a part of this site's own
    change to that one.
    ``peers``: fingerprints that were compared over another channel. With any given, at most ``unverified`` of the
    other members may have another key, and at least ``verified`` of those in a sum must have one of these.
    """

    require: bool = False
    minimum: int = Field(default=3, ge=3, le=1024)
    max_own_share: float = Field(default=0.5, gt=0, le=0.5)
    min_effective: float = Field(default=2.5, ge=1, le=1024)
    min_move: float = Field(default=0.1, ge=0, le=1)
    peers: list[Fingerprint] = Field(default_factory=list)
    verified: int = Field(default=0, ge=0, le=1023)
    unverified: int = Field(default=0, ge=0, le=1023)

    @model_validator(mode="after")
    def _keys_can_be_checked(self) -> SecureAggregation:
        if self.verified > len(set(self.peers)):
            raise ValueError(f"verified is {self.verified}, and peers lists {len(set(self.peers))}")
        if "unverified" in self.model_fields_set and not self.peers:
            raise ValueError("unverified counts members who are not among peers, and peers lists nobody")
        if self.unverified and not self.verified:
            raise ValueError("with unverified over 0, give verified: how many of a sum's members must be among peers")
        return self


class Policy(Section):
    """One site's policy."""

    version: Literal[1]
    dataset: Name | None = None
    ledger: str | None = None
    allow: Allow = Allow()
    limits: WorkLimits = WorkLimits()
    privacy: Privacy = Privacy()
    metrics: SentNumbers = SentNumbers()
    secure_aggregation: SecureAggregation = SecureAggregation()


@dataclass(frozen=True)
class SiteFacts:
    """What a federation asks of this site, as plain values."""

    coordinator: str
    federation: str
    method: str
    backbone: str
    rounds: int
    epochs: int
    steps: int
    images: int
    role: Role
    level: str
    class_names: bool  # whether the federation names them
    epsilon: float | None = None  # of the federation, where whole clients are protected
    unit: str = "record"  # what is protected at level sample
    sums: int | None = None  # the least number of clients in a sum; None: updates are sent in the clear
    today: date = field(default_factory=lambda: datetime.now(UTC).date())


def facts_of(info: EnrolmentInfo, coordinator: str, role: Role, images: int, units: int | None = None) -> SiteFacts:
    """What the enrolment information says; ``units``: of training, where they are not the ``images``."""
    privacy = info.privacy
    return SiteFacts(
        coordinator=coordinator,
        federation=info.name,
        images=images,
        role=role,
        unit=privacy.unit if privacy is not None else "record",
        epsilon=privacy.epsilon if privacy is not None and privacy.level == "client" else None,
        **_asked(info, (units or images) if images else 0),
    )


def facts_of_task(task: Task, enrolled: SiteFacts) -> SiteFacts:
    """What a task's own configuration asks, of a site that has ``enrolled`` for what was said then."""
    return replace(enrolled, **_asked(task.config, enrolled.images))


def _asked(terms: TrainingTerms, units: int) -> dict[str, Any]:
    """What training by ``terms`` on so many ``units`` asks, as fields of `SiteFacts`."""
    training, backbone, sums = terms.training, terms.backbone, terms.secure_aggregation
    return {
        "method": str(terms.method.get("name")),
        "backbone": f"{backbone.model}/{backbone.pretrained or 'random'}",
        "rounds": terms.rounds,
        "epochs": training.epochs,
        "steps": steps_of(units, training.batch_size, training.epochs) if units else 0,
        "level": terms.privacy.level if terms.privacy is not None else "none",
        "class_names": terms.class_names is not None,
        "sums": sums.minimum if sums is not None else None,
    }


def _listed(key: str, allowed: list[str] | None, value: str) -> str | None:
    if allowed is None or value in allowed:
        return None
    return f"allow.{key} lists {', '.join(allowed) or 'none'}, not {value}"


def _at_most(key: str, limit: int | None, value: int) -> str | None:
    return None if limit is None or value <= limit else f"limits.{key} is {limit}, and {value} are asked for"


def _at_least(key: str, limit: int | None, value: int, owner: str) -> str | None:
    return None if limit is None or value >= limit else f"limits.{key} is {limit}, and {owner} {value}"


def _coordinator(policy: Policy, facts: SiteFacts) -> str | None:
    offences = (_origin(policy, address) for address in addresses_of(facts.coordinator))
    return next((text for text in offences if text is not None), None)


def _origin(policy: Policy, address: str) -> str | None:
    allowed = policy.allow.coordinators
    same = any(_address(listed) == _address(address) for listed in allowed or [])
    return None if same else _listed("coordinators", allowed, address)


def _address(url: str) -> tuple[str, str, int | None, str]:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname or "", port, parts.path.rstrip("/")


def _expired(policy: Policy, facts: SiteFacts) -> str | None:
    until = policy.limits.until
    return None if until is None or facts.today <= until else f"limits.until is {until}, and it is {facts.today}"


def _privacy(policy: Policy, facts: SiteFacts) -> str | None:
    if policy.privacy.require == "none" or facts.role != "trainer" or facts.level == policy.privacy.require:
        return None
    return f"privacy.require is {policy.privacy.require}, and the federation's level is {facts.level}"


def _unit(policy: Policy, facts: SiteFacts) -> str | None:
    if facts.role != "trainer" or facts.level != "sample" or facts.unit == (policy.privacy.unit or facts.unit):
        return None
    return f"privacy.unit is {policy.privacy.unit}, and the federation protects each {facts.unit}"


def _epsilon(policy: Policy, facts: SiteFacts) -> str | None:
    """Of whole clients the federation names its ε; of records the site's own ledger holds it."""
    most = policy.privacy.max_epsilon
    if facts.role != "trainer" or facts.level != "client" or policy.privacy.require != "client":
        return None
    if facts.epsilon is None:
        return f"privacy.max_epsilon is {most:g}, and the federation says no epsilon"
    return (
        None if facts.epsilon <= most else f"privacy.max_epsilon is {most:g}, and the federation's is {facts.epsilon:g}"
    )


def _classes(policy: Policy, facts: SiteFacts) -> str | None:
    if policy.allow.class_names == "own" or facts.class_names:
        return None
    return "allow.class_names is federation, and the federation names no classes"


def _sums(policy: Policy, facts: SiteFacts) -> str | None:
    if not policy.secure_aggregation.require or facts.role != "trainer" or facts.sums is not None:
        return None
    return "secure_aggregation.require is true, and the federation has none"


def _minimum(policy: Policy, facts: SiteFacts) -> str | None:
    least = policy.secure_aggregation.minimum
    if facts.sums is None or facts.sums >= least:
        return None
    return f"secure_aggregation.minimum is {least}, and the federation's sums may be of {facts.sums} clients"


Rule = Callable[[Policy, SiteFacts], str | None]
RULES: dict[str, Rule] = {
    "coordinator": _coordinator,
    "federation": lambda policy, facts: _listed("federations", policy.allow.federations, facts.federation),
    "method": lambda policy, facts: _listed("methods", policy.allow.methods, facts.method),
    "backbone": lambda policy, facts: _listed("backbones", policy.allow.backbones, facts.backbone),
    "classes": _classes,
    "rounds": lambda policy, facts: _at_most("rounds", policy.limits.rounds, facts.rounds),
    "epochs": lambda policy, facts: _at_most("epochs", policy.limits.epochs, facts.epochs),
    "steps": lambda policy, facts: (
        _at_least("min_steps", policy.limits.min_steps, facts.steps, "a task has") if facts.role == "trainer" else None
    ),
    "images": lambda policy, facts: _at_least("min_images", policy.limits.min_images, facts.images, "the data have"),
    "floor": lambda policy, facts: (
        None
        if facts.images >= policy.metrics.floor
        else f"metrics.floor is {policy.metrics.floor}, and the data have {facts.images} images"
    ),
    "expired": _expired,
    "privacy": _privacy,
    "unit": _unit,
    "epsilon": _epsilon,
    "secure-aggregation": _sums,
    "minimum": _minimum,
}
"""Every rule by the last part of its refusal's name; each says what is offended, or None."""


def refusals(policy: Policy, facts: SiteFacts) -> list[Failure]:
    """A failure for every rule that ``facts`` offend."""
    texts = ((name, rule(policy, facts)) for name, rule in RULES.items())
    return [Failure(f"policy-{name}", text) for name, text in texts if text is not None]


def enforce(policy: Policy | None, facts: SiteFacts) -> None:
    """Raise ClientError (POLICY) with every rule that ``facts`` offend."""
    offended = refusals(policy, facts) if policy is not None else []
    if offended:
        listed = "; ".join(f"{failure.kind}: {failure}" for failure in offended)
        raise ClientError(Exit.POLICY, f"this site's policy does not allow to join {facts.federation}: {listed}")


def allows(policy: Policy | None, address: str) -> bool:
    """Whether the site's policy lets a coordinator's address be used: requests there carry the client's secret."""
    return policy is None or _origin(policy, address) is None


def read_policy(path: Path) -> tuple[Policy, str]:
    """The policy in a file, and the SHA-256 of its bytes.

    Raises:
        ClientError: POLICY where it cannot be read or says what is not understood.
    """
    try:
        content = path.read_bytes()
        parsed: Any = read_yaml(content)
    except OSError as error:
        raise ClientError(Exit.POLICY, f"cannot read the policy {path}: {why(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ClientError(Exit.POLICY, f"the policy {path} is not YAML: {why(error)}") from None
    try:
        return Policy.model_validate(parsed), hashlib.sha256(content).hexdigest()
    except ValidationError as error:
        listed = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'the file'}: "
            + ("this version does not know it" if one["type"] == "extra_forbidden" else offence(one))
            for one in error.errors()
        )
        raise ClientError(
            Exit.POLICY, f"the policy {path} is not understood: {listed}; see `promptfed policy example`"
        ) from None
