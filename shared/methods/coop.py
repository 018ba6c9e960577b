"""CoOp: each client trains its own context from a common start and never shares it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.seeds import Draws, initial_draws
from promptfed.shared.tensors import Tensors, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


class CoOp(pf.ContextMethod):
    """The local baseline: cross-entropy of cosine logits over a private context, without any exchange."""

    name = "coop"
    summary = "Each client trains a context of its own and never shares it."
    paper = "Zhou et al., Learning to Prompt for Vision-Language Models (CoOp), 2022"
    several_labels = True
    personal = True
    unprotected = "it sends nothing up; withhold evaluations"

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """Empty: the coordinator holds nothing."""
        return ()

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """The empty state: clients draw the common start themselves."""
        return {}

    def current(self, context: pf.ClientContext, private: Tensors) -> Tensor:
        """The client's context ``(m, d_t)``: the trained one, or the common start."""
        if "context" in private:
            return private["context"]
        return self.start(context.backbone, initial_draws(context.seed))

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the client's own context; sends no tensor."""
        learned, loss = pf.train_context(context, self.current(context, private))
        return pf.TrainResult(update={}, private={"context": learned}, metrics={"loss": loss})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TextPromptClassifier:
        """Classifies with the client's context; evaluators, which do not train, use the common start."""
        return pf.TextPromptClassifier(context, self.current(context, private))
