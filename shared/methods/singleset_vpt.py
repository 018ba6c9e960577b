"""SingleSet-VPT: visual prompts that each client trains for itself, from a common start, and never shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.visual import ImageClassifier
from promptfed.shared.methods.fedvpt import PROMPTS, VisualPromptMethod
from promptfed.shared.seeds import initial_draws
from promptfed.shared.tensors import Tensors, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


class SingleSetVPT(VisualPromptMethod):
    """The local baseline of pFedPG's tables. It starts like `fedvpt`, so the two differ only in sharing."""

    name = "singleset_vpt"
    summary = "Each client trains visual prompts of its own and never shares them."
    paper = "Jia et al., Visual Prompt Tuning (VPT), 2022; SingleSet-VPT in pFedPG's tables (Yang et al., 2023)"
    personal = True
    unprotected = "it sends nothing up; withhold evaluations"

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """Empty: the coordinator holds nothing."""
        return ()

    def current(self, context: pf.ClientContext, private: Tensors) -> Tensor:
        """The client's prompts ``(depth, m, d_v)``: what it has trained, or the start that all have in common."""
        if PROMPTS.name in private:
            return private[PROMPTS.name]
        backbone = context.backbone
        depth = backbone.vision_layers if self.hyper.depth is None else self.hyper.depth
        start: Tensor = self.start(depth, backbone.d_v, backbone.patch_size, initial_draws(context.seed))
        return start

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the client's own prompts; sends no tensor."""
        prompts, head, metrics = self.train_prompts(context, self.current(context, private), private)
        return pf.TrainResult(update={}, private={PROMPTS.name: prompts, **head}, metrics=metrics)

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> ImageClassifier:
        """Classifies with the client's own prompts and head; an evaluator, which trains none, has the start."""
        return self.classify(context, self.current(context, private), private)
