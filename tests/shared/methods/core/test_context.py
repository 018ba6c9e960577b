"""Round 0 is zero-shot: every method that starts at the template gives its logits before it has trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from promptfed.shared.clip import Backbone, load_backbone
from promptfed.shared.methods import METHODS, make_method, resolve_spec
from promptfed.shared.methods.core.context import WordsHyper
from promptfed.shared.methods.core.default_backbone import suitable
from promptfed.shared.methods.core.interface import ClientContext, ClientInfo, ServerContext
from promptfed.shared.methods.core.text_features import template_features
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import TEMPLATE, BackboneShape
from promptfed.shared.spec.training_terms import TrainingTerms
from tests.shared.methods.conftest import NAMES, MadeUpSplit
from tests.support.equality import assert_values

Make = Callable[..., ClientContext]
ADAPTERS = ("fedclip", "fedclipadapter", "fedlp", "fedtaskres")
AT_THE_TEMPLATE = [name for name in METHODS.own() if issubclass(METHODS[name].Hyper, WordsHyper)] + [*ADAPTERS]
BLURRY = "a blurry aerial photo of the big {}, seen from above."  # more words than vectors, and words behind
TEMPLATES = {
    TEMPLATE: TEMPLATE,
    BLURRY: BLURRY,
    "art {}": "art {}",  # fewer words
    "{} texture.": TEMPLATE,  # no word before the name
    "un{}": TEMPLATE,  # none that ends there
}


@lru_cache(maxsize=1)
def embedded(model: str) -> Backbone:
    return load_backbone(model, "embedded")


def round_zero(name: str, context: ClientContext, **hyper: Any) -> torch.Tensor:
    """Logits of the state that a federation begins with, by a client that has not trained."""
    raw = {"name": "zero", "method": {"name": name, **hyper}, "class_names": list(context.class_names)}
    spec = resolve_spec(raw)
    method, backbone = METHODS[name](METHODS[name].Hyper(**hyper)), context.backbone
    shape = BackboneShape(d_t=backbone.d_t, d_e=backbone.d_e, context_length=backbone.context_length)
    role = "trainer" if len(context.train) else "evaluator"
    client = ClientInfo(context.client, role, len(context.train), context.class_names)
    server = ServerContext(spec.training, shape, context.class_names, (client,), seed=3, rounds=spec.rounds)
    state = method.initial_state(server, initial_draws(3))
    own = replace(context, terms=TrainingTerms.of(spec))
    with torch.no_grad():
        classifier = method.classifier(own, method.payload(state, None, client, server), {})
        return classifier.logits(context.train, torch.arange(len(context.train.labels)))


BACKBONES = [(model, name) for name in AT_THE_TEMPLATE for model in suitable(make_method({"name": name}))]


@pytest.mark.parametrize(("model", "name"), sorted(BACKBONES))  # one backbone is held at a time
def test_round_zero_is_zero_shot(name: str, model: str, make_context: Make) -> None:
    backbone = embedded(model)
    features = F.normalize(torch.randn(9, backbone.d_e, generator=torch.Generator().manual_seed(2)), dim=-1)
    labels, plain = torch.zeros(9, dtype=torch.long), template_features(backbone, TEMPLATE, NAMES)
    kinds = [Untrained] if name in ("promptfl_ft", "pfedprompt") else [MadeUpSplit, Untrained]
    for kind, (template, of_a_context) in product(kinds, TEMPLATES.items()):
        made = replace(make_context(9), backbone=backbone, train=kind(features, labels))
        taken = of_a_context if name not in ADAPTERS else template
        wanted = template_features(backbone, taken, NAMES)
        assert_values(
            round_zero(name, replace(made, template=template)), backbone.logit_scale * features @ wanted.T, 1e-4
        )
        assert taken == TEMPLATE or float((wanted - plain).abs().max()) > 1e-3, (
            "so that another template would be noticed"
        )


class Untrained(MadeUpSplit):
    """Images of an evaluator. As a trainer, promptfl_ft tunes before it classifies, and pfedprompt adds its memory."""

    def __len__(self) -> int:
        return 0
