"""What FaST-PT trains for: its hyperparameters, with the paper's ablations, and the contrastive term (Eq. 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.fast_pt.domain_mixture import Mixture
from promptfed.shared.methods.fast_pt.style_transfer import StyleTransferHyper
from promptfed.shared.tensors.lazy import F

if TYPE_CHECKING:
    from torch import Tensor


class FastPTHyper(pf.ContextHyper, StyleTransferHyper):
    """Both prompts are of length m. The switches are the paper's ablations (Table 3)."""

    m: int = pf.option(4, "vectors of the global prompt, and of a domain prompt", ge=1, le=64)
    classifier_learning_rate: float = pf.option(
        0.01, "rate of the domain classifier; the prompts' is training.learning_rate", gt=0, le=1000
    )
    mixture: Mixture = pf.option(
        "hard", "an image's domain prompt: its likeliest domain's, or the average by the classifier's softmax"
    )
    merge_domains: bool = pf.option(
        False, "let clients whose descriptions are the same be one domain, instead of refusing"
    )
    prompts: Literal["both", "global", "domain"] = pf.option(
        "both", "ablation: the global prompt alone, or the domain prompts (and the classifier) alone"
    )
    contrastive: bool = pf.option(True, "ablation: the contrastive term; without a global prompt there is none")
    mst: bool = pf.option(True, "ablation: style transfer; else the own embeddings only")
    target_descriptions: bool = pf.option(
        False, "ablation: transfer to the evaluators' domains too, for the global prompt"
    )


def contrastive_loss(prompt: Tensor, description: Tensor, general: Tensor) -> Tensor:
    """−log(e^{sim(P^D,t)} / (e^{sim(P^D,t)} + e^{sim(P^D,P^G)})) of token embeddings ``(·, d_t)`` (Eq. 6).

    sim is the cosine of the means over tokens.
    """

    def similarity(other: Tensor) -> Tensor:
        return F.cosine_similarity(prompt.mean(dim=0), other.mean(dim=0), dim=0)

    return F.softplus(similarity(general) - similarity(description))
