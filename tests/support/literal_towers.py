"""Features of a copy of the library's own image tower whose weights are leaves, for literal training steps."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor
from torch.func import functional_call

from promptfed.shared.clip import Backbone
from promptfed.shared.tensors import Tensors


def kind_of(parameter: str) -> tuple[str, int | None]:
    """Our kind, and the block, of one of open_clip's parameters."""
    parts = parameter.removeprefix("transformer.resblocks.").replace("attn.", "").replace("mlp.", "")
    number, _, rest = parts.partition(".")
    return (rest.replace(".", "_"), int(number)) if number.isdecimal() else (parts.replace(".", "_"), None)


def pooled(backbone: Backbone, state: Tensors, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Features before the projection with the state's changes in every block's W, and W's leaves by our kinds."""
    visual = deepcopy(backbone.model.visual)
    visual.proj = None
    frozen: dict[str, list[Tensor]] = {}
    for name, weight in visual.named_parameters():
        frozen.setdefault(kind_of(name)[0], []).append(weight)
    leaves = {
        kind: (torch.stack(frozen[kind]).reshape(state[kind].shape) + state[kind]).requires_grad_()
        for kind in state
        if kind in frozen
    }
    weights = {}
    for name, _ in visual.named_parameters():
        kind, number = kind_of(name)
        if kind in leaves:
            weights[name] = leaves[kind] if number is None else leaves[kind][number]
    features: Tensor = functional_call(visual, weights, (pixels,))
    return features, leaves
