"""What the coordinator answers about differential privacy: what was planned, what was spent, what was refused."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field

from promptfed.shared.messages import EnrolledProtection, PrivacyEvent

POLICY_RULES = (
    *("coordinator", "federation", "method", "backbone", "classes", "rounds", "epochs", "steps", "images", "expired"),
    *("privacy", "unit", "epsilon", "delta", "secure-aggregation", "minimum", "peers", "share", "metrics"),
)
"""What a site's policy refuses, by the last part of its name."""

FAILURES = frozenset(
    {
        "privacy-budget-exhausted",
        "privacy-missing",
        "private-state-unprotected",
        *(f"policy-{rule}" for rule in POLICY_RULES),
    }
)
"""Types of failures by which a client's budget or its site's policy refuses a task."""


class SpendView(BaseModel):
    """One release of a client's data, by its own word. ``release``: SHA-256 of the update; None inside a sum."""

    round: int
    phase: str
    task_id: str
    split: Literal["train", "test"] = "train"
    release: str | None
    events: list[PrivacyEvent]
    epsilon: float = Field(description="of the client's ledger after it")
    epsilon_replace_one: float | None = None
    delta: float
    noise: Literal["secret", "seeded"]
    at: datetime


class SpendList(BaseModel):
    """``GET .../spends``: what the coordinator knows this client to have spent, in order."""

    federation_id: str
    client: str
    spends: list[SpendView]


class ClientPrivacy(BaseModel):
    """What one client plans, and has spent: ε of its ledger after its last release, which may count others too."""

    client: str
    planned: EnrolledProtection | None
    releases: int
    round: int | None = Field(description="of the last release")
    epsilon: float | None
    epsilon_replace_one: float | None = None
    delta: float | None
    noise_multiplier: float | None
    noise: Literal["secret", "seeded"] | None
    spent: list[float] = Field(description="ε after each release, in order")


class PrivacyView(BaseModel):
    """``GET .../privacy``: differential privacy and secure sums of a federation, as its operator sees them."""

    level: Literal["none", "sample", "client"]
    unit: str | None
    relation: str
    accountant: str
    clip: float | None
    noise_multiplier: float | None
    epsilon: float | None = Field(description="that the spec allows")
    delta: float | None
    evaluation: str | None
    withheld: int = Field(description="evaluations of which a site has kept the accuracies")
    clients: list[ClientPrivacy]
    smallest_sum: int | None = Field(description="clients in the smallest secure sum so far")
    failures: dict[str, int] = Field(description="tasks that a client's budget or policy has refused, by kind")
    warnings: list[str]
