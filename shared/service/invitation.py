"""Invitations: what a client needs to join a federation, as one text that an operator sends to a data owner."""

from __future__ import annotations

import base64
import hashlib
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from promptfed.shared.canonical import canonical_json, parse_json
from promptfed.shared.service.reasons import NAME_PATTERN

VERSION = 1
MOST_CHARACTERS = 8192
CHECKSUM = "checksum"
COMMAND = "promptfed join"  # begins the line that `federation invite` prints above an invitation
DAMAGED = "the invitation is incomplete or was changed: copy the whole text again"


class InvitationError(ValueError):
    """A text that is no invitation; the message says in one line what to do."""


class Invitation(BaseModel):
    """An enrolment token and where it is good.

    ``authority`` is the SHA-256 of the DER certificate that vouches for the coordinator, where it serves TLS itself.
    ``client`` and ``role`` are what the client is called and does, unless its owner says otherwise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    coordinator: Annotated[str, Field(max_length=2000)]
    federation: Annotated[str, Field(max_length=100)]
    token: Annotated[str, Field(max_length=200)]
    expires_at: AwareDatetime
    authority: Annotated[str | None, Field(pattern=r"^[0-9a-f]{64}$")] = None
    client: Annotated[str | None, Field(pattern=NAME_PATTERN)] = None
    role: Literal["trainer", "evaluator"] | None = None

    def encoded(self) -> str:
        """The invitation as base64url JSON without padding; `decode` reads it."""
        fields = self.model_dump(mode="json")
        text = canonical_json({**fields, CHECKSUM: _checksum(fields)})
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    def check_time(self, now: datetime) -> None:
        """Raises InvitationError if it has expired."""
        if now >= self.expires_at:
            when = self.expires_at.isoformat(sep=" ", timespec="minutes")
            raise InvitationError(f"the invitation expired at {when}: ask the operator for another")


def decode(text: str) -> Invitation:
    """The invitation in ``text``. White space in it does no harm, nor does the command's line above it.

    Raises:
        InvitationError: the text is damaged, or of a later version.
    """
    word = "".join("".join(line for line in text.splitlines() if not line.strip().startswith(COMMAND)).split())
    if not word:
        raise InvitationError("there is no invitation: give the text that the operator sent")
    fields = _fields(word)
    version = fields.get("version")
    if version != VERSION:
        text = f"the invitation has version {version}, this promptfed reads version {VERSION}"
        raise InvitationError(f"{text}: install the coordinator's version of promptfed")
    try:
        return Invitation.model_validate(fields)
    except ValidationError:
        raise InvitationError(DAMAGED) from None


def _fields(word: str) -> dict[str, Any]:
    """The fields of an invitation that is as it was made, without the checksum. Raises InvitationError."""
    try:
        body = base64.b64decode(word + "=" * (-len(word) % 4), altchars=b"-_", validate=True)
        fields = parse_json(body) if len(word) <= MOST_CHARACTERS else None
    except ValueError:
        raise InvitationError(DAMAGED) from None
    again = base64.urlsafe_b64encode(body).decode().rstrip("=")  # the last character has bits that do not count
    if not isinstance(fields, dict) or again != word or fields.pop(CHECKSUM, None) != _checksum(fields):
        raise InvitationError(DAMAGED)
    return fields


def _checksum(fields: dict[str, Any]) -> str:
    """Tells a torn or mistyped copy; it protects from no forger."""
    return hashlib.sha256(canonical_json(fields).encode()).hexdigest()[:16]
