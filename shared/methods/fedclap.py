"""FedCLAP: a linear probe that starts at the text features and is held near them, more or less for each class.

Prototypes w_c start at the frozen text features t_c. A term Σ_c λ_c·‖w_c − t_c‖² holds them there. λ_c is the mean
zero-shot probability that the client's images of class c give to c: a class that the template recognises may move less.
The state is ``w − t``, so that the coordinator needs no text tower; it is FedTaskRes' residual with α = 1.

Source: Silva-Rodríguez et al., "A Closer Look at the Few-Shot Adaptation of Large Vision-Language Models", CVPR 2024
(arXiv 2312.12730). Summaries were read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.fedtaskres import FedTaskRes, FedTaskResHyper, Penalty
from promptfed.shared.tensors.lazy import F, no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor


class FedCLAPHyper(FedTaskResHyper):
    """The strength of the constraint."""

    alpha: float = pf.option(1.0, "weight of w − t in a class's weight; 1: CLAP's", ge=0, le=100)
    strength: float = pf.option(1.0, "factor before Σ λ_c·‖w_c − t_c‖²; 0: an unconstrained probe", ge=0, le=1e6)
    constraint: Literal["adaptive", "constant"] = pf.option(
        "adaptive", "λ_c from zero-shot probabilities of the client's images, or 1; always 1 under privacy"
    )


class FedCLAP(FedTaskRes):
    """FedTaskRes' exchange; each client computes λ from its own images, before each training."""

    name = "fedclap"
    summary = "A linear probe that starts at the text features, with a constraint that is adapted to each class."
    paper = (
        "Silva-Rodríguez et al., A Closer Look at the Few-Shot Adaptation of Large VLMs (CLAP), 2024, made federated"
    )
    takes_losses = True
    protects = True
    Hyper = FedCLAPHyper
    hyper: FedCLAPHyper

    def penalty(self, context: pf.ClientContext, text: Tensor) -> Penalty:
        """strength·Σ_c λ_c·‖w_c − t_c‖²."""
        constant = self.hyper.constraint == "constant" or context.protection is not None
        weights = torch.ones(len(text), device=text.device) if constant else multipliers(context, text)
        return lambda residuals: self.hyper.strength * (weights * residuals[0].square().sum(dim=-1)).sum()


@no_grad
def multipliers(context: pf.ClientContext, text: Tensor) -> Tensor:
    """λ ``(C,)``: of the images of class c the mean zero-shot probability of c; 1 for a class without images."""
    features, labels = context.train.features(), context.train.labels.to(text.device)
    shares = (context.backbone.logit_scale * features @ text.T).softmax(dim=-1)
    own = F.one_hot(labels, len(text)).to(shares.dtype)  # (N, C)
    counts = own.sum(dim=0)
    return torch.where(counts > 0, (own * shares).sum(dim=0) / counts.clamp_min(1), torch.ones_like(counts))
