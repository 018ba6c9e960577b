"""`promptfed export`: what a federation learned, in a folder that stands by itself."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from promptfed.export.adapted_model import AdaptedModel, class_names_of, weights_of
from promptfed.export.model_card import (
    FORMAT,
    JSON_FILE,
    MARKDOWN_FILE,
    MERGED_FILE,
    STATE_FILE,
    WEIGHTS_FILE,
    Card,
    Contents,
    backbone_files,
    card_of,
    carries_backbone,
    snippet,
)
from promptfed.export.model_card_markdown import markdown
from promptfed.sdk.backbone import open_backbone
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import console, print_json
from promptfed.sdk.result import FederationResult
from promptfed.sdk.text import size
from promptfed.shared.clip import Backbone
from promptfed.shared.signatures import is_signed, statement
from promptfed.shared.spec import SpecError
from promptfed.shared.tensors import TensorError, decode, encode, state_hash


@dataclass(frozen=True)
class ExportOptions:
    """How to export: class names instead of the spec's, whether clients are numbered instead of named.

    ``merged``: beside the state, open_clip's model with the state's changes of weights in it.
    """

    class_names: tuple[str, ...] | None = None
    anonymous: bool = False
    allow_backbone: bool = False
    merged: bool = False


def export(result: FederationResult, out: Path, options: ExportOptions, backbone: Backbone | None = None) -> Card:
    """Write everything into ``out``, which must be new or empty; the card. What fails leaves nothing behind.

    Raises:
        CommandError: a folder, class names or a backbone that cannot be used.
    """
    check_new(out)
    model = AdaptedModel.of(result)
    names = options.class_names or class_names_of(result)
    why_none, weights = _why_no_weights(model, names), None
    files = {STATE_FILE: result.body if len(model.state) == len(result.state) else encode(model.state)}
    if why_none is None and names is not None:
        backbone = backbone or open_backbone_of(model, options.allow_backbone)
        weights = weights_of(model.serve(backbone, names))
        if weights is None:
            why_none = f"{model.method['name']} needs promptfed's own towers, or texts that depend on the image"
        else:
            files[WEIGHTS_FILE] = encode(weights)
            files |= backbone_files(backbone) if carries_backbone(model.backbone) else {}
    if options.merged:
        backbone = backbone or open_backbone_of(model, options.allow_backbone)
        files[MERGED_FILE] = encode(model.merged(backbone, names or ()))
    source = "the federation's spec" if options.class_names is None else "who exported it"
    contents = Contents(names, source, model.state, weights, why_none, model.missing() is None, files)
    card = card_of(result, model, contents, options.anonymous)
    text = markdown(card, snippet(model.backbone, weights) if weights is not None else None)
    files[JSON_FILE] = (json.dumps(card.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n").encode()
    files[MARKDOWN_FILE] = text.encode()
    _write(files, out)
    return card


def _why_no_weights(model: AdaptedModel, names: tuple[str, ...] | None) -> str | None:
    reason = model.missing()
    if reason is None and names is None:
        return "the federation names no classes, each client used its own: export again with --classes or --data"
    return reason


def open_backbone_of(model: AdaptedModel, allow: bool) -> Backbone:
    """The federation's backbone on the CPU. Raises CommandError where it cannot be loaded here."""
    return open_backbone(model.backbone, allow_backbone=allow)


def check_new(out: Path) -> None:
    """Raise CommandError where ``out`` is there and not an empty folder."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CommandError(f"{out} is not an empty folder: give another one", Exit.BAD_INPUT)
    except OSError as error:
        raise CommandError(f"cannot use {out}: {error.strerror}", Exit.BAD_INPUT) from None


def _write(files: dict[str, bytes], out: Path) -> None:
    """All files, or none: they appear by one rename."""
    folder: str | None = None
    try:
        out = out.resolve()
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent)
        for name, body in files.items():
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(body)
        Path(folder).chmod(0o755)
        os.rename(folder, out)
        folder = None
    except OSError as error:
        raise CommandError(f"cannot write {out}: {error.strerror}", Exit.BAD_INPUT) from None
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def read_export(folder: Path) -> tuple[AdaptedModel, tuple[str, ...] | None]:
    """What an export holds: all that it takes to classify, and its class names where it has any.

    Raises:
        CommandError: the folder is no export, of a later version, or its state is not the one that its card names.
    """
    try:
        raw = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))
        body = (folder / STATE_FILE).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise CommandError(f"{folder} is no export of promptfed's ({reason})", Exit.BAD_INPUT) from None
    try:
        if raw["format"] != FORMAT:
            text = f"{folder} is an export of format {raw['format']}, this promptfed reads {FORMAT}"
            raise CommandError(text, Exit.BAD_INPUT)
        card, (state, _) = Card.model_validate(raw, extra="ignore"), decode(body)
        digest = hashlib.sha256(body).hexdigest()
        if digest != card.files[STATE_FILE].sha256 or state_hash(state) != card.hashes["state"]:
            raise CommandError(f"{folder}: {STATE_FILE} is not the one that {JSON_FILE} names", Exit.BAD_INPUT)
    except (KeyError, TypeError, ValidationError, TensorError) as error:
        reason = str(SpecError.from_validation(error) if isinstance(error, ValidationError) else error)
        raise CommandError(f"{folder}: {JSON_FILE} or {STATE_FILE} is damaged: {reason}", Exit.BAD_INPUT) from None
    model = AdaptedModel(
        method=card.method,
        backbone=card.backbone,
        training=card.training,
        template=card.template,
        rounds=card.rounds,
        round=card.round,
        seed=card.seed,
        domains=tuple(card.domains),
        state=state,
    )
    return model, tuple(card.class_names) if card.class_names else None


def verify_export(folder: Path, public_key: str) -> Card:
    """The card of an export whose files are those that it names, and whose state this key has signed.

    Raises:
        CommandError: they are not, or it has not.
    """
    read_export(folder)
    card = Card.model_validate(json.loads((folder / JSON_FILE).read_text(encoding="utf-8")), extra="ignore")
    for name, file in card.files.items():
        path = folder / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != file.sha256:
            raise CommandError(f"{folder}: {name} is not the one that {JSON_FILE} names", Exit.REFUSED)
    if card.signature is None:
        raise CommandError(
            f"{folder} is not signed: it was exported from a simulation, or before there were keys", Exit.REFUSED
        )
    said = statement(card.federation["id"], card.round, str(card.hashes["state"]))
    if not is_signed(public_key, card.signature, said):
        raise CommandError(f"{folder}: the state is not signed by the key {public_key[:200]}", Exit.REFUSED)
    return card


def show_export(card: Card, out: Path, as_json: bool) -> None:
    """Tell what was written."""
    if as_json:
        print_json(card.model_dump(mode="json"))
        return
    total = sum(file.bytes for file in card.files.values())
    head = f"Wrote {out} ({size(total)}): {card.method['name']} of {card.federation['name']}, round {card.round}."
    lines = [head, f"Read {MARKDOWN_FILE} in it: it says how to use the rest."]
    if card.use.why_not_open_clip:
        lines.append(f"No class weights for plain open_clip code: {card.use.why_not_open_clip}.")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
