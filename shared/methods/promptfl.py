"""PromptFL (= FedCoOp): one context, trained in turn on each client's images, averaged by the coordinator."""

from __future__ import annotations

from torch import Tensor

from shared.methods.base import ClientContext, TrainResult
from shared.methods.context import SharedContextMethod, train_context
from shared.tensors import Tensors


class PromptFL(SharedContextMethod):
    """Cross-entropy of cosine logits; the context is all that is trained and all that travels.

    Source: Guo et al., "PromptFL", 2023; the context is CoOp's (Zhou et al., 2022).
    """

    name = "promptfl"
    summary = "One shared context before the class names, averaged over clients by their numbers of samples."
    paper = "Guo et al., PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models, 2023"

    def train(self, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        """E epochs from the global context ``(m, d_t)``; sends the trained one."""
        learned, loss = train_context(context, payload["context"], self.penalty)
        return TrainResult(update={"context": learned}, metrics={"loss": loss})

    def penalty(self, learned: Tensor, start: Tensor) -> Tensor | None:
        """A term added to the loss, of the trained and the global context ``(m, d_t)``; none in PromptFL."""
        return None
