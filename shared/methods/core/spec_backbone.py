"""The parts of a spec that need the backbone, which a coordinator does not have: its fingerprint, its shape, and an
initial state that is made of words.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from promptfed.shared import clip
from promptfed.shared.clip.embedded import EMBEDDED
from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.clip.permission import permits
from promptfed.shared.methods import check_fits, method_for
from promptfed.shared.methods.core.interface import Method, NeedsBackbone, ServerContext
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import AllowedBackbones, BackboneShape, BackboneSpec, FederationSpec

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone

BACKBONE_FILE = "PROMPTFED_BACKBONE_FILE"
"""Variable with the file of weights that commands read instead of a download, unless another is given."""


def spelt(backbone: Backbone | Mapping[str, Any] | str) -> dict[str, Any]:
    """The backbone as a spec names it: a loaded one's model and weights; a name's own weights, or random ones."""
    if isinstance(backbone, str):
        embedded = EMBEDDED.get(backbone)
        return {"model": backbone, "pretrained": embedded and embedded.PRETRAINED}
    if isinstance(backbone, Mapping):
        return dict(backbone)
    weights = backbone.pretrained or "random"
    return {"model": backbone.model_name, "pretrained": weights, "precision": backbone.precision}


def with_backbone(spec: FederationSpec, allow_backbone: AllowedBackbones) -> tuple[FederationSpec, bytes | None]:
    """The spec with the backbone's fingerprint and shape, and the initial state if it needs a backbone.

    Raises:
        BackboneError, MethodError: it cannot be loaded, differs from the spec's, or does not suit the method.
    """
    return described(spec, open_backbone(spec.backbone, allow_backbone=allow_backbone))


def open_backbone(
    spec: BackboneSpec, *, allow_backbone: AllowedBackbones, device: str = "cpu", file: Path | None = None
) -> Backbone:
    """The backbone that a spec names, with the weights in ``file``, else in $PROMPTFED_BACKBONE_FILE if it is set.

    Raises:
        BackboneError: it cannot be loaded.
    """
    return clip.load_backbone(
        spec.model,
        spec.pretrained,
        precision=spec.precision,
        device=device,
        allow_unregistered=permits(allow_backbone, spec),
        weights_file=file or (Path(os.environ[BACKBONE_FILE]) if os.environ.get(BACKBONE_FILE) else None),
    )


def described(spec: FederationSpec, backbone: Backbone) -> tuple[FederationSpec, bytes | None]:
    """As `with_backbone`, for a backbone that is loaded already."""
    fingerprint, expected = backbone.fingerprint, spec.backbone.fingerprint
    if expected not in (None, fingerprint):
        raise BackboneError(f"backbone.fingerprint is {expected}, but the backbone here is {fingerprint}")
    shape, method = clip.shape_of(backbone), method_for(spec)
    if spec.backbone.shape is not None and (other := spec.backbone.shape.differences(shape)):
        raise BackboneError(f"backbone.shape is not that of the backbone here: {other}; leave it out")
    check_fits(method, shape)
    if spec.class_names is not None and spec.template is not None:
        method.check_texts(backbone, tuple(spec.class_names), spec.template)
    described = BackboneSpec(**dict(spec.backbone) | {"fingerprint": fingerprint, "shape": shape})
    return spec.model_copy(update={"backbone": described}), _initial_state(method, spec, backbone, shape)


def _initial_state(method: Method, spec: FederationSpec, backbone: Backbone, shape: BackboneShape) -> bytes | None:
    from promptfed.shared.tensors.torch_tensors import encode  # imports torch, which a coordinator does without

    names = tuple(spec.class_names) if spec.class_names is not None else None
    context = ServerContext(spec.training, shape, names, (), spec.seed, spec.rounds)
    try:
        method.initial_state(context, initial_draws(spec.seed))
    except NeedsBackbone:
        return encode(method.initial_state_with(backbone, context, initial_draws(spec.seed)))
    return None
