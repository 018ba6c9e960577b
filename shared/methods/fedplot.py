"""FedPLOT: several shared contexts, matched with an image's patches by balanced transport (PLOT, federated).

Source: Chen et al., "PLOT: Prompt Learning with Optimal Transport for Vision-Language Models", ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.patch_texts import PLAN_METRICS, PatchTextClassifier, PatchTextLogits, Transport
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, torch

if TYPE_CHECKING:
    from torch import Tensor

    from promptfed.shared.clip import Backbone


class FedPLOTHyper(pf.ContextHyper):
    """Several learned contexts, and how patches and prompts are matched."""

    prompts: int = pf.option(4, "N, contexts that each class is described with", ge=1, le=16)
    epsilon: float = pf.option(0.1, "weight ε of the plan's entropy", ge=0.01, le=10)
    iterations: int = pf.option(100, "most pairs of scaling steps of a plan", ge=1, le=10_000)
    threshold: float = pf.option(1e-2, "relative change of a plan's column scaling at which it is done", ge=0, lt=1)
    transport: Literal["balanced", "average"] = pf.option(
        "balanced", "PLOT's plan, or the mean similarity to all contexts"
    )
    pooled_weight: float = pf.option(
        0.0, "weight of the pooled feature's logit; 1 in PLOT's ImageNet runs", ge=0, le=1e3
    )


class FedPLOT(pf.SharedContextMethod):
    """CE of q·Σ_pn T_pn·⟨g_p, z^n⟩ over N shared contexts, T constant for gradients; the mean is index by index.

    Each context starts from a draw of its own (equal ones would stay equal), the same at every client.
    """

    name = "fedplot"
    summary = "Several shared contexts for every class, matched with an image's patches by optimal transport."
    paper = "Chen et al., PLOT: Prompt Learning with Optimal Transport for Vision-Language Models, 2023"
    needs = pf.Needs(patch_tokens=True)
    Hyper = FedPLOTHyper
    hyper: FedPLOTHyper
    metrics = ("loss", *PLAN_METRICS)
    shared = TensorSpec("contexts", ("N", "m", "d_t"))
    defaults = pf.defaults(epochs=1, batch_size=32, learning_rate=0.002)

    @property
    def plans(self) -> Transport:
        """The settings of the transport plans."""
        hyper = self.hyper
        return Transport(hyper.transport, 1.0, hyper.epsilon, hyper.iterations, hyper.threshold, hyper.pooled_weight)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``N``, ``m`` and the text tower's width ``d_t``."""
        return {"N": self.hyper.prompts, **super().dims(context)}

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """N draws from N(0, 0.02²); NeedsBackbone where words are part of them."""
        drawn = [super(FedPLOT, self).initial_state(context, draws) for _ in range(self.hyper.prompts)]
        return {self.shared.name: draws.xp.stack([state[self.shared.name] for state in drawn])}

    def start(self, backbone: Backbone, draws: Draws) -> Tensor:
        """Contexts ``(N, m, d_t)`` that end with the given words; what stands before these differs."""
        drawn = [super(FedPLOT, self).start(backbone, draws) for _ in range(self.hyper.prompts)]
        if len(drawn) > 1 and torch.equal(drawn[0], drawn[1]):
            raise pf.MethodError(
                f"context_init fills all m = {self.hyper.m} vectors, so that the {len(drawn)} contexts would stay "
                "equal for ever: raise m, use fewer words, or prompts: 1"
            )
        return torch.stack(drawn)

    def contexts(self, state: Tensors, context: pf.ServerContext, class_features: Mapping[str, Tensor]) -> Tensors:
        """Each of the contexts."""
        return {f"contexts[{index}]": vectors for index, vectors in enumerate(state.get(self.shared.name, ()))}

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the shared contexts; sends the trained ones."""
        backbone, split = context.backbone, context.train
        learned = pf.leaf(payload[self.shared.name], backbone)
        prompts, labels = pf.class_prompts(context, self.hyper.m), split.labels.to(backbone.device)
        logits = PatchTextLogits(backbone.logit_scale, self.plans)

        def loss(indices: Tensor) -> Tensor:
            text = backbone.encode_prompts(learned, prompts, normalize=False)
            return F.cross_entropy(logits(split, indices, text), labels[pf.sent_to(indices, labels.device)])

        final = pf.train(context, [learned], loss)
        metrics = {"loss": final} | logits.statistics.metrics()
        return pf.TrainResult({self.shared.name: learned}, metrics=metrics)

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """With the shared contexts."""
        return PatchTextClassifier(context, self.plans, payload[self.shared.name])
