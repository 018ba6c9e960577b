"""`promptfed export`: the result of a federation in a self-contained folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from promptfed.console.output import console, messages, print_json
from promptfed.export.adapted_model import AdaptedModel, weights_of
from promptfed.export.snippet import backbone_files, carries_backbone, snippet
from promptfed.sdk.client import Coordinator
from promptfed.sdk.operations import get_card, sign_card
from promptfed.sdk.result import FederationResult
from promptfed.shared.api import export_card
from promptfed.shared.cards.card_text import described, markdown, version
from promptfed.shared.clip import Backbone
from promptfed.shared.errors import BadInput, Failed, PromptfedError
from promptfed.shared.methods.core.spec_backbone import open_backbone
from promptfed.shared.plain_text import plain, size
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import AllowedBackbones
from promptfed.shared.tensors import method_part
from promptfed.shared.tensors.torch_tensors import decode, encode, state_hash

TRIES = 3  # attempts to get a card signed while its federation goes on
DIFFERS = "export-differs"
UNSIGNED = ("wrong-role",)  # the caller is a viewer


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export: class names that replace the spec's, and whether clients are numbered instead of named.

    ``merged``: also write the open_clip model with the state's weight changes merged in.
    """

    class_names: tuple[str, ...] | None = None
    anonymous: bool = False
    allow_backbone: AllowedBackbones = False
    merged: bool = False


def export(
    result: FederationResult,
    out: Path,
    options: ExportOptions,
    backbone: Backbone | None = None,
    coordinator: Coordinator | None = None,
) -> export_card.Card:
    """Write the export into ``out`` and return its card. A failure leaves no files behind.

    Args:
        result: the result of a simulation, or the one that ``coordinator`` returned.
        out: the folder, which must be new or empty.
        options: the parts to write.
        backbone: the backbone, if it is loaded already.
        coordinator: signs the card; without it the export is not signed.

    Raises:
        PromptfedError: the folder, the class names or the backbone cannot be used, or the coordinator refuses the card.
    """
    check_new(out)
    facts, model = result.facts, AdaptedModel.of(result.facts, result.state)
    if facts.hashes.state != state_hash(model.state):
        text = f"the coordinator's card of {facts.federation.name} is of another state: export it again"
        raise Failed(text)
    contents = _contents(result, model, options, backbone)
    for left in reversed(range(TRIES)):
        card, written = contents.with_card(facts.numbered() if options.anonymous else facts)
        if coordinator is None:
            break
        try:
            signed = coordinator.send(sign_card(facts.federation.id, facts.round, written[export_card.JSON_FILE])).view
            written[export_card.SIGNATURE_FILE] = f"{signed.signature}\n".encode()
            break
        except PromptfedError as error:
            if error.kind in UNSIGNED:
                why = f"The export is not signed: {plain(error)}"
                messages.print(why, highlight=False, markup=False, soft_wrap=True)
                break
            if error.kind != DIFFERS or not left:
                raise
        facts = coordinator.send(get_card(facts.federation.id, facts.round)).view  # the federation went on meanwhile
    _write(written, out)
    return card


@dataclass(frozen=True)
class Contents:
    """The contents of an export besides its card: the files, and the code that classifies with the class weights."""

    class_names: list[str] | None
    class_names_from: str | None
    use: export_card.Use
    snippet: str | None
    files: dict[str, bytes]
    listed: dict[str, export_card.CardFile]

    def with_card(self, facts: export_card.Facts) -> tuple[export_card.Card, dict[str, bytes]]:
        """The card, and all files with it."""
        card = export_card.Card(
            **dict(facts),
            class_names=self.class_names,
            class_names_from=self.class_names_from,
            use=self.use,
            files=self.listed,
            made=export_card.Made(at=datetime.now(UTC).isoformat(timespec="seconds"), promptfed=version()),
        )
        text = markdown(card, self.snippet).encode()
        card.files = dict(sorted({**self.listed, export_card.MARKDOWN_FILE: described(text, None)}.items()))
        body = (json.dumps(card.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n").encode()
        return card, {**self.files, export_card.MARKDOWN_FILE: text, export_card.JSON_FILE: body}


def _contents(
    result: FederationResult, model: AdaptedModel, options: ExportOptions, backbone: Backbone | None
) -> Contents:
    """All files except the card."""
    names, source = export_card.classes_of(result.federation)
    if options.class_names:
        names, source = list(options.class_names), export_card.GIVEN_NAMES
    why_none, weights = _why_no_weights(model, names), None
    files = {export_card.STATE_FILE: _exported(result.body)}
    if result.final_body:
        files[export_card.FINAL_FILE] = _exported(result.final_body)
    if why_none is None and names is not None:
        backbone = backbone or open_backbone_of(model, options.allow_backbone)
        weights = weights_of(model.serve(backbone, names))
        if weights is None:
            why_none = f"{model.terms.method['name']} needs promptfed's own towers, or texts that depend on the image"
        else:
            files[export_card.WEIGHTS_FILE] = encode(weights)
            files |= backbone_files(backbone) if carries_backbone(model.terms.backbone) else {}
    if options.merged:
        backbone = backbone or open_backbone_of(model, options.allow_backbone)
        files[export_card.MERGED_FILE] = encode(model.merged(backbone, names or ()))
    tensors = {export_card.STATE_FILE: model.state, export_card.WEIGHTS_FILE: weights}
    listed = {name: described(body, tensors.get(name)) for name, body in sorted(files.items())}
    alone = model.missing() is None and names is not None
    use = export_card.Use(open_clip=weights is not None, promptfed=alone, why_not_open_clip=why_none)
    code = snippet(model.terms.backbone, weights) if weights is not None else None
    return Contents(names, source, use, code, files, listed)


def _exported(body: bytes) -> bytes:
    """The method's part of a state: the very bytes where it has no other."""
    state, _ = decode(body)
    own = method_part(state)
    return body if len(own) == len(state) else encode(own)


def _why_no_weights(model: AdaptedModel, names: Sequence[str] | None) -> str | None:
    reason = model.missing()
    if reason is None and names is None:
        return "the federation names no classes, each client used its own: export again with --classes or --data"
    return reason


def open_backbone_of(model: AdaptedModel, allow: AllowedBackbones) -> Backbone:
    """The federation's backbone on the CPU. Raises PromptfedError if it cannot be loaded here."""
    return open_backbone(model.terms.backbone, allow_backbone=allow)


def check_new(out: Path) -> None:
    """Raise PromptfedError if ``out`` exists and is not an empty folder."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise BadInput(f"{out} is not an empty folder: give another one")
    except OSError as error:
        raise BadInput(f"cannot use {out}: {why(error)}") from None


def _write(files: dict[str, bytes], out: Path) -> None:
    """Write all files or none: they appear by one rename."""
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
        raise BadInput(f"cannot write {out}: {why(error)}") from None
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def show_export(card: export_card.Card, out: Path, as_json: bool) -> None:
    """Show the written files."""
    if as_json:
        print_json(card.model_dump(mode="json"))
        return
    total = sum(file.bytes for file in card.files.values())
    head = f"Wrote {out} ({size(total)}): {card.method['name']} of {card.federation.name}, round {card.round}."
    lines = [head, f"Read {export_card.MARKDOWN_FILE} in it: it says how to use the rest."]
    if card.use.why_not_open_clip:
        lines.append(f"No class weights for plain open_clip code: {card.use.why_not_open_clip}.")
    for line in lines:
        console.print(plain(line), highlight=False, markup=False, soft_wrap=True)
