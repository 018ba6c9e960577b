"""The check of a spec's section ``tuning``, and its candidates with everything that they leave open filled in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from promptfed.shared.methods.core.interface.base import Method, MethodError, NeedsBackbone, ServerContext
from promptfed.shared.methods.core.registry import MethodRegistry as Methods
from promptfed.shared.seeds import INITIAL, draws
from promptfed.shared.spec.spec import BackboneShape, FederationSpec, SpecError
from promptfed.shared.spec.tuning import Candidate

OF_THE_METHOD = ("learning_rate", "optimizer")
"""Settings of the spec's training that fit its own method alone: other candidates have their own or the default."""
ANY_SHAPE = BackboneShape(d_t=8, d_v=8, d_e=8, text_layers=2, vision_layers=2, context_length=16)


def check_tuning(spec: FederationSpec) -> None:
    """Raise MethodError if candidates cannot be compared in a federation of ``spec``."""
    tuning, privacy = spec.tuning, spec.privacy
    if tuning is None:
        return
    if tuning.chosen is not None or spec.trial is not None:
        raise MethodError("chosen and trial are set by the coordinator: leave them out")
    if spec.held_out:
        raise MethodError("the candidates are tested on tuning.held_out: leave held_out out")
    if spec.continues is not None:
        raise MethodError("a federation that continues an export has its method: leave continues or tuning out")
    if spec.secure_aggregation is not None:
        raise MethodError("with secure sums accuracies stay at the sites, and nothing can be compared: leave one out")
    if privacy.protects_clients:
        raise MethodError("the noise of level client is accounted for one training: leave one of the two out")
    if privacy.protects_records and privacy.noise_multiplier is None:
        raise MethodError("privacy.epsilon covers one training, and each trial costs more: give noise_multiplier")
    if privacy.protects_records and privacy.evaluations != "noisy":
        raise MethodError("held-out accuracies have to leave the sites under noise: give privacy.evaluation noisy")


def with_candidates(
    spec: FederationSpec,
    raw: dict[str, Any],
    resolve: Callable[[dict[str, Any]], FederationSpec],
    methods: Methods,
) -> FederationSpec:
    """The spec with resolved candidates, its own method first. A resolved spec stays unchanged.

    ``raw``: the spec as it was given; ``resolve`` resolves a spec with a candidate's method.

    Raises:
        SpecError: a candidate cannot be run, or there is only one.
    """
    if spec.tuning is None:
        return spec
    others = spec.model_dump(mode="json", exclude={"tuning", "training"})
    shared = {key: value for key, value in raw.get("training", {}).items() if key not in OF_THE_METHOD}
    candidates, errors = [_candidate(spec)], []
    if _needs_backbone(methods[spec.method["name"]], spec):
        errors.append({"path": "tuning", "detail": "the spec's own method starts from words, which takes a backbone"})
    for number, given in enumerate(spec.tuning.candidates):
        path = f"tuning.candidates.{number}"
        try:
            resolved = resolve(others | {"method": given.method, "training": shared | given.training})
        except SpecError as error:
            errors += [{**offence, "path": f"{path}.{offence['path']}"} for offence in error.errors]
            continue
        name = resolved.method["name"]
        if methods.package(name) is not None:
            errors.append({"path": path, "detail": f"{name} is of a package: only promptfed's own are compared"})
        if methods[name].fine_tunes and spec.privacy.protects_records:
            errors.append({"path": path, "detail": f"{name} fine-tunes without noise: its accuracies stay"})
        if _needs_backbone(methods[name], resolved):
            errors.append({"path": path, "detail": f"{name} starts from words, which takes a backbone to compute"})
        if (candidate := _candidate(resolved)) not in candidates:
            candidates.append(candidate)
    if not errors and len(candidates) < 2:
        errors = [{"path": "tuning.candidates", "detail": "all are the spec's own method: give another"}]
    if errors:
        raise SpecError(errors)
    return spec.model_copy(update={"tuning": spec.tuning.model_copy(update={"candidates": candidates})})


def _candidate(spec: FederationSpec) -> Candidate:
    return Candidate(method=spec.method, training=spec.training.model_dump(mode="json"))


def _needs_backbone(kind: type[Method], spec: FederationSpec) -> bool:
    """Whether the coordinator alone cannot make the method's initial state, whatever the backbone."""
    given = {key: value for key, value in spec.method.items() if key in kind.Hyper.model_fields}
    method = kind(kind.Hyper.model_validate(given))
    context = ServerContext(spec.training, ANY_SHAPE, ("a", "b"), (), spec.seed, spec.rounds)
    try:
        method.initial_state(context, draws(spec.seed, INITIAL))
    except NeedsBackbone:
        return True
    except Exception:  # this shape, or no client: whether the real ones fit is checked when they are known
        return False
    return False
