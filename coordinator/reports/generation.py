"""Prompts of a learned generator, from text features of class names that the caller's backbone has computed."""

from __future__ import annotations

import numpy as np

from promptfed.coordinator.aggregation.server_half import call
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.problems import InvalidRequest, NotAGenerator
from promptfed.coordinator.reports import rounds
from promptfed.shared.api.api_schemas import GenerateRequest, PromptsView, TensorView
from promptfed.shared.methods.core.interface.insights import GeneratesPrompts
from promptfed.shared.tensors import decode, method_part


def generate(registry: Registry, federation: Federation, request: GenerateRequest, round: int | None) -> PromptsView:
    """Prompts for the classes of ``request``, by the generator in the state after ``round`` (None: the latest).

    Raises:
        NotAGenerator: the method learns none.
        NoState: there is no such state.
        InvalidRequest: the features are not of the federation's backbone's width.
    """
    if not isinstance(federation.method, GeneratesPrompts):
        raise NotAGenerator(f"{federation.method.name} learns no prompt generator: GET .../prompts has its prompts")
    with registry.database.read() as session:
        stored = rounds.state_of(session, federation, round)
    context = federation.context()
    width, wanted = len(request.text_features[0]), context.shape.d_e
    if width != wanted:
        text = f"text features of {federation.name}'s backbone have {wanted} numbers; these have {width}"
        raise InvalidRequest(text, errors=[{"path": "body.text_features", "detail": text}])
    state, _ = decode(registry.blobs.read(stored.sha256))
    features = np.array(request.text_features, np.float32)
    made = call(federation, "generate", method_part(state), features, context)
    tensors = {name: TensorView.of(tensor) for name, tensor in sorted(made.items())}
    return PromptsView(round=stored.round, state_hash=stored.state_hash, tensors=tensors)
