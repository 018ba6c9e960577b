"""PromptFL (= FedCoOp): one context, trained in turn on each client's images, averaged by the coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor


class PromptFL(pf.SharedContextMethod):
    """Cross-entropy of cosine logits; the context is all that is trained and all that travels.

    Source: Guo et al., "PromptFL", 2023; the context is CoOp's (Zhou et al., 2022).
    """

    name = "promptfl"
    summary = "One shared context before the class names, averaged over clients by their numbers of samples."
    protects = True
    paper = "Guo et al., PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models, 2023"
    several_labels = True

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the global context ``(m, d_t)``; sends the trained one."""
        start = payload["context"]
        learned, loss = pf.train_context(context, start, self.penalty(context, start))
        return pf.TrainResult(update={"context": learned}, metrics={"loss": loss})

    def penalty(self, context: pf.ClientContext, start: Tensor) -> pf.Penalty | None:
        """What is added to the loss of a task that starts from ``start (m, d_t)``: nothing in PromptFL."""
        return None
