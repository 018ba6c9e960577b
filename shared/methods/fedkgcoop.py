"""FedKgCoOp: PromptFL whose text features are held near the template's (KgCoOp, federated as FedTPG's tables do)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.promptfl import PromptFL

if TYPE_CHECKING:
    from torch import Tensor


class FedKgCoOpHyper(pf.ContextHyper):
    """PromptFL's hyperparameters and the weight of the knowledge-guided term."""

    w: float = pf.option(8.0, "weight of 1 − mean cosine to the template's text features; KgCoOp's λ", ge=0, le=1e6)


class FedKgCoOp(PromptFL):
    """CE + w·(1 − mean over classes of cos(T(ctx, y), T(template, y))).

    Source: Yao et al., "Visual-Language Prompt Tuning with Knowledge-guided Context Optimization" (KgCoOp), CVPR 2023,
    Eq. 4-5, whose squared distance of normalised features is twice this term.
    """

    name = "fedkgcoop"
    summary = "PromptFL with a term that holds the prompted text features near the template's."
    paper = "Yao et al., Visual-Language Prompt Tuning with Knowledge-guided Context Optimization (KgCoOp), 2023"
    several_labels = True
    protects = True
    Hyper = FedKgCoOpHyper
    hyper: FedKgCoOpHyper

    def penalty(self, context: pf.ClientContext, start: Tensor) -> pf.Penalty:
        """w·(1 − mean cosine) of text features ``(C, d_e)``."""
        known = pf.template_features(context.backbone, context.template, context.class_names)
        return lambda learned, text: self.hyper.w * (1 - (text * known).sum(dim=-1).mean())
