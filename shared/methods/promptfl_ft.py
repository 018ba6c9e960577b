"""PromptFL+FT: PromptFL, whose global context each client fine-tunes on its own images before it is evaluated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class PromptFLFTHyper(pf.ContextHyper):
    """PromptFL's hyperparameters and the length of the fine-tuning."""

    finetune_epochs: int = pf.option(
        5, "epochs over the client's training images before an evaluation", ge=1, le=10_000
    )
    finetune_learning_rate: float | None = pf.option(
        None, "rate of the fine-tuning; default: training.learning_rate", gt=0, le=1000
    )


class TunedClassifier(pf.TextPromptClassifier):
    """Classifies with a context ``(m, d_t)`` that was tuned for it."""

    def __init__(self, context: pf.ClientContext, learned: Tensor):
        super().__init__(context, learned)
        self._learned = learned

    def among(self, context: pf.ClientContext) -> TunedClassifier:
        """The same context before other class names."""
        return TunedClassifier(context, self._learned)


class PromptFLFT(PromptFL):
    """Trains and aggregates as PromptFL; classifies with a context fine-tuned locally, which is not kept.

    Source: the baseline PromptFL+FT of Guo et al., "pFedPrompt", 2023, after Cheng et al., "Fine-tuning is Fine in
    Federated Learning", 2021. Neither gives the number of epochs.
    """

    name = "promptfl_ft"
    summary = "PromptFL whose global context each client fine-tunes on its own images before it is evaluated."
    paper = "Cheng et al., Fine-tuning is Fine in Federated Learning, 2021; PromptFL as above"
    personal = True
    protects = True
    fine_tunes = True
    Hyper = PromptFLFTHyper
    hyper: PromptFLFTHyper

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TextPromptClassifier:
        """Classifies with the fine-tuned context; where there is nothing to train on, with the global one."""
        learned = payload["context"]
        if len(context.train):
            learned = self._fine_tuned(context, learned)
        return TunedClassifier(context, learned)

    def _fine_tuned(self, context: pf.ClientContext, start: Tensor) -> Tensor:
        """The context ``(m, d_t)`` after the fine-tuning from the global one, ``start (m, d_t)``."""
        rate = self.hyper.finetune_learning_rate or context.training.learning_rate
        with torch.enable_grad():  # evaluations run without gradients
            learned, _ = pf.train_context(context.for_tuning(self.hyper.finetune_epochs, rate), start)
        return learned
