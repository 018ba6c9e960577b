"""The coordinator's own exports, without class weights, and checks of others' cards against the facts that it knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from io import BufferedRandom
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from zipfile import ZipFile

from pydantic import ValidationError

from promptfed.coordinator import problems
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.resources.results.facts import Known, known_of
from promptfed.shared.api import export_card
from promptfed.shared.canonical import parse_json
from promptfed.shared.cards.card_text import described, markdown, version
from promptfed.shared.methods.core.interface import why_not_alone
from promptfed.shared.spec.spec import SpecError

NO_BACKBONE = "the coordinator has no backbone: `promptfed export` makes class weights for plain open_clip code"
SHOWN = 200  # letters of a value that a refusal names
Differences = dict[str, str]  # explanations by place in the card


def made(known: Known, federation: Federation) -> dict[str, bytes | Path]:
    """The files of an export of what the coordinator knows, by name."""
    names, source = export_card.classes_of(known.view)
    states = {export_card.STATE_FILE: known.state}
    if known.view.state == "finished" and known.facts.selection is not None and known.view.round > known.facts.round:
        states[export_card.FINAL_FILE] = known.final()
    card = export_card.Card(
        **dict(known.facts),
        class_names=names,
        class_names_from=source,
        use=export_card.Use(
            open_clip=False,
            promptfed=names is not None and why_not_alone(federation.method, federation.context) is None,
            why_not_open_clip=NO_BACKBONE,
        ),
        files={name: state.file for name, state in sorted(states.items())},
        made=export_card.Made(at=datetime.now(UTC).isoformat(timespec="seconds"), promptfed=version()),
    )
    text = markdown(card, None).encode()
    card.files = dict(sorted({**card.files, export_card.MARKDOWN_FILE: described(text, None)}.items()))
    body = (json.dumps(card.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n").encode()
    return {
        **{name: state.body for name, state in states.items()},
        export_card.MARKDOWN_FILE: text,
        export_card.JSON_FILE: body,
    }


def zipped(files: Mapping[str, bytes | Path], folder: Path) -> BufferedRandom:
    """The files in an archive, stored as they are: tensors hardly compress. It lies unnamed in ``folder``."""
    archive = TemporaryFile(dir=folder)  # noqa: SIM115 - closed with the answer that reads it
    with ZipFile(archive, "w") as packed:
        for name, body in files.items():
            packed.writestr(name, body) if isinstance(body, bytes) else packed.write(body, name)
    archive.seek(0)
    return archive


def check_card(registry: Registry, federation: Federation, round: int, body: bytes) -> None:
    """Compare ``body``, the bytes of a ``card.json``, with the coordinator's data on the result after ``round``.

    A coordinator without a backbone cannot compute the class weights, the merged model, the backbone's files and
    ``card.md``: their digests are not checked, nor are class names that who exported it has given.

    Raises:
        UnreadableBody: it is not JSON.
        InvalidRequest: it is not a card.
        NoState: there is no state of that round, or it is no longer kept.
        ExportDiffers: the card differs from the coordinator's data.
    """
    card = _parsed(body)
    ours = known_of(registry, federation, round)
    differences = _differences(card, ours) | _wrong_classes(card, ours) | _wrong_files(card, ours)
    if differences:
        errors = [{"path": path, "detail": detail} for path, detail in differences.items()]
        text = "; ".join(f"{error['path']}: {error['detail']}" for error in errors[:5])
        raise problems.ExportDiffers(f"the card is not what this coordinator knows: {text}", errors=errors)


def _parsed(body: bytes) -> export_card.Card:
    try:
        return export_card.Card.model_validate(parse_json(body), extra="forbid")
    except ValidationError as error:
        offences = SpecError.from_validation(error)
        raise problems.InvalidRequest(str(offences), errors=offences.errors) from None
    except ValueError as error:
        raise problems.UnreadableBody(f"the card cannot be read: {error}") from None


def _differences(card: export_card.Card, expected: Known) -> Differences:
    numbered = expected.facts.numbered()
    facts = numbered if card.participants == numbered.participants else expected.facts
    pairs = {name: (getattr(card, name), getattr(facts, name)) for name in export_card.Facts.model_fields}
    return {
        name: f"it is {_short(ours)}, not {_short(theirs)}" for name, (theirs, ours) in pairs.items() if theirs != ours
    }


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _wrong_classes(card: export_card.Card, expected: Known) -> Differences:
    names, source, (theirs, whose) = card.class_names, card.class_names_from, export_card.classes_of(expected.view)
    if names is None:
        text = None if theirs is None and source is None else f"{whose} named classes"
    elif len(set(names)) < len(names) or not names:
        text = "each class has a name of its own"
    elif source == export_card.GIVEN_NAMES:
        text = None
    elif source != whose:
        text = f"class_names_from is {export_card.GIVEN_NAMES!r}" + (f" or {whose!r}" if whose is not None else "")
    else:
        text = None if names == theirs else f"{whose} named {_short(theirs)}"
    return {"class_names": text} if text is not None else {}


def _wrong_files(card: export_card.Card, expected: Known) -> Differences:
    wrong: Differences = {}
    files = card.files
    for name in sorted(files.keys() - export_card.LISTED):
        wrong[f"files.{name[:SHOWN]}"] = (
            f"an export holds no such file; it may hold {', '.join(sorted(export_card.LISTED))}"
        )
    for name in sorted({export_card.STATE_FILE, export_card.MARKDOWN_FILE} - files.keys()):
        wrong[f"files.{name}"] = "an export has this file, and its card names it"
    if export_card.STATE_FILE in files and not _is_same(files[export_card.STATE_FILE], expected.state.file):
        wrong[f"files.{export_card.STATE_FILE}"] = f"the state's file is {_short(expected.state.file)}"
    if export_card.FINAL_FILE in files and not _is_same(files[export_card.FINAL_FILE], expected.final().file):
        wrong[f"files.{export_card.FINAL_FILE}"] = "it is not the last round's state"
    if (export_card.BACKBONE_CONFIG in files) != (export_card.BACKBONE_WEIGHTS in files):
        wrong["files"] = "a backbone is its configuration and its weights together"
    if card.use.open_clip != (export_card.WEIGHTS_FILE in files):
        wrong["use.open_clip"] = f"it is true where there is {export_card.WEIGHTS_FILE}, and only there"
    if card.signature is not None:
        wrong["signature"] = "a card holds no signature: it lies in a file beside it"
    return wrong


def _is_same(file: export_card.CardFile, expected: export_card.CardFile) -> bool:
    """Whether a file is the known one. The shapes of its tensors may be left out."""
    shapes = expected.tensors if file.tensors is not None else None
    return file == expected.model_copy(update={"tensors": shapes})
