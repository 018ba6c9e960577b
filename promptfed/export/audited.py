"""The results of an audit, in a file beside the card of the attacked export.

They are not part of the card, since the coordinator signs the card and cannot vouch for measurements of others.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from promptfed.export.reading import AUDIT_FILE, read_export, read_file
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.canonical import parse_json
from promptfed.shared.files import write_whole
from promptfed.shared.service.reasons import why

MOST_BYTES = 1 << 20


class AuditFigures(BaseModel):
    """The result of one attack of `promptfed audit` on ``members`` training images and ``others``.

    ``auc`` has a 95 % interval. ``tpr_at_1`` is the share of members found at a false positive rate of 1 %; it is None
    if there are too few images. ``epsilon`` is a lower bound of ε.
    """

    attack: str = Field(max_length=100)
    members: int
    others: int
    auc: float
    auc_low: float
    auc_high: float
    tpr_at_1: float | None
    epsilon: float


class Audit(BaseModel):
    """``audit.json``."""

    audit: list[AuditFigures]


def note_audit(export: Path, figures: list[AuditFigures]) -> None:
    """Write ``figures`` beside the card; they replace those of an earlier audit.

    Raises:
        CommandError: the folder is not an export, or cannot be written.
    """
    read_export(export)
    content = Audit(audit=figures).model_dump_json(indent=1) + "\n"
    try:
        write_whole(export / AUDIT_FILE, content.encode(), mode=0o644)
    except OSError as error:
        raise CommandError(f"cannot write {export / AUDIT_FILE}: {why(error)}", Exit.BAD_INPUT) from None


def audit_of(export: Path) -> list[AuditFigures] | None:
    """The unsigned audit results beside an export; None if there is no such file.

    Raises:
        CommandError: the file does not hold audit results.
    """
    if not (export / AUDIT_FILE).exists():
        return None
    try:
        return Audit.model_validate(parse_json(read_file(export, AUDIT_FILE, MOST_BYTES)), extra="forbid").audit
    except (ValidationError, ValueError):
        raise CommandError(f"{export}: {AUDIT_FILE} holds no audit's figures: remove it", Exit.REFUSED) from None
