"""What FaST-PT trains for: its hyperparameters, with the paper's ablations, and the contrastive term (Eq. 6)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.fast_pt.domain_mixture import Mixture
from promptfed.shared.methods.fast_pt.style_transfer import StyleTransferHyper


class FastPTHyper(pf.ContextHyper, StyleTransferHyper):
    """Both prompts are of length m. The switches are the paper's ablations (Table 3)."""

    m: int = Field(default=4, ge=1, le=64, description="vectors of the global prompt, and of a domain prompt")
    classifier_learning_rate: float = Field(
        default=0.01, gt=0, le=1000, description="rate of the domain classifier; the prompts' is training.learning_rate"
    )
    mixture: Mixture = Field(
        default="hard",
        description="an image's domain prompt: its likeliest domain's, or the average by the classifier's softmax",
    )
    merge_domains: bool = Field(
        default=False, description="let clients whose descriptions are the same be one domain, instead of refusing"
    )
    prompts: Literal["both", "global", "domain"] = Field(
        default="both",
        description="ablation: the global prompt alone, or the domain prompts (and the classifier) alone",
    )
    contrastive: bool = Field(
        default=True, description="ablation: the contrastive term; without a global prompt there is none"
    )
    mst: bool = Field(default=True, description="ablation: style transfer; else the own embeddings only")
    target_descriptions: bool = Field(
        default=False, description="ablation: transfer to the evaluators' domains too, for the global prompt"
    )


def contrastive_loss(prompt: Tensor, description: Tensor, general: Tensor) -> Tensor:
    """−log(e^{sim(P^D,t)} / (e^{sim(P^D,t)} + e^{sim(P^D,P^G)})) of token embeddings ``(·, d_t)`` (Eq. 6).

    sim is the cosine of the means over tokens.
    """

    def similarity(other: Tensor) -> Tensor:
        return F.cosine_similarity(prompt.mean(dim=0), other.mean(dim=0), dim=0)

    return F.softplus(similarity(general) - similarity(description))
