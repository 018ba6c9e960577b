"""What the command does for the coordinator, which has no backbone: the fingerprint, and a context made of words."""

from __future__ import annotations

from typing import Any

from promptfed.sdk.client import CommandError
from promptfed.sdk.exit_codes import Exit
from promptfed.shared.clip import Backbone, BackboneError, load_backbone, shape_of
from promptfed.shared.methods import check_fits, method_for, resolve_spec
from promptfed.shared.methods.core.base import MethodError, NeedsBackbone, ServerContext
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec import BackboneShape, FederationSpec, SpecError
from promptfed.shared.tensors import encode


def with_backbone(raw: dict[str, Any], allow_backbone: bool) -> tuple[dict[str, Any], bytes | None]:
    """The spec with the backbone's fingerprint and shape, and the initial state where only a backbone can make it.

    Raises:
        CommandError: the spec or the backbone is wrong.
    """
    return described(raw, open_backbone(raw, allow_backbone=allow_backbone))


def open_backbone(raw: dict[str, Any], *, allow_backbone: bool, device: str = "cpu") -> Backbone:
    """The backbone that a spec names.

    Raises:
        CommandError: the spec is wrong, or the backbone cannot be loaded.
    """
    try:
        spec = resolve_spec(raw).backbone
        return load_backbone(
            spec.model,
            spec.pretrained,
            precision=spec.precision,
            device=device,
            allow_unregistered=allow_backbone,
        )
    except (SpecError, BackboneError) as error:
        raise CommandError(str(error), Exit.BAD_INPUT) from None


def described(raw: dict[str, Any], backbone: Backbone) -> tuple[dict[str, Any], bytes | None]:
    """As `with_backbone`, where the backbone is at hand.

    Raises:
        CommandError: the spec is wrong, or names another backbone.
    """
    try:
        spec = resolve_spec(raw)
        found = check_fingerprint(backbone, spec.backbone.fingerprint)
        shape = shape_of(backbone)
        check_fits(method_for(spec), shape)
        if spec.class_names is not None and spec.template is not None:
            method_for(spec).check_texts(backbone, tuple(spec.class_names), spec.template)
        section = spec.backbone.model_dump() | {"fingerprint": found, "shape": shape.model_dump()}
        return raw | {"backbone": section}, _initial_state(spec, backbone, shape)
    except (SpecError, BackboneError, MethodError) as error:
        raise CommandError(str(error), Exit.BAD_INPUT) from None


def check_fingerprint(backbone: Backbone, wanted: str | None) -> str:
    """The backbone's fingerprint.

    Raises:
        CommandError: it is not the one that is ``wanted``.
    """
    found = backbone.fingerprint
    if wanted not in (None, found):
        text = f"backbone.fingerprint is {wanted}, but the backbone here is {found}"
        raise CommandError(text, Exit.BAD_INPUT)
    return found


def _initial_state(spec: FederationSpec, backbone: Backbone, shape: BackboneShape) -> bytes | None:
    method = method_for(spec)
    names = tuple(spec.class_names) if spec.class_names is not None else None
    context = ServerContext(spec.training, shape, names, (), spec.seed, spec.rounds)
    try:
        method.initial_state(context, initial_draws(spec.seed))
    except NeedsBackbone:
        return encode(method.initial_state_with(backbone, context, initial_draws(spec.seed)))
    return None
