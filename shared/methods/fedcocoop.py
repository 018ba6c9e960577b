"""FedCoCoOp: a small network on the image's feature shifts the context, image by image; both are shared.

Source: Zhou et al., "Conditional Prompt Learning for Vision-Language Models" (CoCoOp), CVPR 2022, section 3.2, with
FedAvg as in the tables of FedPGP and FedTPG.

FedMaPLe: MaPLe's deep text prompts and the visual prompts that linear maps make of them, averaged over clients.
Source: Khattak et al., "MaPLe: Multi-modal Prompt Learning", 2023; averaged as in the tables of PLAN (Gong et al.,
2024). Notation as in `visual.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core import visual
from promptfed.shared.methods.core.visual import ImageClassifier, Towers, VisualHyper, drawn
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.arrays import double, single
from promptfed.shared.tensors.lazy import F, Tensor, torch

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone, ClassPrompts


META_NET = (*pf.layer("meta_net.narrow", "hidden", "d_e"), *pf.layer("meta_net.widen", "d_t", "hidden"))
STATE = (pf.CONTEXT, *META_NET)
MAPLE_DEPTH = 9  # of twelve blocks
TEXT = TensorSpec("text_prompts", ("depth", "m", "d_t"))
WEIGHT = TensorSpec("coupling_weight", ("depth", "d_v", "d_t"))
BIAS = TensorSpec("coupling_bias", ("depth", "d_v"))
MAPLE_STATE = (TEXT, WEIGHT, BIAS)


class FedCoCoOpHyper(pf.ContextHyper):
    """A learned context and the size of the meta-net."""

    reduction: int = pf.option(
        16, "the meta-net's hidden layer has d_e / reduction units; CoCoOp's is 16", ge=1, le=1024
    )


def _between(uniform: Any, bound: float) -> Any:
    """Uniform in ±``bound`` of ``uniform`` in 0 to 1, rounded once, as torch's ``uniform_`` rounds it."""
    limit = float(np.float32(bound))
    return single(double(uniform) * (2 * limit) - limit)


class FedCoCoOp(pf.SharedContextMethod):
    """CE of cosine logits under the contexts v_i + h(I(x)), one set for each image x; h is Linear-ReLU-Linear."""

    name = "fedcocoop"
    summary = "PromptFL whose context a shared meta-net shifts for each image."
    paper = "Zhou et al., Conditional Prompt Learning for Vision-Language Models (CoCoOp), 2022; averaged by FedAvg"
    several_labels = True
    protects = True
    Hyper = FedCoCoOpHyper
    hyper: FedCoCoOpHyper
    disclosures = (
        pf.AGGREGATE,
        pf.Disclosed(
            "operator",
            "mixtures of image features, perhaps those of single images: the meta-net's gradients are made of "
            "the features that it reads",
        ),
    )

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The context and the meta-net."""
        return STATE

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """The context's, ``d_e`` and the meta-net's hidden width."""
        d_e = context.shape.d_e
        return super().dims(context) | {"d_e": d_e, "hidden": max(1, d_e // self.hyper.reduction)}

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """PromptFL's start and a meta-net that does not shift it yet."""
        return super().initial_state(context, draws) | self._meta_net(context, draws)

    def initial_state_with(self, backbone: Backbone, context: pf.ServerContext, draws: Draws) -> Tensors:
        """The same, with a context made of words."""
        return super().initial_state_with(backbone, context, draws) | self._meta_net(context, draws)

    def _meta_net(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """First layer uniform in ±1/√d_e, second zero: training starts at the plain context (CoCoOp gives no start)."""
        dims = self.dims(context)
        bound, xp = 1 / math.sqrt(dims["d_e"]), draws.xp
        drawn = {spec.name: _between(draws.uniform(*spec.resolve(dims)), bound) for spec in META_NET[:2]}
        return drawn | {spec.name: xp.zeros(spec.resolve(dims), dtype=xp.float32) for spec in META_NET[2:]}

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs over context and meta-net; sends both."""
        backbone = context.backbone
        learned = pf.leaves(payload, backbone)
        prompts = pf.class_prompts(context, self.hyper.m)
        features, labels = context.train.features(), context.train.labels.to(backbone.device)
        loss_of = pf.ClassificationLoss(context)

        def loss(indices: Tensor) -> Tensor:
            # The loss is a sum over images: all parts but the last are backpropagated here, each graph freed in turn.
            total = torch.zeros((), device=backbone.device)
            part = total
            for rows in chunks(backbone, pf.sent_to(indices, backbone.device), len(prompts)):
                if part.requires_grad:
                    torch.autograd.backward(part)
                logits = conditional_logits(backbone, learned, features[rows], prompts)
                part = loss_of.each(logits, labels[rows]).sum() / len(indices)
                total = total + part.detach()
            return part + (total - part.detach())

        def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
            rows, state = pf.sent_to(indices, backbone.device), dict(zip(learned, copies, strict=True))
            logits = conditional_logits_each(backbone, state, features[rows], prompts)
            return loss_of.each(logits, labels[rows])

        final = pf.train(context, list(learned.values()), loss, objective=pf.Objective(units))
        return pf.TrainResult(learned, metrics={"loss": final})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """Classifies each image under a context of its own."""
        backbone, prompts = context.backbone, pf.class_prompts(context, self.hyper.m)
        state = {name: value.to(backbone.device) for name, value in payload.items()}

        def logits(features: Tensor) -> Tensor:
            parts = chunks(backbone, features, len(prompts))
            return torch.cat([conditional_logits(backbone, state, part, prompts) for part in parts])

        return pf.FeatureClassifier(logits)


def chunks(backbone: Backbone, images: Tensor, classes: int) -> Iterator[Tensor]:
    """Parts of ``images (B, ...)``, indices or features, that have at most ``texts_at_once`` prompted texts."""
    yield from torch.split(images, max(1, backbone.texts_at_once // classes))


def conditional_logits(backbone: Backbone, state: Tensors, features: Tensor, prompts: ClassPrompts) -> Tensor:
    """``(B, C)`` logits τ⁻¹·⟨I(x), T(v + h(I(x)), y)⟩ of normalised features ``(B, d_e)``."""
    hidden = F.relu(F.linear(features, state["meta_net.narrow.weight"], state["meta_net.narrow.bias"]))
    shift = F.linear(hidden, state["meta_net.widen.weight"], state["meta_net.widen.bias"])  # (B, d_t)
    contexts = state["context"] + shift.unsqueeze(1)  # (B, m, d_t)
    text = backbone.encode_prompts(contexts, prompts)  # (B, C, d_e)
    logits: Tensor = backbone.logit_scale * torch.einsum("bd,bcd->bc", features, text)
    return logits


def conditional_logits_each(backbone: Backbone, states: Tensors, features: Tensor, prompts: ClassPrompts) -> Tensor:
    """`conditional_logits` where each row of ``features (b, d_e)`` has one of ``states (b, *shape)``."""
    narrow = torch.einsum("bij,bj->bi", states["meta_net.narrow.weight"], features)
    hidden = F.relu(narrow + states["meta_net.narrow.bias"])
    shift = torch.einsum("bij,bj->bi", states["meta_net.widen.weight"], hidden) + states["meta_net.widen.bias"]
    text = backbone.encode_prompts(states["context"] + shift.unsqueeze(1), prompts)  # (b, C, d_e)
    logits: Tensor = backbone.logit_scale * torch.einsum("bd,bcd->bc", features, text)
    return logits


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
        return MAPLE_STATE

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
        trained = {spec.name: pf.leaf(payload[spec.name], context.backbone) for spec in MAPLE_STATE}

        def logits(images: Tensor) -> Tensor:
            features = towers.images(images, coupled(trained))
            return towers.cosine(features, towers.text(trained[TEXT.name], classes))

        loss = visual.train_on_images(context, list(trained.values()), logits)
        return pf.TrainResult(trained, metrics={"loss": loss})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> ImageClassifier:
        """Classifies with the global prompts and maps."""
        towers = Towers(context.backbone, self.hyper)
        return ImageClassifier(visual.prompted_logits(towers, context, payload[TEXT.name], coupled(payload)))
