"""FedPGP: a shared context, adapted by each client's private low-rank term, and held near CLIP by a contrastive loss.

Source: Cui et al., "Harmonizing Generalization and Personalization in Federated Prompt Learning" (FedPGP), ICML 2024;
equation numbers below are the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import Tensor, torch

Pairs = Literal["both", "positive_only", "negative_only"]


class FedPGPHyper(pf.WordsHyper):
    """A learned context, its low-rank adaptation and the weight of the contrastive loss."""

    b: int = pf.option(8, "bottleneck: rank of the adaptation U·V (Eq. 9)", ge=1, le=64)
    mu: float = pf.option(1.0, "weight μ of the contrastive loss (Eq. 13)", ge=0, le=1e6)
    tau_con: float = pf.option(0.5, "temperature of the contrastive loss (Eq. 12)", gt=0, le=1e3)
    pairs: Pairs = pf.option(
        "both",
        "the contrastive loss (both), or an ablation: 1 − cos(z_G, z_C) alone (positive_only), "
        "cos(z_G, z_i) alone (negative_only)",
    )
    full_rank: bool = pf.option(False, "ablation: an adaptation of full rank in the place of U·V; b is not used then")


class FedPGP(pf.SharedContextMethod):
    """L = CE(p_G + U·V) + μ·L_con (Eq. 13), trained over p_G, U and V; only p_G travels."""

    name = "fedpgp"
    summary = "A shared context, each client's private low-rank adaptation of it, and a contrastive loss with CLIP."
    paper = "Cui et al., Harmonizing Generalization and Personalization in Federated Prompt Learning (FedPGP), 2024"
    several_labels = True
    personal = True
    protects = True
    Hyper = FedPGPHyper
    hyper: FedPGPHyper
    shared = TensorSpec("global_context", ("m", "d_t"))
    defaults = pf.defaults(10, epochs=5, learning_rate=0.001)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs over the global context and the client's own adaptation; sends the global context alone."""
        backbone, hyper = context.backbone, self.hyper
        shared = pf.leaf(payload[self.shared.name], backbone)
        adaptation = pf.leaves(self.adaptation(context, private), backbone)
        prompted, cross_entropy = self.prompted(context), pf.BatchCrossEntropy(context)
        template = pf.template_features(backbone, context.template, context.class_names)

        def loss(indices: Tensor) -> Tensor:
            personal = shared + delta(adaptation)
            z_global, z_personal = prompted(torch.stack([shared, personal]))
            contrast = contrastive_loss(z_global, template, z_personal, hyper.tau_con, hyper.pairs)
            return cross_entropy(indices, z_personal) + hyper.mu * contrast

        def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
            personal = copies[0] + delta(dict(zip(adaptation, copies[1:], strict=True)))
            return cross_entropy.each(indices, prompted(personal))

        def common(parameters: Sequence[Tensor]) -> Tensor:
            personal = parameters[0] + delta(dict(zip(adaptation, parameters[1:], strict=True)))
            z_global, z_personal = prompted(torch.stack([parameters[0], personal]))
            return hyper.mu * contrastive_loss(z_global, template, z_personal, hyper.tau_con, hyper.pairs)

        final = pf.train(context, [shared, *adaptation.values()], loss, objective=pf.Objective(units, common))
        return pf.TrainResult({self.shared.name: shared}, adaptation, {"loss": final})

    def adaptation(self, context: pf.ClientContext, private: Tensors) -> Tensors:
        """The client's ``U (m, b)`` and ``V (b, d_t)``, or ``D (m, d_t)`` of full rank: trained, or as it starts.

        Every client draws its own start from N(0, 0.02²), the same one whenever it asks. Where contexts are changes of
        the template's words, V and D start at zero, as then the adaptation does, and U from one draw for all clients
        and seeds: V's first step goes by U, so that on few images its draw decided where a run ends.
        """
        shapes = self._shapes(context.backbone.d_t)
        if private:
            return {name: private[name] for name in shapes}
        own = (context.seed, "fedpgp", context.client)
        draws = pf.generator(*((0, "fedpgp") if self.of_template else own))
        std = {name: 0.0 if self.of_template and name != "U" else pf.INIT_STD for name in shapes}
        return {name: torch.randn(shape, generator=draws) * std[name] for name, shape in shapes.items()}

    def _shapes(self, d_t: int) -> dict[str, tuple[int, int]]:
        m, b = self.length, self.hyper.b
        return {"D": (m, d_t)} if self.hyper.full_rank else {"U": (m, b), "V": (b, d_t)}

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TextPromptClassifier:
        """Classifies with the personal context p_i (Eq. 10); with p_G where there is nothing to train on."""
        learned = payload[self.shared.name]
        if private or len(context.train):
            learned = learned + delta(self.adaptation(context, private))
        return self.classified(context, learned)


def delta(adaptation: Tensors) -> Tensor:
    """Δp ``(..., m, d_t)``: U·V (Eq. 9), or the term of full rank."""
    return adaptation["D"] if "D" in adaptation else adaptation["U"] @ adaptation["V"]


def contrastive_loss(z_global: Tensor, z_clip: Tensor, z_personal: Tensor, tau: float, pairs: Pairs) -> Tensor:
    """L_con (Eq. 12) of normalised features ``(C, d_e)``, the mean over the classes.

    −log softmax([cos(z_G, z_C), cos(z_G, z_i)]/τ)[0] pulls the global prompt to CLIP's and pushes it from the personal
    one. Gradients flow to both prompts. The ablations keep one pair each (section A.2, whose printed signs are
    the wrong way round).
    """
    positive, negative = (z_global * z_clip).sum(dim=-1), (z_global * z_personal).sum(dim=-1)
    if pairs == "positive_only":
        return (1 - positive).mean()
    if pairs == "negative_only":
        return negative.mean()
    similarities = torch.stack([positive, negative], dim=-1) / tau
    return -torch.log_softmax(similarities, dim=-1)[:, 0].mean()
