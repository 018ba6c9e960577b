"""Prompt+PER: PromptFL whose context has a shared first part and a private last one (FedPer, for prompts)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.private_context import PairLoss, PrivateContextMethod
from promptfed.shared.tensors import TensorSpec
from promptfed.shared.tensors.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class PromptFLPerHyper(pf.ContextHyper):
    """A learned context and where it is divided."""

    shared_tokens: int | None = pf.option(
        None, "m_s, first vectors of the context, which are shared; default: ⌊m/2⌋", ge=1, le=63
    )


class PromptFLPer(PrivateContextMethod):
    """PromptFL's training over [shared; private]; the mean is of the shared part, the other never leaves its client.

    Source: Arivazhagan et al., "Federated Learning with Personalization Layers" (FedPer), 2019, with prompt vectors in
    the place of layers, as the baseline Prompt+PER of Guo et al., "pFedPrompt", 2023. How that one divides the context
    is not printed.
    """

    name = "promptfl_per"
    summary = "PromptFL whose last context vectors are each client's own; the first ones are shared."
    paper = "Arivazhagan et al., Federated Learning with Personalization Layers (FedPer), 2019; PromptFL as above"
    several_labels = True
    protects = True
    Hyper = PromptFLPerHyper
    hyper: PromptFLPerHyper
    shared = TensorSpec("context", ("m_s", "d_t"))

    @property
    def shared_length(self) -> int:
        """``m_s``."""
        given = self.hyper.shared_tokens
        return self.hyper.m // 2 if given is None else given

    def check(self, spec: pf.FederationSpec) -> None:
        """Both parts must have a vector."""
        super().check(spec)
        m, m_s = self.hyper.m, self.shared_length
        if not 0 < m_s < m:
            text = f"of m = {m} context vectors {m_s} would be shared: give 0 < shared_tokens < m"
            raise pf.MethodError(f"{text}, or take promptfl (all are shared) or coop (none is)")

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``m_s`` and the text tower's width ``d_t``."""
        return {"m_s": self.shared_length, "d_t": pf.text_width(self.name, self.hyper.m, context)}

    def local_length(self, context: pf.ClientContext) -> int:
        """The private vectors, which stand next to the class name."""
        return self.hyper.m - self.shared_length

    def pair_loss(self, context: pf.ClientContext) -> PairLoss:
        """CE(τ⁻¹·I(x)·T([shared; private], y)): PromptFL's loss of the whole context."""
        prompts, cross_entropy = pf.class_prompts(context, self.hyper.m), pf.BatchCrossEntropy(context)

        def loss(indices: Tensor, shared: Tensor, local: Tensor) -> Tensor:
            return cross_entropy(indices, context.backbone.encode_prompts(torch.cat([shared, local]), prompts))

        return PairLoss(loss)

    def personal_classifier(self, context: pf.ClientContext, shared: Tensor, local: Tensor) -> pf.TextPromptClassifier:
        """Classifies with the whole context."""
        whole = torch.cat([shared.cpu(), local.cpu()])
        return pf.TextPromptClassifier(context, whole)
