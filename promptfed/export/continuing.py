"""A federation that starts from an export: its spec, and the state that it begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from promptfed.export.reading import OpenedExport, open_export
from promptfed.sdk.backbone import resolve
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.methods import TASK, method_for
from promptfed.shared.methods.core.interface.base import MethodError, ServerContext
from promptfed.shared.spec.spec import FederationSpec, Origin, merged
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import encode, state_hash

FORMER_SUMS = ("class_counts", "calibration", "calibration_sites")
"""Tensors that promptfed 0.3.0 added to a state beside the method's own: sums over the clients, which nothing reads."""


def continued(folder: Path, given: Mapping[str, Any], key: str | None = None) -> tuple[dict[str, Any], bytes]:
    """The spec of the export in ``folder`` under the fields that are ``given``, and its state as safetensors.

    What each client keeps private is not part of an export: clients of personalised methods begin anew with it. Such an
    export is not for 0 rounds.

    Raises:
        CommandError: it is no export, ``key`` has not signed it, its state does not fit the given method, or its
            training was protected and ``given`` does not say how this one is.
    """
    opened = open_export(folder, key)
    has, wanted = opened.card.method["name"], dict(given.get("method") or {}).get("name")
    if wanted not in (None, has):
        text = (
            f"the export in {folder} is of {has}, the spec names {wanted}: a federation continues with the same method"
        )
        raise CommandError(text, Exit.BAD_INPUT)
    if given.get("rounds") == 0:
        missing = opened.model.missing()
        if missing is not None:
            raise CommandError(f"the export in {folder} cannot be evaluated: {missing}", Exit.BAD_INPUT)
    else:
        _expect_protection(opened, given)
    state = {name: tensor for name, tensor in opened.state.items() if name not in FORMER_SUMS}
    own = {"continues": state_hash(state), "origin": _origin(opened)}
    raw = merged(_spec(opened), dict(given)) | own
    _expect_fit(resolve(raw), state)
    return raw, encode(state)


def _expect_protection(opened: OpenedExport, given: Mapping[str, Any]) -> None:
    """Raise CommandError if protection, which a card does not hold as settings, would end unsaid."""
    card = opened.card
    without = {"privacy": (card.privacy, "{level: none}"), "secure_aggregation": (card.secure_aggregation, "null")}
    for section, (had, none) in without.items():
        if had is not None and section not in given:
            text = f"the export in {opened.folder} was trained with {section}, and the spec says nothing of it"
            raise CommandError(f"{text}: give {section}, or {section}: {none} to train without", Exit.BAD_INPUT)


def _origin(opened: OpenedExport) -> dict[str, Any]:
    card = opened.card
    origin = Origin(card=f"sha256:{opened.digest}", federation=card.federation.name, licence=card.licence)
    return origin.model_dump(mode="json")


def _spec(opened: OpenedExport) -> dict[str, Any]:
    card = opened.card
    fields = {
        "method",
        "backbone",
        "template",
        "class_names",
        "rounds",
        "training",
        "seed",
        "licence",
    }
    known = card.model_dump(mode="json", include=fields, exclude_none=True, exclude_unset=True)
    task = {TASK: card.method[TASK]} if TASK in card.method else {}
    return {"name": card.federation.name} | known | task


def _expect_fit(spec: FederationSpec, state: Tensors) -> None:
    """Raise CommandError for a tensor that is missing, not the method's, or of another shape."""
    method = method_for(spec)
    expected = {each.name: each for each in method.state_tensors()}
    dims: Mapping[str, int] = {}
    if spec.backbone.shape is not None:
        names = tuple(spec.class_names) if spec.class_names is not None else None
        try:
            dims = method.dims(ServerContext(spec.training, spec.backbone.shape, names, (), spec.seed, spec.rounds))
        except MethodError as error:
            raise CommandError(str(error), Exit.BAD_INPUT) from None
    wrong = sorted(expected.keys() ^ state.keys())
    for name in expected.keys() & state.keys():
        has = tuple(state[name].shape)
        sizes = [dims.get(size) if isinstance(size, str) else size for size in expected[name].shape]
        # Some sizes, such as the number of clients, are known to the coordinator only.
        if len(has) != len(sizes) or any(size not in (None, found) for size, found in zip(sizes, has, strict=True)):
            wrong.append(name)
    if wrong:
        text = f"the export's state does not fit {method.name} with these settings ({', '.join(wrong)})"
        raise CommandError(f"{text}: keep the export's method and its settings", Exit.BAD_INPUT)
