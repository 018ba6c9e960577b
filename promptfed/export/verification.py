"""`promptfed verify`: checks the signature of an export and recomputes the parts that can be recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from promptfed.export.adapted_model import AdaptedModel, weights_of
from promptfed.export.export import open_backbone_of
from promptfed.export.model_card import backbone_files, carries_backbone, described, snippet, version
from promptfed.export.model_card_markdown import markdown
from promptfed.export.reading import OpenedExport, open_export, read_file
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.api.export_card import (
    BACKBONE_CONFIG,
    BACKBONE_WEIGHTS,
    GIVEN_NAMES,
    MARKDOWN_FILE,
    MERGED_FILE,
    WEIGHTS_FILE,
    Card,
)
from promptfed.shared.canonical import parse_json
from promptfed.shared.clip import Backbone
from promptfed.shared.spec.spec import AllowedBackbones
from promptfed.shared.tensors import TensorError, Tensors
from promptfed.shared.tensors.torch_tensors import decode

TOLERANCE = 1e-5  # tolerance between two machines that compute the same in float32


@dataclass(frozen=True)
class Verification:
    """A verified export; ``remarks`` list the further checks, and the checks that were not possible."""

    card: Card
    remarks: tuple[str, ...]


def verify_export(
    folder: Path | str,
    key: str | None,
    *,
    recompute: bool = True,
    allow_backbone: AllowedBackbones = False,
    backbone: Backbone | None = None,
) -> Verification:
    """Check an export against a coordinator's public key, and recompute the parts that can be recomputed.

    Args:
        folder: a folder that `promptfed export` wrote, or the archive (.zip) of the page.
        key: the public key in hexadecimal, from ``GET /v1/signing-key``. Without it the signature is not checked.
        recompute: load the backbone and recompute the class weights and the merged model.
        allow_backbone: names of a model or checkpoint outside open_clip's registry that may be loaded; True: any.
        backbone: the backbone, if it is loaded already.

    Raises:
        CommandError: the signature, a file or a recomputed part does not match the card.
    """
    opened = open_export(Path(folder), key, whole=True)
    files = {
        name: _tensors(opened, name)
        for name in (WEIGHTS_FILE, MERGED_FILE, BACKBONE_WEIGHTS)
        if name in opened.card.files
    }
    weights = files.get(WEIGHTS_FILE)
    remarks = [_names_remark(opened.card), _text_remark(opened, weights)]
    if files:
        remarks.append(
            _recomputed(opened, files, backbone, allow_backbone) if recompute else f"{_not(files)}: not asked for"
        )
    return Verification(opened.card, tuple(remark for remark in remarks if remark is not None))


def _tensors(opened: OpenedExport, name: str) -> Tensors:
    listed = opened.card.files[name]
    body = read_file(opened.folder, name, listed.bytes)
    try:
        tensors, _ = decode(body)
    except TensorError as error:
        raise CommandError(f"{opened.folder}: {name} is damaged: {error}", Exit.REFUSED) from None
    if described(body, tensors if listed.tensors is not None else None) != listed:
        raise CommandError(f"{opened.folder}: {name} is not the one that the card names", Exit.REFUSED)
    return tensors


def _names_remark(card: Card) -> str | None:
    """A remark on the origin of the class names."""
    return "the class names are the exporter's, not the federation's" if card.class_names_from == GIVEN_NAMES else None


def _text_remark(opened: OpenedExport, weights: Tensors | None) -> str | None:
    """Compare ``card.md`` with the text made from the signed card; None if they are equal."""
    card, name = opened.card, opened.card.method["name"]
    if card.made.promptfed != version():
        return f"{MARKDOWN_FILE} was written by {card.made.promptfed}, this is {version()}: its text was not compared"
    try:
        opened.model.make_method()
    except CommandError:
        return f"{MARKDOWN_FILE} was not compared with the card: this promptfed has no method {name}"
    text = markdown(card, snippet(card.backbone, weights) if weights is not None else None)
    if described(text.encode(), None) != card.files[MARKDOWN_FILE]:
        text = "it was changed before it was signed"
        raise CommandError(f"{opened.folder}: {MARKDOWN_FILE} does not match the card: {text}", Exit.REFUSED)
    return None


def _not(files: dict[str, Tensors]) -> str:
    return f"{', '.join(sorted(files))} not computed again"


def _recomputed(
    opened: OpenedExport, files: dict[str, Tensors], given: Backbone | None, allow: AllowedBackbones
) -> str:
    """Compare files with results recomputed by the backbone; a sentence that states the outcome."""
    model, names = opened.model, tuple(opened.card.class_names or ())
    try:
        backbone = given or open_backbone_of(model, allow)
        again = _computed(model, backbone, names, files)
    except CommandError as error:
        return f"{_not(files)}: {error}"
    for name, tensors in files.items():
        _expect_equal(opened, name, tensors, again[name])
    if BACKBONE_CONFIG in opened.card.files:
        body = read_file(opened.folder, BACKBONE_CONFIG, opened.card.files[BACKBONE_CONFIG].bytes)
        if parse_json(body) != parse_json(backbone_files(backbone)[BACKBONE_CONFIG]):
            raise CommandError(f"{opened.folder}: {BACKBONE_CONFIG} is not the backbone's", Exit.REFUSED)
    return f"{', '.join(sorted(files))} computed again with the backbone: the same"


def _computed(
    model: AdaptedModel, backbone: Backbone, names: tuple[str, ...], files: dict[str, Tensors]
) -> dict[str, Tensors | None]:
    """The recomputed tensors of each file; None if there are none."""
    weights = weights_of(model.serve(backbone, names)) if WEIGHTS_FILE in files else None
    merged = model.merged(backbone, names) if MERGED_FILE in files else None
    carried = None
    if BACKBONE_WEIGHTS in files and carries_backbone(model.terms.backbone):
        carried, _ = decode(backbone_files(backbone)[BACKBONE_WEIGHTS])
    return {WEIGHTS_FILE: weights, MERGED_FILE: merged, BACKBONE_WEIGHTS: carried}


def _expect_equal(opened: OpenedExport, name: str, given: Tensors, again: Tensors | None) -> None:
    if again is None or given.keys() != again.keys() or not all(_equal(given[key], again[key]) for key in given):
        text = "they are not what the state and the backbone give"
        raise CommandError(f"{opened.folder}: {name}: {text}", Exit.REFUSED)


def _equal(given: torch.Tensor, again: torch.Tensor) -> bool:
    if given.shape != again.shape or given.dtype != again.dtype:
        return False
    if not given.numel():
        return True
    apart = (given.double() - again.double()).abs().max()
    return bool(apart <= TOLERANCE * max(1.0, float(again.double().abs().max())))
