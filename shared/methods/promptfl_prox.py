"""PromptFL with FedProx's proximal term: the trained context is held near the global one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.promptfl import PromptFL

if TYPE_CHECKING:
    from torch import Tensor


class PromptFLProxHyper(pf.ContextHyper):
    """PromptFL's hyperparameters and the weight of the proximal term."""

    mu: float = pf.option(1.0, "weight μ of (μ/2)·‖ctx − global‖²; FedProx's own grid ends at 1", ge=0, le=1e6)


class PromptFLProx(PromptFL):
    """CE + (μ/2)·‖ctx − global‖² (Li et al., "Federated Optimization in Heterogeneous Networks", 2020, Eq. 2)."""

    name = "promptfl_prox"
    summary = "PromptFL with a proximal term that holds each client's context near the global one."
    paper = "Li et al., Federated Optimization in Heterogeneous Networks (FedProx), 2020; PromptFL as above"
    several_labels = True
    protects = True
    Hyper = PromptFLProxHyper
    hyper: PromptFLProxHyper

    def penalty(self, context: pf.ClientContext, start: Tensor) -> pf.Penalty:
        """(μ/2)·‖ctx − global‖² of contexts ``(m, d_t)``."""
        fixed = start.to(context.backbone.device)
        return lambda learned, text: self.hyper.mu / 2 * (learned - fixed).square().sum()
