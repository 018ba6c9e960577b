"""`promptfed verify`: an export's signature and what can be recomputed of it; federations that start from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from promptfed.export.adapted_model import AdaptedModel, weights_of
from promptfed.export.export import open_backbone_of
from promptfed.export.reading import OpenedExport, open_export, read_file
from promptfed.export.snippet import backbone_files, carries_backbone, snippet
from promptfed.sdk.arguments import checked
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
from promptfed.shared.cards.card_text import described, markdown, version
from promptfed.shared.clip import Backbone
from promptfed.shared.errors import BadInput, PromptfedError, Refused
from promptfed.shared.methods import TASK, method_for, resolve_spec
from promptfed.shared.methods.core.interface import ServerContext
from promptfed.shared.spec.spec import AllowedBackbones, FederationSpec, Origin, merged
from promptfed.shared.tensors import TensorError, Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode, state_hash

TOLERANCE = 1e-5  # tolerance between two machines that compute the same in float32
FORMER_SUMS = ("class_counts", "calibration", "calibration_sites")
"""Tensors that promptfed 0.3.0 added to a state beside the method's own: sums over the clients, which nothing reads."""


@dataclass(frozen=True)
class Verification:
    """A verified export; ``remarks`` list the further checks, and the checks that were not possible."""

    card: Card
    remarks: tuple[str, ...]


@checked
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
        allow_backbone: names of models outside open_clip's registry that may be loaded; True: any.
        backbone: the backbone, if it is loaded already.

    Raises:
        PromptfedError: the signature, a file or a recomputed part does not match the card.
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
        raise Refused(f"{opened.folder}: {name} is damaged: {error}") from None
    if described(body, tensors if listed.tensors is not None else None) != listed:
        raise Refused(f"{opened.folder}: {name} is not the one that the card names")
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
    except PromptfedError:
        return f"{MARKDOWN_FILE} was not compared with the card: this promptfed has no method {name}"
    text = markdown(card, snippet(card.backbone, weights) if weights is not None else None)
    if described(text.encode(), None) != card.files[MARKDOWN_FILE]:
        text = "it was changed before it was signed"
        raise Refused(f"{opened.folder}: {MARKDOWN_FILE} does not match the card: {text}")
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
    except PromptfedError as error:
        return f"{_not(files)}: {error}"
    for name, tensors in files.items():
        _expect_equal(opened, name, tensors, again[name])
    if BACKBONE_CONFIG in opened.card.files:
        body = read_file(opened.folder, BACKBONE_CONFIG, opened.card.files[BACKBONE_CONFIG].bytes)
        if parse_json(body) != parse_json(backbone_files(backbone)[BACKBONE_CONFIG]):
            raise Refused(f"{opened.folder}: {BACKBONE_CONFIG} is not the backbone's")
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
        raise Refused(f"{opened.folder}: {name}: {text}")


def _equal(given: torch.Tensor, again: torch.Tensor) -> bool:
    if given.shape != again.shape or given.dtype != again.dtype:
        return False
    if not given.numel():
        return True
    apart = (given.double() - again.double()).abs().max()
    return bool(apart <= TOLERANCE * max(1.0, float(again.double().abs().max())))


def continued(folder: Path, given: Mapping[str, Any], key: str | None = None) -> tuple[dict[str, Any], bytes]:
    """The spec of the export in ``folder`` under the fields that are ``given``, and its state as safetensors.

    What each client keeps private is not part of an export: clients of personalised methods begin anew with it. Such an
    export is not for 0 rounds.

    Raises:
        PromptfedError: it is no export, ``key`` has not signed it, its state does not fit the given method, or its
            training was protected and ``given`` does not say how this one is.
    """
    opened = open_export(folder, key)
    has, named = opened.card.method["name"], dict(given.get("method") or {}).get("name")
    if named not in (None, has):
        text = (
            f"the export in {folder} is of {has}, the spec names {named}: a federation continues with the same method"
        )
        raise BadInput(text)
    if given.get("rounds") == 0:
        missing = opened.model.missing()
        if missing is not None:
            raise BadInput(f"the export in {folder} cannot be evaluated: {missing}")
    else:
        _expect_protection(opened, given)
    state = {name: tensor for name, tensor in opened.state.items() if name not in FORMER_SUMS}
    origin = {"continues": state_hash(state), "origin": _origin(opened)}
    raw = merged(_spec(opened), dict(given)) | origin
    _expect_fit(resolve_spec(raw), state)
    return raw, encode(state)


def _expect_protection(opened: OpenedExport, given: Mapping[str, Any]) -> None:
    """Raise PromptfedError if protection, which a card does not hold as settings, would end unsaid."""
    card = opened.card
    without = {"privacy": (card.privacy, "{level: none}"), "secure_aggregation": (card.secure_aggregation, "null")}
    for section, (had, none) in without.items():
        if had is not None and section not in given:
            text = f"the export in {opened.folder} was trained with {section}, and the spec says nothing of it"
            raise BadInput(f"{text}: give {section}, or {section}: {none} to train without")


def _origin(opened: OpenedExport) -> dict[str, Any]:
    card = opened.card
    origin = Origin(card=f"sha256:{opened.digest}", federation=card.federation.name, licence=card.licence)
    return origin.model_dump(mode="json")


def _spec(opened: OpenedExport) -> dict[str, Any]:
    card = opened.card
    fields = {"method", "backbone", "template", "class_names", "rounds", "training", "seed", "licence"}
    settings = card.model_dump(mode="json", include=fields, exclude_none=True, exclude_unset=True)
    task = {TASK: card.method[TASK]} if TASK in card.method else {}
    return {"name": card.federation.name} | settings | task


def _expect_fit(spec: FederationSpec, state: Tensors) -> None:
    """Raise PromptfedError for a tensor that is missing, not the method's, or of another shape."""
    method = method_for(spec)
    expected = {each.name: each for each in method.state_tensors()}
    dims: Mapping[str, int] = {}
    if spec.backbone.shape is not None:
        names = tuple(spec.class_names) if spec.class_names is not None else None
        dims = method.dims(ServerContext(spec.training, spec.backbone.shape, names, (), spec.seed, spec.rounds))
    wrong = sorted(expected.keys() ^ state.keys())
    for name in expected.keys() & state.keys():
        has = tuple(state[name].shape)
        sizes = [dims.get(size) if isinstance(size, str) else size for size in expected[name].shape]
        # Some sizes, such as the number of clients, are known to the coordinator only.
        if len(has) != len(sizes) or any(size not in (None, found) for size, found in zip(sizes, has, strict=True)):
            wrong.append(name)
    if wrong:
        text = f"the export's state does not fit {method.name} with these settings ({', '.join(wrong)})"
        raise BadInput(f"{text}: keep the export's method and its settings")
