"""FedProx: FedAvg whose clients are held near the weights that they received."""

from __future__ import annotations

from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core import visual
from promptfed.shared.methods.core.heads import Head
from promptfed.shared.methods.core.trained_tower import TrainedTower
from promptfed.shared.methods.core.weights import WeightMethod, WeightsHyper
from promptfed.shared.tensors.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class FedProxHyper(WeightsHyper):
    """FedAvg's hyperparameters and the weight of the proximal term."""

    mu: float = pf.option(0.01, "weight of the proximal term; its paper tries 0.001, 0.01, 0.1 and 1", ge=0, le=1000)


class FedProx(WeightMethod):
    """CE + (μ/2)·Σ‖W − W^r‖² over all that travels, W^r as received.

    Source: Li et al., "Federated Optimization in Heterogeneous Networks", 2020.
    """

    name = "fedprox"
    summary = "FedAvg of the image tower with a penalty on the distance to the received weights."
    paper = "Li et al., Federated Optimization in Heterogeneous Networks (FedProx), 2020"
    several_labels = True
    Hyper = FedProxHyper
    hyper: FedProxHyper

    def extra_loss(self, tower: TrainedTower, head: Head) -> visual.Term | None:
        """The proximal term."""
        if self.hyper.mu == 0:
            return None
        moving = [tower.leaves[kind] for kind in self.shared_kinds if kind in tower.leaves]
        received = [(leaf, leaf.detach().clone()) for leaf in [*moving, *head.parameters]]

        def term(indices: Tensor, inputs: Tensor, logits: Tensor) -> Tensor:
            distance = torch.stack([(leaf - begun).square().sum() for leaf, begun in received]).sum()
            return self.hyper.mu / 2 * distance

        return term
