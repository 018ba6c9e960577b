"""Export of methods that change weights of the towers: a model with the changes merged in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.tensors import Tensors

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone


@runtime_checkable
class Merges(Protocol):
    """A method whose global state is a change of weights."""

    def merged(self, context: pf.ClientContext, payload: Tensors) -> Tensors:
        """The weights that the global state changes, by open_clip's names, for a payload of an evaluation."""


def checkpoint_of(backbone: Backbone, changed: Tensors) -> Tensors:
    """The backbone's model with the ``changed`` weights, as open_clip names and keeps them.

    Raises:
        MethodError: it is no model of open_clip's.
    """
    state: Tensors = backbone.model.state_dict()
    if not any(name.startswith("visual.") for name in state):
        raise pf.MethodError("this backbone is not an open_clip model: the changes stay in the state's own tensors")
    changed = {name: tensor.to(state[name].dtype) for name, tensor in changed.items()}
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in (state | changed).items()}
