"""Who may do what at a coordinator, and what they have done: enrolment tokens, operators, the audit log."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from promptfed.shared.messages import Message, Role
from promptfed.shared.service.net import check_addresses
from promptfed.shared.spec.spec import Name

OperatorRole = Literal["viewer", "operator", "admin"]
LEVELS: dict[OperatorRole, int] = {"viewer": 0, "operator": 1, "admin": 2}
"""What each role may: a higher one may all that a lower one may."""
FIRST_LINK = "0" * 64
EXPIRED_AT = "when it was first seen to have expired; it stays expired if the clock is set back"


class TokenRequest(Message):
    """Whom an enrolment token shall let in, and how long."""

    hours: Annotated[float | None, Field(gt=0, le=24 * 366, description="default: the coordinator's setting")] = None
    name: Annotated[Name | None, Field(description="by which it is listed; default: its id")] = None
    role: Annotated[Role | None, Field(description="the only one that those may have who enrol with it")] = None
    uses: Annotated[int, Field(ge=1, le=100_000, description="how many clients can enrol with it")] = 1
    client: Annotated[
        str | None, Field(max_length=100, description="the one client whose reset name it gives back; uses is 1")
    ] = None
    address: Annotated[
        str | None,
        Field(max_length=2000, description="where clients reach the coordinator: the answer has an invitation to it"),
    ] = None

    @model_validator(mode="after")
    def _one_client_is_one_use(self) -> TokenRequest:
        if self.client is not None and self.uses != 1:
            raise ValueError("a token for one client has one use: leave out uses")
        return self

    @field_validator("address")
    @classmethod
    def _are_addresses(cls, given: str | None) -> str | None:
        return None if given is None else check_addresses(given)


class MintedToken(BaseModel):
    """An enrolment token; it is shown only here."""

    token: str
    expires_at: datetime
    id: str
    name: str
    uses: int | None
    role: Role | None
    invitation: Annotated[str | None, Field(description="for `promptfed join`, where an address was given")] = None


class TokenView(BaseModel):
    """An enrolment token, without its text."""

    id: str
    name: str
    role: Role | None
    client: str | None = Field(description="the one reset name that it is for")
    uses: int | None = Field(description="null: minted before tokens had a number of uses")
    used: int
    closed: bool = Field(description="a client that came by it was withdrawn: nobody new comes in by it")
    created_at: datetime
    expires_at: datetime
    expired_at: datetime | None = Field(description=EXPIRED_AT)
    clients: list[str] = Field(description="who came by it")


class TokenPage(BaseModel):
    """Some enrolment tokens in order of id; ``next`` is the following page's ``after``."""

    tokens: list[TokenView]
    next: str | None


class OperatorRequest(Message):
    """A token for an operator."""

    name: Annotated[Name, Field(description="the person's or program's, as the audit log will have it")]
    role: Annotated[OperatorRole, Field(description="viewer reads, operator steers, admin also names operators")]
    hours: Annotated[float, Field(gt=0, le=24 * 366, description="how long it is good")] = 24.0 * 90


class MintedOperator(BaseModel):
    """An operator's token; it is shown only here."""

    token: str
    id: str
    name: str
    role: OperatorRole
    expires_at: datetime


class OperatorView(BaseModel):
    """An operator's token, without its text."""

    id: str
    name: str
    role: OperatorRole
    created_at: datetime
    expires_at: datetime
    expired_at: datetime | None = Field(description=EXPIRED_AT)


class OperatorPage(BaseModel):
    """Some operators' tokens in order of id; ``next`` is the following page's ``after``."""

    operators: list[OperatorView]
    next: str | None


class SigningKey(BaseModel):
    """A coordinator's public key."""

    algorithm: Literal["ed25519"] = "ed25519"
    public_key: Annotated[str, Field(description="32 bytes, in hexadecimal")]


class CardSignature(BaseModel):
    """A coordinator's signature of an export's ``card.json``, byte for byte."""

    signature: Annotated[str, Field(description="Ed25519, in hexadecimal")]
    public_key: str


class AuditEntry(BaseModel):
    """One act. ``hash`` is over all else, ``previous`` is the hash of the entry before: none can be changed alone.

    ``role``: the operator's; ``enrolment`` for who came by an enrolment token, empty for the coordinator itself.
    """

    number: int
    at: str
    actor: str
    role: str
    address: str
    act: str
    federation: str | None
    federation_name: str | None
    detail: dict[str, Any]
    previous: str
    hash: str

    def computed_hash(self) -> str:
        """SHA-256 over the canonical JSON (sorted keys, no spaces, ASCII) of all fields but ``hash``."""
        fields = self.model_dump(mode="json", exclude={"hash"})
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


class AuditPage(BaseModel):
    """Some entries in order; ``next`` is the following page's ``after``."""

    entries: list[AuditEntry]
    next: str | None


class BrokenChain(ValueError):
    """An audit log that is not what was written; the text says where."""


def check_chain(entries: Iterable[AuditEntry]) -> tuple[int, str]:
    """How many entries there are, and the last one's hash. Raises BrokenChain."""
    number, link = 0, FIRST_LINK
    for entry in entries:
        number += 1
        if entry.number != number:
            raise BrokenChain(f"entry {number} is missing: {entry.number} stands in its place")
        if entry.previous != link:
            raise BrokenChain(f"entry {number} does not follow the one before: one of them was changed or replaced")
        if entry.computed_hash() != entry.hash:
            raise BrokenChain(f"entry {number} was changed: its hash is another")
        link = entry.hash
    return number, link
