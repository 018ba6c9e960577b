"""FedProx: FedAvg whose clients are held near the weights that they received."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from promptfed.shared.methods.core import visual
from promptfed.shared.methods.core.heads import Head
from promptfed.shared.methods.core.trained_tower import TrainedTower
from promptfed.shared.methods.core.weights import WeightMethod, WeightsHyper


class FedProxHyper(WeightsHyper):
    """FedAvg's hyperparameters and the weight of the proximal term."""

    mu: Annotated[
        float, Field(ge=0, le=1000, description="weight of the proximal term; its paper tries 0.001, 0.01, 0.1 and 1")
    ] = 0.01


class FedProx(WeightMethod):
    """CE + (μ/2)·Σ‖W − W^r‖² over all that travels, W^r as received.

    Source: Li et al., "Federated Optimization in Heterogeneous Networks", 2020.
    """

    name = "fedprox"
    summary = "FedAvg of the image tower with a penalty on the distance to the received weights."
    paper = "Li et al., Federated Optimization in Heterogeneous Networks (FedProx), 2020"
    Hyper = FedProxHyper
    hyper: FedProxHyper

    def extra_loss(self, tower: TrainedTower, head: Head) -> visual.Term | None:
        """The proximal term."""
        if self.hyper.mu == 0:
            return None
        distance = squared_distance(tower, head, self.shared_kinds)

        def term(indices: Tensor, images: Tensor, logits: Tensor) -> Tensor:
            return self.hyper.mu / 2 * distance(indices, images, logits)

        return term


def squared_distance(tower: TrainedTower, head: Head, kinds: Iterable[str]) -> visual.Term:
    """Σ‖W − W^r‖² over ``kinds`` and a linear head, from where they are now."""
    moving: Mapping[str, Tensor] = {kind: tower.leaves[kind] for kind in kinds if kind in tower.leaves}
    pairs = [(leaf, leaf.detach().clone()) for leaf in [*moving.values(), *head.parameters]]

    def term(indices: Tensor, images: Tensor, logits: Tensor) -> Tensor:
        return torch.stack([(leaf - begun).square().sum() for leaf, begun in pairs]).sum()

    return term
