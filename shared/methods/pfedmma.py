"""pFedMMA: adapters beside the upper blocks of both towers; what is in their middle is shared by towers and clients.

Notation: ``k`` pairs of blocks, counted from the top of both towers; ``r`` the adapters' width, ``d`` a tower's. The
adapter of a block is A(z) = U·φ(S·φ(D·ln_1(z))), with biases; D and U are a client's and a tower's own, S ``(r, r)``
is one for both towers, and averaged.

Source: Ghiasvand et al., "pFedMMA: Personalized Federated Fine-Tuning with Multi-Modal Adapter for Vision-Language
Models", ICLR 2026 (arXiv 2507.05394); adapters of MMA (Yang et al., CVPR 2024). A summary and the code were read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core import visual
from promptfed.shared.methods.core.text_features import spoken
from promptfed.shared.methods.core.visual import CHUNK, CacheBlocks, check_kept_blocks
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.seeds import Draws, DrawsOf
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor

    from promptfed.shared.clip import Backbone
    from promptfed.shared.clip.towers.functional import Adapter

VISUAL, TEXT = "visual", "text"
WIDTHS = {VISUAL: "d_v", TEXT: "d_t"}
MIDDLE = (TensorSpec("shared_weight", ("k", "r", "r")), TensorSpec("shared_bias", ("k", "r")))
PAIRS = 8  # blocks 5 to 12 of 12


class PFedMMAHyper(pf.Hyperparameters):
    """The adapters, and what of them is shared."""

    cache_blocks: CacheBlocks = False
    r: int = pf.option(32, "width of the adapters", ge=1, le=4096)
    k: int | None = pf.option(
        None, f"pairs of blocks with adapters, from the top; default: {PAIRS}, or all there are", ge=1, le=256
    )
    alpha: float = pf.option(0.001, "α, weight of what an adapter adds", ge=0, le=1000)
    scale_gradients: bool = pf.option(
        True, "adapters learn by their gradient divided by α, as released; else α makes it tiny"
    )
    activation: Literal["relu", "gelu"] = pf.option("relu", "φ: the code's, or a summary's")
    towers: Literal["both", "visual", "text"] = pf.option("both", "which towers have adapters")
    share: Literal["middle", "none", "all"] = pf.option("middle", "what is averaged: S alone, nothing, or D and U too")


def with_gradient_times(value: Tensor, factor: float) -> Tensor:
    """``value``, whose gradient is multiplied by ``factor``."""
    scaled = value.view_as(value)
    if scaled.requires_grad:
        scaled.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return scaled


def adapted(own: Mapping[str, Tensor], pair: int, tower: str, hyper: PFedMMAHyper) -> Adapter:
    """(M1) α·A of a block, of its input behind ln_1 ``(B, R, d)``; (M3) with gradients as ``scale_gradients`` says."""
    act: Callable[[Tensor], Tensor] = F.relu if hyper.activation == "relu" else F.gelu
    parts = [(f"{tower}_down_weight", f"{tower}_down_bias"), ("shared_weight", "shared_bias")]
    parts.append((f"{tower}_up_weight", f"{tower}_up_bias"))

    def add(normed: Tensor) -> Tensor:
        rows = with_gradient_times(normed, hyper.alpha) if hyper.scale_gradients else normed
        for number, (weight, bias) in enumerate(parts):
            rows = act(rows) if number else rows
            rows = F.linear(rows, own[weight][pair].to(rows.dtype), own[bias][pair].to(rows.dtype))
        rows = hyper.alpha * rows
        return with_gradient_times(rows, 1 / hyper.alpha) if hyper.scale_gradients else rows

    return add


class AdaptedTowers:
    """Features of both towers under adapters; what lies below them is computed without gradients."""

    def __init__(self, context: pf.ClientContext, hyper: PFedMMAHyper):
        self._context, self._hyper, self._backbone = context, hyper, context.backbone
        self._kinds = kinds_of(hyper)
        if TEXT in self._kinds:
            self._text_below()

    def _text_below(self) -> None:
        """The texts' rows before the first adapter: constants of a task."""
        tower, context = self._backbone.text_tower(), self._context
        ids = self._backbone.tokens([context.template.replace("{}", spoken(name)) for name in context.class_names])
        self._ends, self._mask = tower.ends(ids), tower.mask(ids)
        with torch.no_grad():
            rows = tower.rows(tower.weights, ids)
            self._text_rows = tower.blocks(tower.weights, rows, 0, self._first(TEXT), mask=self._mask)

    def _first(self, tower: str) -> int:
        layers = self._backbone.text_layers if tower == TEXT else self._backbone.vision_layers
        return layers - pairs_of(self._hyper, self._backbone.text_layers, self._backbone.vision_layers)

    def _adapters(self, own: Mapping[str, Tensor], tower: str) -> dict[int, Adapter]:
        first = self._first(tower)
        return {first + pair: adapted(own, pair, tower, self._hyper) for pair in range(len(own["shared_weight"]))}

    def texts(self, own: Mapping[str, Tensor]) -> Tensor:
        """``(C, d_e)`` normalised; the template's where texts have no adapters."""
        if TEXT not in self._kinds:
            return pf.template_features(self._backbone, self._context.template, self._context.class_names)
        tower, adapters = self._backbone.text_tower(), self._adapters(own, TEXT)
        rows = tower.blocks(tower.weights, self._text_rows, self._first(TEXT), mask=self._mask, adapters=adapters)
        return F.normalize(tower.pool(tower.weights, rows, self._ends).float(), dim=-1)

    def images(self, own: Mapping[str, Tensor], split: pf.Split, indices: Tensor) -> Tensor:
        """``(B, d_e)`` normalised; those that are kept where images have no adapters."""
        if VISUAL not in self._kinds:
            features = split.features()
            return features[pf.sent_to(indices, features.device)]
        tower, first = self._backbone.vision_tower(), self._first(VISUAL)
        if self._hyper.cache_blocks:
            rows = self._backbone.image_input(split.block_rows(indices, first))
        else:
            with torch.no_grad():
                rows = tower.rows(tower.weights, self._backbone.image_input(split.images(indices)))
                rows = tower.blocks(tower.weights, rows, 0, first)
        rows = tower.blocks(tower.weights, rows, first, adapters=self._adapters(own, VISUAL))
        features = tower.project(tower.weights, tower.pool(tower.weights, rows))
        return F.normalize(features.float(), dim=-1)


class AdapterClassifier:
    """Cosine logits under fixed adapters; their texts are made for this very classifier and no other."""

    def __init__(self, context: pf.ClientContext, own: Tensors, hyper: PFedMMAHyper):
        self._towers, self._scale = AdaptedTowers(context, hyper), context.backbone.logit_scale
        self._own = {name: tensor.to(context.backbone.device) for name, tensor in own.items()}
        with torch.no_grad():
            self._text = self._towers.texts(self._own)

    @no_grad
    def logits(self, split: pf.Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        parts = torch.split(indices, CHUNK)
        return torch.cat([self._scale * self._towers.images(self._own, split, part) @ self._text.T for part in parts])


class PFedMMA(pf.Method):
    """S down and up; D and U stay. Who has trained none classifies zero-shot, unless all is shared."""

    name = "pfedmma"
    summary = "Adapters beside the upper blocks of both towers; only the map in their middle is shared."
    paper = "Ghiasvand et al., pFedMMA: Personalized Federated Fine-Tuning with Multi-Modal Adapter, 2026"
    personal = True
    Hyper = PFedMMAHyper
    hyper: PFedMMAHyper
    needs = visual.NEEDS
    defaults = pf.defaults(50, epochs=2, batch_size=32, learning_rate=0.001)

    def __init__(self, hyper: PFedMMAHyper):
        super().__init__(hyper)
        if hyper.towers == TEXT:
            self.needs = pf.Needs()

    @property
    def disclosures(self) -> tuple[pf.Disclosed, ...]:
        """How little leaves, or how much."""
        if self.hyper.share == "none":
            return ()
        count = self.hyper.k or PAIRS
        maps = f"{count} maps of {self.hyper.r}×{self.hyper.r} numbers"
        return (pf.AGGREGATE, pf.Disclosed("operator", maps if self.hyper.share == "middle" else "your adapters"))

    def check(self, spec: pf.FederationSpec) -> None:
        """An adapter that adds nothing learns nothing."""
        if self.hyper.alpha == 0:
            raise pf.MethodError("alpha: 0 switches the adapters off, and nothing can be trained: take zero_shot")
        if self.hyper.cache_blocks:
            how = "take towers: text without it"
            check_kept_blocks(self.name, spec, frozen_below=VISUAL in kinds_of(self.hyper), how=how)

    def tensors(self) -> tuple[TensorSpec, ...]:
        """All of the adapters."""
        return (*MIDDLE, *(spec for tower in kinds_of(self.hyper) for spec in outer(tower)))

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """What is shared."""
        return {"middle": MIDDLE, "none": (), "all": self.tensors()}[self.hyper.share]

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``k``, ``r`` and the towers' widths. Raises MethodError where a tower has not so many blocks."""
        shape, kinds = context.shape, kinds_of(self.hyper)
        sizes = {"r": self.hyper.r}
        if VISUAL in kinds:
            sizes["d_v"] = visual.vision_width(self.name, context)
        if TEXT in kinds:
            if shape.d_t is None or shape.text_layers is None:
                raise pf.MethodError(f"{self.name} needs a text tower that adapters can enter; this backbone has none")
            sizes["d_t"] = shape.d_t
        return sizes | {"k": pairs_of(self.hyper, shape.text_layers or 0, shape.vision_layers or 0)}

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """The shared part of the one start that all clients draw."""
        start = self.start(context.draws_of, context.seed, self.dims(context))
        return {spec.name: start[spec.name] for spec in self.state_tensors()}

    def start(self, draws_of: DrawsOf, seed: int, dims: Mapping[str, int]) -> Tensors:
        """Kaiming normal by fan-out, N(0, 2/out); biases zero."""
        made = {}
        for spec in self.tensors():
            shape = spec.resolve(dims)
            draws = draws_of(seed, self.name, spec.name)
            if len(shape) == 2:  # a bias in each block
                made[spec.name] = draws.xp.zeros(shape, dtype=draws.xp.float32)
            else:
                made[spec.name] = draws.normal(*shape) * math.sqrt(2 / shape[1])
        return made

    def check_texts(self, backbone: Backbone, class_names: tuple[str, ...], template: str) -> None:
        """Both towers must be such that adapters can stand beside their blocks."""
        super().check_texts(backbone, class_names, template)
        if TEXT in kinds_of(self.hyper):
            backbone.text_tower()
        if VISUAL in kinds_of(self.hyper):
            backbone.vision_tower()

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of D, S and U; texts go through the adapted tower in every step."""
        backbone = context.backbone
        sizes = {"r": self.hyper.r, "d_t": backbone.d_t, "d_v": backbone.d_v}
        sizes["k"] = pairs_of(self.hyper, backbone.text_layers, backbone.vision_layers)
        start = (private or self.start(pf.generator, context.seed, sizes)) | payload
        own = pf.leaves(dict(sorted(start.items())), backbone)
        towers, labels = AdaptedTowers(context, self.hyper), context.train.labels.to(backbone.device)

        def loss(indices: Tensor) -> Tensor:
            features = towers.images(own, context.train, indices)
            logits = backbone.logit_scale * features @ towers.texts(own).T
            return F.cross_entropy(logits, labels[pf.sent_to(indices, labels.device)])

        final = pf.train(context, list(own.values()), loss)
        update = {spec.name: own.pop(spec.name) for spec in self.state_tensors()}
        return pf.TrainResult(update, own, {"loss": final})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """The client's own D and U with the current S; zero-shot for who has none."""
        own = private | payload
        if len(own) < len(self.tensors()) or self.hyper.alpha == 0:
            return TemplateClassifier(context)
        return AdapterClassifier(context, own, self.hyper)


def outer(tower: str) -> tuple[TensorSpec, ...]:
    """D and U of a tower."""
    d = WIDTHS[tower]
    return (
        TensorSpec(f"{tower}_down_weight", ("k", "r", d)),
        TensorSpec(f"{tower}_down_bias", ("k", "r")),
        TensorSpec(f"{tower}_up_weight", ("k", d, "r")),
        TensorSpec(f"{tower}_up_bias", ("k", d)),
    )


def kinds_of(hyper: PFedMMAHyper) -> tuple[str, ...]:
    """The towers with adapters."""
    return (VISUAL, TEXT) if hyper.towers == "both" else (hyper.towers,)


def pairs_of(hyper: PFedMMAHyper, text_layers: int, vision_layers: int) -> int:
    """``k``. Raises MethodError where a tower has not so many blocks."""
    layers = {TEXT: text_layers, VISUAL: vision_layers}
    least = min(layers[tower] for tower in kinds_of(hyper))
    if hyper.k is not None and hyper.k > least:
        raise pf.MethodError(f"k = {hyper.k}, but a tower has {least} blocks: lower it, or leave it out")
    return min(hyper.k or PAIRS, least)
