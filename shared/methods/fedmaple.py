"""FedMaPLe: MaPLe's deep text prompts and the visual prompts that linear maps make of them, averaged over clients.

Khattak et al., "MaPLe: Multi-modal Prompt Learning", 2023; averaged as in the tables of PLAN (Gong et al., 2024).
Notation as in `visual.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core import visual
from promptfed.shared.methods.core.visual import ImageClassifier, Towers, VisualHyper, drawn
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

MAPLE_DEPTH = 9  # of twelve blocks
TEXT = TensorSpec("text_prompts", ("depth", "m", "d_t"))
WEIGHT = TensorSpec("coupling_weight", ("depth", "d_v", "d_t"))
BIAS = TensorSpec("coupling_bias", ("depth", "d_v"))
STATE = (TEXT, WEIGHT, BIAS)


class FedMapleHyper(VisualHyper):
    """MaPLe's hyperparameters, with as many tokens as the methods that it is compared with here."""

    m: int = pf.option(8, "prompt tokens in each block, text and visual alike", ge=1, le=64)
    depth: int | None = pf.option(
        None, "blocks with prompts (J); default: 9, or all of the tower that has fewer", ge=1, le=256
    )


def coupled(tensors: Mapping[str, Tensor]) -> Tensor:
    """Visual prompts ``(depth, m, d_v)``: W_j·t + b_j of each text prompt token t of block j (MaPLe, section 3.2)."""
    made = torch.einsum("jmt,jvt->jmv", tensors[TEXT.name], tensors[WEIGHT.name])
    return made + tensors[BIAS.name][:, None]


class FedMaple(pf.Method):
    """Cross-entropy over text prompts and coupling maps; all of both travel, which is most of the cost."""

    name = "fedmaple"
    summary = "Deep text prompts with visual ones coupled to them by linear maps, averaged over clients."
    paper = "Khattak et al., MaPLe: Multi-modal Prompt Learning, 2023; averaged as in PLAN's tables"
    several_labels = True
    protects = True
    Hyper = FedMapleHyper
    hyper: FedMapleHyper
    needs = visual.NEEDS
    defaults = pf.defaults(20, epochs=1, batch_size=32, learning_rate=0.0035)

    # Server half

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """Text prompts and coupling maps."""
        return STATE

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """Widths of both towers, and how many of their first blocks have prompts."""
        hyper, shape = self.hyper, context.shape
        depth = hyper.depth
        if depth is None and shape.text_layers is not None and shape.vision_layers is not None:
            depth = min(MAPLE_DEPTH, shape.text_layers, shape.vision_layers)
        text = visual.text_dims(self.name, hyper.m, depth, context)
        seen = visual.vision_dims(self.name, depth, context)
        return {"m": hyper.m, "depth": text["depth_t"], "d_t": text["d_t"], "d_v": seen["d_v"]}

    @property
    def prompt_length(self) -> int:
        """As many as ``m``."""
        return self.hyper.m

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """Prompts N(0, 0.02²); maps uniform in ±1/√d_t."""
        dims = self.dims(context)
        bound = 1 / math.sqrt(dims["d_t"])
        uniform = {spec.name: (draws.uniform(*spec.resolve(dims)) * 2 - 1) * bound for spec in (WEIGHT, BIAS)}
        return {TEXT.name: drawn(draws, *TEXT.resolve(dims))} | uniform

    # Client half

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the global prompts and maps."""
        towers = Towers(context.backbone, self.hyper)
        classes = context.backbone.class_prompts(context.class_names, self.hyper.m)
        trained = {spec.name: pf.leaf(payload[spec.name], context.backbone) for spec in STATE}

        def logits(images: Tensor) -> Tensor:
            features = towers.images(images, coupled(trained))
            return towers.cosine(features, towers.text(trained[TEXT.name], classes))

        loss = visual.train_on_images(context, list(trained.values()), logits)
        return pf.TrainResult(trained, metrics={"loss": loss})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> ImageClassifier:
        """Classifies with the global prompts and maps."""
        towers = Towers(context.backbone, self.hyper)
        return ImageClassifier(visual.prompted_logits(towers, context, payload[TEXT.name], coupled(payload)))
