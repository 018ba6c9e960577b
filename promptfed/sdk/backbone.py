"""The parts of a spec that need the backbone, which a coordinator does not have: fingerprint and contexts from words.

A spec is resolved here once (`resolve`); the other functions take a `FederationSpec`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from promptfed.sdk.client import CommandError, Exit, offences
from promptfed.shared.clip import Backbone, BackboneError, load_backbone, shape_of
from promptfed.shared.clip.embedded import EMBEDDED
from promptfed.shared.clip.weights import permits
from promptfed.shared.methods import check_fits, method_for, resolve_spec
from promptfed.shared.methods.core.interface import Method, MethodError, NeedsBackbone, ServerContext
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import AllowedBackbones, BackboneShape, BackboneSpec, FederationSpec, SpecError
from promptfed.shared.tensors.torch_tensors import encode

BACKBONE_FILE = "PROMPTFED_BACKBONE_FILE"
"""Variable with the file of weights that commands read instead of a download, unless another is given."""


def resolve(raw: Mapping[str, Any] | FederationSpec) -> FederationSpec:
    """Resolve a spec: every default is filled in. A resolved spec stays unchanged.

    Raises:
        CommandError: the spec is invalid; the text gives the dotted path of each error.
    """
    if isinstance(raw, FederationSpec):
        return raw
    try:
        return resolve_spec(dict(raw))
    except SpecError as error:
        raise CommandError(offences(error.errors), Exit.BAD_INPUT) from None


def spelt(backbone: Backbone | Mapping[str, Any] | str) -> dict[str, Any]:
    """The backbone as a spec names it: a loaded one's model and weights; a name's own weights, or random ones."""
    if isinstance(backbone, str):
        own = EMBEDDED.get(backbone)
        return {"model": backbone, "pretrained": own and own.PRETRAINED}
    if isinstance(backbone, Mapping):
        return dict(backbone)
    weights = backbone.pretrained or "random"
    return {"model": backbone.model_name, "pretrained": weights, "precision": backbone.precision}


def with_backbone(spec: FederationSpec, allow_backbone: AllowedBackbones) -> tuple[FederationSpec, bytes | None]:
    """The spec with the backbone's fingerprint and shape, and the initial state if it needs a backbone.

    Raises:
        CommandError: the backbone cannot be loaded, differs from the spec's, or does not suit the method.
    """
    return described(spec, open_backbone(spec.backbone, allow_backbone=allow_backbone))


def open_backbone(
    spec: BackboneSpec, *, allow_backbone: AllowedBackbones, device: str = "cpu", file: Path | None = None
) -> Backbone:
    """The backbone that a spec names, with the weights in ``file``, else in $PROMPTFED_BACKBONE_FILE if it is set.

    Raises:
        CommandError: the backbone cannot be loaded.
    """
    try:
        return load_backbone(
            spec.model,
            spec.pretrained,
            precision=spec.precision,
            device=device,
            allow_unregistered=permits(allow_backbone, spec),
            weights_file=file or (Path(os.environ[BACKBONE_FILE]) if os.environ.get(BACKBONE_FILE) else None),
        )
    except BackboneError as error:
        raise CommandError(str(error), Exit.BAD_INPUT) from None


def described(spec: FederationSpec, backbone: Backbone) -> tuple[FederationSpec, bytes | None]:
    """As `with_backbone`, for a backbone that is loaded already."""
    try:
        fingerprint = check_fingerprint(backbone, spec.backbone.fingerprint)
        shape, method = shape_of(backbone), method_for(spec)
        if spec.backbone.shape is not None and (other := spec.backbone.shape.differences(shape)):
            raise BackboneError(f"backbone.shape is not that of the backbone here: {other}; leave it out")
        check_fits(method, shape)
        if spec.class_names is not None and spec.template is not None:
            method.check_texts(backbone, tuple(spec.class_names), spec.template)
        described = BackboneSpec(**dict(spec.backbone) | {"fingerprint": fingerprint, "shape": shape})
        return spec.model_copy(update={"backbone": described}), _initial_state(method, spec, backbone, shape)
    except (BackboneError, MethodError) as error:
        raise CommandError(str(error), Exit.BAD_INPUT) from None


def check_fingerprint(backbone: Backbone, wanted: str | None) -> str:
    """The backbone's fingerprint.

    Raises:
        CommandError: the fingerprint is not ``wanted``.
    """
    if wanted not in (None, backbone.fingerprint):
        text = f"backbone.fingerprint is {wanted}, but the backbone here is {backbone.fingerprint}"
        raise CommandError(text, Exit.BAD_INPUT)
    return backbone.fingerprint


def _initial_state(method: Method, spec: FederationSpec, backbone: Backbone, shape: BackboneShape) -> bytes | None:
    names = tuple(spec.class_names) if spec.class_names is not None else None
    context = ServerContext(spec.training, shape, names, (), spec.seed, spec.rounds)
    try:
        method.initial_state(context, initial_draws(spec.seed))
    except NeedsBackbone:
        return encode(method.initial_state_with(backbone, context, initial_draws(spec.seed)))
    return None
