"""Export of methods that change weights of the towers: a model with the changes merged in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from promptfed.shared.clip import Backbone


@dataclass(frozen=True)
class MergedTowers:
    """Weights of the towers by the names of `shared.clip.functional`, the changed ones among them."""

    visual: Mapping[str, Tensor] = field(default_factory=dict)
    text: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Merges(Protocol):
    """A method whose global state is a change of weights."""

    def merged(self, context: pf.ClientContext, payload: Tensors) -> MergedTowers:
        """The towers with the global state's changes, for a payload of an evaluation."""


def checkpoint_of(backbone: Backbone, towers: MergedTowers) -> Tensors:
    """The backbone's model with these weights, as open_clip names and keeps them.

    Raises:
        MethodError: it is no model of open_clip's, or a weight has no place in it.
    """
    state: Tensors = {name: tensor.detach() for name, tensor in backbone.model.state_dict().items()}
    if not any(name.startswith("visual.") for name in state):
        raise pf.MethodError("this backbone is not an open_clip model: the changes stay in the state's own tensors")
    # A functional tower's frozen weights are the module's own tensors, seen under other names.
    places = {(tensor.data_ptr(), tensor.numel()): name for name, tensor in state.items() if tensor.numel()}
    changed: Tensors = {}
    for frozen, merged in _pairs(backbone, towers):
        if merged.data_ptr() == frozen.data_ptr():
            continue
        name = places.get((frozen.data_ptr(), frozen.numel()))
        if name is None:
            raise pf.MethodError("a changed weight does not exist in open_clip's model")
        own = state[name]
        # A projection may be kept transposed there, which the shape does not tell if it is square.
        value = merged.T if own.ndim == 2 and frozen.stride() != own.stride() else merged
        changed[name] = value.reshape(own.shape).to(own.dtype)
    return {name: changed.get(name, tensor).cpu().contiguous().clone() for name, tensor in state.items()}


def _pairs(backbone: Backbone, towers: MergedTowers) -> list[tuple[Tensor, Tensor]]:
    """The frozen and the merged weight of each name."""
    visual = backbone.vision_tower().weights if towers.visual else {}
    text = backbone.text_tower().weights if towers.text else {}
    pairs = [(visual[name], weight) for name, weight in towers.visual.items()]
    return pairs + [(text[name], weight) for name, weight in towers.text.items()]
