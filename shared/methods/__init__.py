"""The methods by name, and the resolved form of a spec.

To add a method, add its file here, or install a package that provides one (`registry`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pkgutil import iter_modules
from typing import Any

from pydantic import ValidationError

from promptfed.shared.methods.core.costs import with_noise
from promptfed.shared.methods.core.default_backbone import default_backbone, refusal_of, suitable
from promptfed.shared.methods.core.interface import Method, MethodError, ServerContext
from promptfed.shared.methods.core.refusals import (
    check_compression,
    check_privacy,
    check_rounds,
    check_rule,
    check_secure,
    check_selection,
    check_training,
)
from promptfed.shared.methods.core.registry import MethodRegistry, UnusableMethod, description, swept_training
from promptfed.shared.methods.core.several_labels import for_several_labels
from promptfed.shared.spec.sections import SelectionSpec
from promptfed.shared.spec.spec import BackboneShape, FederationSpec, SpecError, TrainingSpec, merged, parse_spec
from promptfed.shared.versions import RELEASE

FAMILIES = {
    "fedavg": ("fedavg", "fedbabu", "fedprox", "perfedavg", "singleset_full"),
    "fedcocoop": ("fedcocoop", "fedmaple"),
    "fedrep": ("fedrep", "fedrod"),
    "fedvpt": ("fedpr", "fedvpt", "fedvpt_deep", "singleset_vpt"),
    "promptfl": (
        *("coop", "fedkgcoop", "promptfl", "promptfl_amp", "promptfl_ft", "promptfl_per", "promptfl_prox"),
        "promptfolio",
    ),
}
"""Files with more than one method. Every other file and folder here, but ``core``, is the method of its name."""

log = logging.getLogger("promptfed.methods")

ANY_SHAPE = BackboneShape(
    d_t=8, d_v=8, d_e=8, text_layers=12, vision_layers=12, context_length=77, patch_size=8, patch_tokens=4,
    mlp_width=32, positions=5, heads_v=1, heads_t=1,
)  # fmt: skip
"""A backbone that all methods can run with."""

TASK, MULTI_LABEL = "task", "multi_label"
"""The key of a resolved method that is for images with several labels, as the spec's ``task`` says."""


def _own_methods() -> dict[str, str]:
    """The modules of the methods, by the methods' names, sorted."""
    files = [module.name for module in iter_modules(__path__) if module.name != "core"]
    return {name: f"{__name__}.{file}" for name, file in sorted((n, f) for f in files for n in FAMILIES.get(f, (f,)))}


METHODS = MethodRegistry(_own_methods())


class UnknownMethod(SpecError):
    """There is no method of this name."""


def method_class(name: str) -> type[Method]:
    """The class of a method.

    Raises:
        UnknownMethod: there is no method of this name.
        SpecError: the package that provides the method cannot be used.
    """
    refusal: type[SpecError] = SpecError
    try:
        return METHODS[name]
    except UnusableMethod as error:
        detail = str(error)
    except KeyError:
        near = get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else f"promptfed {RELEASE} has none of this name, "
        refusal, detail = UnknownMethod, f"there is no method {name!r}; {hint}`promptfed methods` lists them"
    raise refusal([{"path": "method.name", "detail": detail}])


def make_method(settings: dict[str, Any]) -> Method:
    """The method of ``{"name": ..., hyperparameter: value, ...}``.

    Raises:
        SpecError: unknown method or hyperparameter, or a value out of range, with its path.
    """
    kind = method_class(settings["name"])
    values = {key: value for key, value in settings.items() if key not in ("name", TASK)}
    try:
        hyper = kind.Hyper.model_validate(values)
    except ValidationError as error:
        raise SpecError.from_validation(error, "method", kind.Hyper) from None
    if settings.get(TASK, MULTI_LABEL) != MULTI_LABEL:
        raise SpecError([{"path": f"method.{TASK}", "detail": f"only {MULTI_LABEL} is written here: leave it out"}])
    return (kind if TASK not in settings else _for_several_labels(kind))(hyper)


def _for_several_labels(kind: type[Method]) -> type[Method]:
    """The class for images with several labels. Raises SpecError if there is none."""
    if not kind.can_take_several_labels():
        able = ", ".join(name for name in METHODS if METHODS[name].can_take_several_labels())
        text = f"{kind.name} does not train on images with several labels: take one of {able}"
        raise SpecError([{"path": TASK, "detail": text}])
    return for_several_labels(kind)


def method_for(spec: FederationSpec) -> Method:
    """The method that ``spec`` names, with its hyperparameters."""
    return make_method(spec.method)


def has_rate(spec: FederationSpec) -> bool:
    """Whether the method of ``spec`` uses the learning rate, as far as it is here to be asked."""
    kind = METHODS.get(spec.method["name"])
    return kind is None or "learning_rate" not in kind.ignores


def runnable(shape: BackboneShape) -> list[str]:
    """Names of the methods that can run with a backbone of ``shape``, by their default hyperparameters."""
    context = ServerContext(TrainingSpec(), shape, None, (), seed=0, rounds=1)
    return [name for name, kind in METHODS.items() if _runs(kind(kind.Hyper()), context)]


def _runs(method: Method, context: ServerContext) -> bool:
    if refusal_of(method, context.shape) is not None:
        return False
    try:
        method.dims(context)
    except Exception:  # our methods raise MethodError; a package's method may raise anything
        return False
    return True


def check_fits(method: Method, shape: BackboneShape) -> None:
    """Raise MethodError if the method cannot run with a backbone of ``shape``.

    The text lists embedded backbones with which it can, and methods that can run with this one.
    """
    try:
        method.check_backbone(shape)
    except MethodError as error:
        able = f"Take the backbone {' or '.join(suitable(method)) or 'of another kind'}"
        text = f"{error}. {able}; with this one run one of: {', '.join(runnable(shape)) or 'none'}"
        raise MethodError(text) from None


def with_default_backbone(raw: Mapping[str, Any], data: Collection[str] = ()) -> tuple[dict[str, Any], str | None]:
    """``raw`` with the backbone that it leaves open, and a sentence that says which and why; None where it names one.

    ``data``: the URIs of all images, where they are known.
    """
    given, named = raw.get("backbone", {}), raw.get("method")
    if not isinstance(given, Mapping) or "model" in given or not isinstance(named, Mapping):
        return dict(raw), None
    try:
        kind = method_class(str(named.get("name")))
        method = make_method(merged(kind.defaults, dict(raw))["method"])
    except SpecError:
        return dict(raw), None  # whose error the caller meets
    model, why = default_backbone(method, data)
    return {**raw, "backbone": {**given, "model": model}}, f"Backbone {model}: {why}."


def needs_class_names(raw: dict[str, Any]) -> bool:
    """Whether ``raw`` lacks nothing but a list of the classes, as for methods with a row for each class."""

    def works(names: tuple[str, ...] | None) -> bool:
        try:
            spec = resolve_spec(raw if names is None else {**raw, "class_names": list(names)})
            context = ServerContext(spec.training, ANY_SHAPE, names, (), spec.seed, spec.rounds)
            method_for(spec).dims(context)
        except (SpecError, MethodError):
            return False
        return True

    return raw.get("class_names") is None and not works(None) and works(("a", "b"))


def resolve_spec(raw: Mapping[str, Any]) -> FederationSpec:
    """Resolve a spec: omitted fields get the method's defaults.

    Raises:
        SpecError: the spec is invalid; each error has a dotted path.
    """
    raw, why = with_default_backbone(raw)
    if why is not None:
        log.info("%s", why)
    spec, method = _parts(raw)
    named = {"name": method.name, **method.hyper.model_dump(), **_added(spec)}
    resolved = spec.model_copy(update={"method": named})
    if spec.stop is not None and spec.selection is None:
        resolved = resolved.model_copy(update={"selection": SelectionSpec(metric=spec.stop.metric)})
    checks: list[tuple[str, Callable[[], object]]] = [
        ("method", lambda: method.check(resolved)),
        ("training", lambda: check_training(method, resolved)),
        ("aggregation", lambda: check_rule(method, resolved)),
        ("compression", lambda: check_compression(method, resolved)),
        ("secure_aggregation", lambda: check_secure(method, resolved)),
        ("privacy", lambda: check_privacy(method, resolved)),
        ("rounds", lambda: check_rounds(resolved)),
        ("selection", lambda: check_selection(method, resolved)),
    ]
    if resolved.class_names is not None:
        names = tuple(resolved.class_names)
        checks.append(("class_names", lambda: method.check_classes(names)))
    errors = []
    for path, check in checks:
        try:
            check()
        except MethodError as error:
            errors.append({"path": path, "detail": str(error)})
    if errors:
        raise SpecError(errors)
    try:
        resolved = with_noise(method, resolved)
    except MethodError as error:
        raise SpecError([{"path": "privacy.noise_multiplier", "detail": str(error)}]) from None
    return resolved


def _parts(raw: dict[str, Any]) -> tuple[FederationSpec, Method]:
    """The spec and its method. Raises SpecError with all errors of the spec and of the method's part."""
    named = raw.get("method")
    errors: list[dict[str, str]] = []
    refusal: type[SpecError] = SpecError
    kind = spec = method = None
    if isinstance(named, dict) and isinstance(named.get("name"), str):
        try:
            kind = method_class(named["name"])
        except SpecError as error:
            errors, refusal = error.errors, type(error)
    defaults = kind.defaults if kind is not None else {}
    try:
        spec = parse_spec(raw, defaults)
        spec = spec if kind is None else _as_swept(spec, raw, kind)
    except SpecError as error:
        errors = errors + error.errors
    if kind is not None:
        try:
            method = make_method(merged(defaults, raw)["method"] | (_added(spec) if spec is not None else {}))
        except SpecError as error:
            errors = errors + error.errors
    if spec is None or method is None:
        raise refusal(errors)
    return spec, method


def _added(spec: FederationSpec) -> dict[str, Any]:
    """What a method has beside its hyperparameters."""
    return {TASK: MULTI_LABEL} if spec.task == MULTI_LABEL else {}


def _as_swept(spec: FederationSpec, raw: dict[str, Any], kind: type[Method]) -> FederationSpec:
    swept = swept_training(raw, kind, spec.backbone.model_dump())
    return spec.model_copy(update={"training": spec.training.model_copy(update=swept)})


def describe(name: str) -> dict[str, Any]:
    """The answer of ``GET /v1/methods/{name}``: summary, paper, phases with tensors, hyperparameters and needs."""
    return description(method_class(name))
