"""FedLoRA: changes of low rank in the attention of both towers, trained by clients and made one by the coordinator.

Notation: W a d×d matrix of attention, W + γ·B·A what is computed with, A ``(r, d)``, B ``(d, r)``; k adapted blocks of
a tower, q of their matrices. The template's texts go through the adapted text tower anew in every step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core import visual
from promptfed.shared.methods.core.text_features import spoken
from promptfed.shared.methods.core.visual import ImageClassifier, Towers, VisualHyper
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, Tensor, checkpointing, torch

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone
    from promptfed.shared.clip.towers.copies import PlainTower
    from promptfed.shared.clip.towers.text import LowRank

VISUAL, TEXT = "visual", "text"
MATRICES = 3  # of query, key and value


class FedLoRAHyper(VisualHyper):
    """Where changes of low rank are, and how large they are."""

    r: int = pf.option(2, "rank of each change", ge=1, le=256)
    alpha: float = pf.option(
        1.0, "α of the factor γ = α/√r before B·A, as CLIP-LoRA's released code has it", gt=0, le=1000
    )
    blocks: Literal["all", "last_k"] = pf.option("all", "which blocks of a tower")
    k: int = pf.option(1, "last_k: how many blocks, counted from the last", ge=1, le=256)
    towers: Literal["both", "visual", "text"] = pf.option("both", "which towers are adapted")
    dropout: float = pf.option(0.25, "of the input of A in training, a mask of its own for each matrix", ge=0, lt=1)


class FedLoRA(pf.Method):
    """A and B are averaged, which is not the average of B·A.

    Sources: CLIP-LoRA (Zanella & Ben Ayed, CVPRW 2024); FL2oRA (Singha et al., 2025), which averages it over clients.
    """

    name = "fedlora"
    summary = "Low-rank changes of the attention of both towers (LoRA), averaged over clients."
    paper = "Zanella & Ben Ayed, CLIP-LoRA, 2024; averaged as in FL2oRA (Singha et al., 2025)"
    Hyper = FedLoRAHyper
    hyper: FedLoRAHyper
    needs = visual.NEEDS
    defaults = pf.defaults(50, optimizer="adamw", learning_rate=2e-4, weight_decay=0.01, batch_size=32, epochs=1)

    def __init__(self, hyper: FedLoRAHyper):
        super().__init__(hyper)
        if hyper.towers == TEXT:
            self.needs = pf.Needs()

    @property
    def towers(self) -> tuple[str, ...]:
        """Which towers are adapted."""
        return (VISUAL, TEXT) if self.hyper.towers == "both" else (self.hyper.towers,)

    @property
    def disclosures(self) -> tuple[pf.Disclosed, ...]:
        """Of the towers that are adapted."""
        where = "both towers" if len(self.towers) > 1 else f"the {self.towers[0]} tower"
        return (pf.AGGREGATE, pf.Disclosed("operator", f"low-rank changes of attention in {where}"))

    # Server half

    def check_backbone(self, shape: pf.BackboneShape) -> None:
        """And towers of the plain kind."""
        super().check_backbone(shape)
        missing = [name for tower, name in ((VISUAL, "heads_v"), (TEXT, "heads_t")) if tower in self.towers]
        for name in missing:
            if getattr(shape, name) is None:
                tower = "image" if name == "heads_v" else "text"
                raise pf.MethodError(
                    f"{self.name} changes attention in the {tower} tower, and this backbone's is not of the plain "
                    f"kind, or its shape does not say {name}: take another backbone or other towers, or leave it out"
                )

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """A and B of each tower."""
        return tuple(spec for tower in self.towers for spec in (_a(tower), _b(tower)))

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """Sizes of both towers' factors."""
        shape, dims = context.shape, {"r": self.hyper.r, "q": MATRICES}
        for tower, width, layers in ((VISUAL, shape.d_v, shape.vision_layers), (TEXT, shape.d_t, shape.text_layers)):
            if tower not in self.towers:
                continue
            if width is None or layers is None:
                raise pf.MethodError(
                    f"{self.name} needs the width and the blocks of the {tower} tower: leave the shape out"
                )
            if self.hyper.blocks == "last_k" and self.hyper.k > layers:
                raise pf.MethodError(f"k = {self.hyper.k}, but the {tower} tower has {layers} blocks: lower it")
            if self.hyper.r > width:
                raise pf.MethodError(
                    f"r = {self.hyper.r} is more than the width {width} of the {tower} tower: lower it"
                )
            dims |= {f"d_{tower[0]}": width, f"k_{tower[0]}": self.hyper.k if self.hyper.blocks == "last_k" else layers}
        return dims

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """A uniform in ±1/√d, one draw for all; B zero, so that nothing is changed."""
        made, dims = {}, self.dims(context)
        for spec in self.state_tensors():
            shape, stream = spec.resolve(dims), context.draws_of(context.seed, "lora", spec.name)
            if spec.name.endswith("_b"):
                made[spec.name] = stream.xp.zeros(shape, dtype=stream.xp.float32)
            else:
                made[spec.name] = (stream.uniform(*shape) * 2 - 1) / math.sqrt(shape[-1])
        return made

    # Client half

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of CE(τ⁻¹·cos(I, T)) over the factors."""
        device, factors = context.backbone.device, pf.leaves(payload, context.backbone)
        model = _Adapted(self.hyper, context, factors)
        labels = context.train.labels.to(device)
        steps = iter(range(1 << 62))
        loss_of = pf.ClassificationLoss(context)

        def loss(indices: Tensor) -> Tensor:
            scores = model.logits(indices, next(steps))
            return loss_of(scores, labels[pf.sent_to(indices, device)])

        final = pf.train(context, list(factors.values()), loss, reads_images=VISUAL in self.towers)
        return pf.TrainResult(factors, {}, {"loss": final})

    def merged(self, context: pf.ClientContext, payload: Tensors) -> Tensors:
        """W + γ·B·A of each changed W of both towers."""
        model, texts = _received(self.hyper, context, payload), "text." * hasattr(context.backbone.model, "text")
        places = {VISUAL: "visual.", TEXT: texts}
        return {places[which] + name: w for which in self.towers for name, w in model.merged(which).items()}

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """Classifies with W + γ·B·A in the place of W, texts and images alike."""
        model = _received(self.hyper, context, payload)
        with torch.no_grad():
            text = model.text_features(None)
        if VISUAL not in self.towers:
            return pf.TextFeatureClassifier(context.backbone.logit_scale, text)
        merged, scale = model.merged_tower(), context.backbone.logit_scale
        return ImageClassifier(lambda images: scale * model.image_features(images, None, merged) @ text.T)


def _received(hyper: FedLoRAHyper, context: pf.ClientContext, payload: Tensors) -> _Adapted:
    device = context.backbone.device
    return _Adapted(hyper, context, {name: tensor.to(device) for name, tensor in payload.items()})


class _Adapted:
    """Both towers with their changes, for one task."""

    def __init__(self, hyper: FedLoRAHyper, context: pf.ClientContext, factors: Tensors):
        self._hyper, self._context, self._factors = hyper, context, factors
        self._backbone: Backbone = context.backbone
        self._gamma = hyper.alpha / math.sqrt(hyper.r)
        self._visual = self._backbone.vision_tower() if _a(VISUAL).name in factors else None
        self._text = self._backbone.text_tower() if _a(TEXT).name in factors else None
        if self._text is not None:
            template, names = context.template, context.class_names
            texts = [template.replace("{}", spoken(name)) for name in names]
            self._texts = self._text.texts(self._backbone.tokens(texts))

    def logits(self, indices: Tensor, step: int) -> Tensor:
        """``(B, C)`` in training; dropout's masks follow from the step."""
        if self._visual is None:
            images = self._context.train.features()[pf.sent_to(indices, self._backbone.device)]
        else:
            images = self.image_features(self._context.train.images(indices), step)
        return self._backbone.logit_scale * images @ self.text_features(step).T

    def image_features(self, images: Tensor, step: int | None, merged: PlainTower | None = None) -> Tensor:
        """``(B, d_e)`` normalised, of images ``(B, 3, H, W)``; by the branches, or by a ``merged`` tower."""
        tower, images = merged or self._visual, self._backbone.image_input(images)
        assert tower is not None

        def encode(part: Tensor, number: int) -> Tensor:
            low_rank = self._low_rank(VISUAL, tower.layers, step, number) if merged is None else {}
            with Towers(self._backbone, self._hyper).image_precision():
                rows = tower.run(tower.rows(part), low_rank=low_rank)
                return F.normalize(tower.project(tower.pool(rows)).float(), dim=-1)

        size = self._backbone.held_images
        if size is None or not torch.is_grad_enabled():
            return encode(images, 0)
        parts = enumerate(torch.split(images, size))
        return torch.cat(
            [checkpointing.checkpoint(encode, part, number, use_reentrant=False) for number, part in parts]
        )

    def text_features(self, step: int | None) -> Tensor:
        """``(C, d_e)`` normalised features of the template's texts."""
        tower = self._text
        if tower is None:
            return pf.template_features(self._backbone, self._context.template, self._context.class_names)
        low_rank = self._low_rank(TEXT, len(tower.blocks), step, 0)
        return F.normalize(tower.encode_texts(self._texts, low_rank).float(), dim=-1)

    def merged(self, which: str) -> Tensors:
        """A tower's changed weights, by its module's own names."""
        model = self._backbone.model
        holder = model.visual if which == VISUAL else getattr(model, "text", model)
        weights: Tensors = {}
        for number, low in self._low_rank(which, len(holder.transformer.resblocks), None, 0).items():
            place, change = f"transformer.resblocks.{number}.attn.", low.change()
            attention = holder.transformer.resblocks[number].attn
            weights[f"{place}in_proj_weight"] = attention.in_proj_weight.float() + change.flatten(0, 1)
        return weights

    def merged_tower(self) -> PlainTower:
        """A copy of the image tower with the changes in its weights."""
        tower = self._backbone.vision_tower().copy()
        tower.put(self.merged(VISUAL))
        return tower

    def _low_rank(self, tower: str, layers: int, step: int | None, number: int) -> dict[int, LowRank]:
        """The changes by block; without a ``step`` there is no dropout. One set of masks for one step and part."""
        from promptfed.shared.clip.towers.text import LowRank

        a, b = self._factors[_a(tower).name], self._factors[_b(tower).name]
        first, rate, draws = layers - len(a), 0.0, None
        if step is not None and self._hyper.dropout > 0:
            about = self._context
            rate, draws = (
                self._hyper.dropout,
                pf.generator(about.seed, about.round, about.client, "dropout", tower, step, number),
            )
        parts = enumerate(zip(a.unbind(0), b.unbind(0), strict=True))
        return {first + place: LowRank(own_a, own_b, self._gamma, rate, draws) for place, (own_a, own_b) in parts}


def _a(tower: str) -> TensorSpec:
    return TensorSpec(f"{tower}_a", (f"k_{tower[0]}", "q", "r", f"d_{tower[0]}"))


def _b(tower: str) -> TensorSpec:
    return TensorSpec(f"{tower}_b", (f"k_{tower[0]}", "q", f"d_{tower[0]}", "r"))
