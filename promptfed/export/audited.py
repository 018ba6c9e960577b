"""What an audit has found goes into the card of the export that it attacked, for whoever gets the prompts."""

from __future__ import annotations

import json
from pathlib import Path

from promptfed.export.export import read_export
from promptfed.export.model_card import JSON_FILE, MARKDOWN_FILE, WEIGHTS_FILE, Card, snippet
from promptfed.export.model_card_markdown import markdown
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.result import AuditFigures, PrivacySummary
from promptfed.shared.files import write_whole
from promptfed.shared.tensors import decode

UNPROTECTED = PrivacySummary(
    level="none",
    unit="record",
    epsilon_max=None,
    epsilon_median=None,
    clients=0,
    delta=None,
    clip=None,
    noise_multiplier=None,
    noise="none",
    rounds_counted=0,
    evaluation="plain",
)


def note_audit(export: Path, found: list[AuditFigures]) -> Card:
    """Write ``found`` into the card, in the place of an earlier audit's; the card.

    Raises:
        CommandError: the folder is no export, or cannot be written.
    """
    read_export(export)
    card = Card.model_validate(json.loads((export / JSON_FILE).read_text(encoding="utf-8")), extra="ignore")
    privacy = (card.privacy or UNPROTECTED).model_copy(update={"audit": found})
    card = card.model_copy(update={"privacy": privacy})
    weights = decode((export / WEIGHTS_FILE).read_bytes())[0] if WEIGHTS_FILE in card.files else None
    text = markdown(card, snippet(card.backbone, weights) if weights is not None else None)
    content = json.dumps(card.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"
    try:
        write_whole(export / MARKDOWN_FILE, text.encode(), mode=0o644)
        write_whole(export / JSON_FILE, content.encode(), mode=0o644)
    except OSError as error:
        raise CommandError(f"cannot write the card of {export}: {error.strerror}", Exit.BAD_INPUT) from None
    return card
