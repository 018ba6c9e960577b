"""Results of every method with states that nothing has trained: each number lies away from its start."""

from __future__ import annotations

from typing import Any

import torch

from promptfed.export.adapted_model import AdaptedModel
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.messages import Domain
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core.interface import ClientInfo, NeedsBackbone, ServerContext
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.training_terms import TrainingTerms

NAMES = ("anchor", "sun", "umbrella", "pair of scissors")
DOMAINS = (Domain(name="sketch", description="a sketch of a {}"), Domain(name="neon", description="a neon {}"))
TERMS = ("method", "training", "rounds", "seed")


def adapted(backbone: Backbone, name: str, **hyper: Any) -> AdaptedModel:
    """A result of the method after all rounds of two trainers."""
    spec = resolve_spec({"name": "x", "method": {"name": name, **hyper}, "class_names": list(NAMES)})
    known = {"model": backbone.model_name, "pretrained": backbone.pretrained, "fingerprint": backbone.fingerprint}
    described = spec.backbone.model_copy(update={**known, "shape": shape_of(backbone)})
    clients = tuple(ClientInfo(site, "trainer", 8, NAMES, domain) for site, domain in zip("ab", DOMAINS, strict=True))
    context = ServerContext(spec.training, shape_of(backbone), NAMES, clients, 0, spec.rounds)
    method = make_method(spec.method)
    try:
        state = method.initial_state(context, initial_draws(0))
    except NeedsBackbone:
        state = method.initial_state_with(backbone, context, initial_draws(0))
    draws = torch.Generator().manual_seed(1)
    moved = {
        key: value + 0.02 * torch.randn(value.shape, generator=draws) if value.is_floating_point() else value
        for key, value in ((key, torch.as_tensor(value)) for key, value in state.items())
    }
    given = {field: getattr(spec, field) for field in TERMS}
    terms = TrainingTerms(class_names=None, backbone=described, template="a photo of a {}.", **given)
    return AdaptedModel(terms, spec.rounds, DOMAINS, moved)
