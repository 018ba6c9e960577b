"""Forgetting a client: what it costs, and the signed certificate of what was done."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated

from pydantic import BaseModel, Field

from promptfed.shared.api.export_card import FederationName
from promptfed.shared.plain_text import counted

Round = Annotated[int | None, Field(description="null: it has not taken part in any round")]

LIMITS = (
    "It says nothing about disks, copies of them, and backups that were made before.",
    "It says nothing about results that had left the coordinator before, or about logs that others keep.",
    "The hashes of erased entries stay in the audit log: whoever knows all else of an entry can confirm a guess.",
)


class Charge(BaseModel):
    """What another client has sent in rounds that would be repeated."""

    client: str
    answers: int = Field(description="updates that it has sent in these rounds, and would send again")
    epsilon: float | None = Field(description="of its ledger after the last of them, by its own word; null: no budget")
    starts_anew: bool = Field(
        description="what it kept of before these rounds, private or lost by compression, is gone"
    )


class ForgettingPlan(BaseModel):
    """What forgetting a client costs; nothing has been done."""

    federation: FederationName
    client: str
    client_id: str
    first_round: Round = Field(description="rounds are repeated from this one on; 0: with a new start")
    rounds: int = Field(description="rounds that were begun, and would be repeated")
    charges: list[Charge]
    older: list[str] = Field(description="clients of earlier releases, which go on with their present private tensors")

    def told(self) -> list[str]:
        """The cost as sentences."""
        if not self.rounds:
            return [f"{self.client} has taken part in no round: none is repeated."]
        start = f"round {self.first_round}" if self.first_round else "a new start"
        lines = [f"{counted(self.rounds, 'round is', 'rounds are')} repeated, from {start} on."]
        budget = [one for one in self.charges if one.epsilon is not None]
        for one in budget:
            answers = counted(one.answers, "update")
            lines.append(f"{one.client}'s ledger is charged again for {answers}; it stands at ε = {one.epsilon:.4g}.")
        anew = [one.client for one in self.charges if one.starts_anew]
        if anew:
            lines.append(f"Private tensors of before are gone (spec: keep_rounds), and start anew: {', '.join(anew)}.")
        if self.older:
            lines.append(f"Update these clients first, which cannot go back by themselves: {', '.join(self.older)}.")
        return lines


class Pseudonym(BaseModel):
    """A client's name as a digest, by which only those who know the name recognise it."""

    salt: str
    digest: str

    @classmethod
    def of(cls, name: str, salt: str | None = None) -> Pseudonym:
        """The pseudonym of ``name``, with a new salt unless one is given."""
        salt = salt or secrets.token_hex(16)
        return cls(salt=salt, digest=hashlib.sha256(f"{salt} {name}".encode()).hexdigest())

    def is_of(self, name: str) -> bool:
        """Whether it is the pseudonym of ``name``."""
        return self == Pseudonym.of(name, self.salt)


class Forgotten(BaseModel):
    """What was done to the record, as the audit log has it."""

    client: Pseudonym
    first_round: Round
    rounds: int = Field(description="rounds that were begun, and are repeated")
    restarts: bool = Field(description="the federation starts once more")
    state_hash: str | None = Field(description="of the state from which rounds are repeated; null: a new start")
    repeat: str | None = Field(description="the id under which clients learn of it")
    rows: dict[str, int] = Field(description="deleted rows by table: the client's, and all of the repeated rounds")
    blobs: int = Field(description="digests of tensors that no row names any more, whose bytes were removed")
    tombstones: dict[str, str] = Field(description="erased entries of the audit log by number, each with its hash")


class AuditPlace(BaseModel):
    """An entry of the audit log."""

    number: int
    at: str
    hash: str


class ForgettingReport(BaseModel):
    """A certificate's content."""

    federation: FederationName
    done: Forgotten
    by: str = Field(description="the operator who asked for it")
    forgotten: AuditPlace = Field(description="when rows were deleted")
    erased: AuditPlace = Field(description="when blobs were removed, the tables vacuumed and the write-ahead log cut")
    limits: list[str] = Field(description="what is not certified")


class SignedForgetting(BaseModel):
    """The certificate and its Ed25519 signature, in hexadecimal."""

    report: ForgettingReport
    signature: str
    public_key: str
