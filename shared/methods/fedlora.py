"""FedLoRA: changes of low rank in the attention of both towers, trained by clients and made one by the coordinator.

Notation: W a d×d matrix of attention, W + γ·B·A what is computed with, A ``(r, d)``, B ``(d, r)``; k adapted blocks of
a tower, q of their matrices. The template's texts go through the adapted text tower anew in every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core import visual
from promptfed.shared.methods.core.interface import spoken
from promptfed.shared.methods.core.visual import (
    CacheBlocks,
    ImageClassifier,
    Towers,
    VisualHyper,
    check_kept_blocks,
    held_at_once,
)
from promptfed.shared.seeds import Draws, DrawsOf
from promptfed.shared.tensors import Tensors, TensorSpec, sum_of_squares
from promptfed.shared.tensors.arrays import double, namespace, single
from promptfed.shared.tensors.lazy import F, Tensor, checkpointing, torch

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone
    from promptfed.shared.clip.towers.copies import PlainTower
    from promptfed.shared.clip.towers.text import LowRank

Tower = Literal["visual", "text"]
VISUAL, TEXT = "visual", "text"


class FedLoRAHyper(VisualHyper):
    """Where changes of low rank are, how large they are, and how the coordinator makes them one."""

    r: int = pf.option(2, "rank of each change", ge=1, le=256)
    alpha: float = pf.option(1.0, "α of the factor γ before B·A", gt=0, le=1000)
    scaling: Literal["root", "rank"] = pf.option(
        "root", "γ = α/√r, as CLIP-LoRA's released code has it, or α/r, as LoRA"
    )
    matrices: Literal["qkv", "qkvo"] = pf.option("qkv", "which matrices of attention: query, key, value (and output)")
    blocks: Literal["all", "last_k"] = pf.option("all", "which blocks of a tower")
    k: int = pf.option(1, "last_k: how many blocks, counted from the last", ge=1, le=256)
    towers: Literal["both", "visual", "text"] = pf.option("both", "which towers are adapted")
    dropout: float = pf.option(0.25, "of the input of A in training, a mask of its own for each matrix", ge=0, lt=1)
    cache_blocks: CacheBlocks = False
    aggregation: Literal["average", "freeze_a", "alternate", "svd"] = pf.option(
        "average",
        "average: of A and of B, which is not the average of B·A (reported); freeze_a: all keep the A "
        "that they draw, B alone travels; alternate: B in odd rounds, A in even ones; svd: the nearest B·A of rank "
        "r to the average product. The last three are exact, svd up to its rank",
    )


class FedLoRA(pf.Method):
    """See the module.

    Sources: CLIP-LoRA (Zanella & Ben Ayed, CVPRW 2024); FL2oRA (Singha et al., 2025), which averages it over clients;
    FFA-LoRA (Sun et al., ICLR 2024) for ``freeze_a``. The stack of FLoRA (2024) is not offered: its rank grows with the
    clients in every round.
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

    def check(self, spec: pf.FederationSpec) -> None:
        """Rows are kept below the first changed block of the image tower alone."""
        if self.hyper.cache_blocks:
            below = self.hyper.blocks == "last_k" and VISUAL in self.towers
            check_kept_blocks(self.name, spec, frozen_below=below, how="take blocks: last_k of the image tower")

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
        """B of each tower, and A unless everybody draws it."""
        frozen = self.hyper.aggregation == "freeze_a"
        return tuple(spec for tower in self.towers for spec in ((() if frozen else (_a(tower),)) + (_b(tower),)))

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """One exchange a round; with ``alternate`` one of the factors comes up in turn."""
        down, kind = self.state_tensors(), self.hyper.aggregation
        up = down
        if kind == "alternate":
            up = tuple(spec for spec in down if spec.name.endswith("_b" if round % 2 else "_a"))
        return (pf.Phase("train", down=down, up=up, mean=kind != "svd"),)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """Sizes of both towers' factors."""
        shape, dims = context.shape, {"r": self.hyper.r, "q": len(self.hyper.matrices)}
        for tower, width, layers in (
            (VISUAL, shape.d_v, shape.vision_layers),
            (TEXT, shape.d_t, shape.text_layers),
        ):
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
        return _start(context.draws_of, self.state_tensors(), self.dims(context), context.seed)

    def aggregate(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> Tensors:
        """By ``aggregation``; whatever did not come up stays."""
        if self.hyper.aggregation == "svd":
            given = list(updates)
            return {
                name: factor
                for tower in self.towers
                for name, factor in best_of_rank(tower, given, self.hyper.r).items()
            }
        return super().aggregate(state, phase, updates, combine, context)

    def aggregate_measured(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> tuple[Tensors, pf.Measured]:
        """``product_error``: ‖B̄·Ā − mean(B·A)‖/‖mean(B·A)‖ of this phase, where factors are averaged."""
        if self.hyper.aggregation != "average":
            return self.aggregate(state, phase, updates, combine, context), pf.Measured()
        sums: Tensors = {}
        after = self.aggregate(state, phase, _added(sums, self.towers, updates), combine, context)
        return after, pf.Measured(phase={"product_error": relative_error(self.towers, after, sums)})

    # Client half

    def factors(self, context: pf.ClientContext, payload: Tensors) -> Tensors:
        """A and B of each tower, with the A that everybody draws where none travels."""
        if self.hyper.aggregation != "freeze_a":
            return {spec.name: payload[spec.name] for spec in self.state_tensors()}
        drawn: Tensors = {}
        for tower in self.towers:
            k, q, width, r = payload[_b(tower).name].shape
            sizes = {f"k_{tower[0]}": k, "q": q, "r": r, f"d_{tower[0]}": width}
            drawn |= _start(pf.generator, (_a(tower),), sizes, context.seed)
        return drawn | {name: payload[name] for name in payload}

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of CE(τ⁻¹·cos(I, T)) over the factors that come up this round."""
        [phase] = self.phases(context.round, context.rounds)
        device, trained = context.backbone.device, {spec.name for spec in phase.up}
        factors = {name: tensor.to(device).clone() for name, tensor in self.factors(context, payload).items()}
        leaves = {name: tensor.requires_grad_() for name, tensor in factors.items() if name in trained}
        model = _Adapted(self.hyper, context, factors)
        labels = context.train.labels.to(device)
        steps = iter(range(1 << 62))
        loss_of = pf.ClassificationLoss(context)

        def loss(indices: Tensor) -> Tensor:
            scores = model.logits(indices, next(steps))
            return loss_of(scores, labels[pf.sent_to(indices, device)])

        final = pf.train(context, list(leaves.values()), loss, reads_images=VISUAL in self.towers)
        return pf.TrainResult(leaves, {}, {"loss": final})

    def merged(self, context: pf.ClientContext, payload: Tensors) -> Tensors:
        """W + γ·B·A of each changed W of both towers."""
        device = context.backbone.device
        factors = {name: tensor.to(device) for name, tensor in self.factors(context, payload).items()}
        model, texts = _Adapted(self.hyper, context, factors), "text." * hasattr(context.backbone.model, "text")
        places = {VISUAL: "visual.", TEXT: texts}
        return {places[which] + name: w for which in self.towers for name, w in model.merged(which).items()}

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """Classifies with W + γ·B·A in the place of W, texts and images alike."""
        device = context.backbone.device
        factors = {name: tensor.to(device) for name, tensor in self.factors(context, payload).items()}
        model = _Adapted(self.hyper, context, factors)
        with torch.no_grad():
            text = model.text_features(None)
        if VISUAL not in self.towers:
            return pf.TextFeatureClassifier(context.backbone.logit_scale, text)
        merged, scale = model.merged_tower(), context.backbone.logit_scale
        return ImageClassifier(lambda inputs: scale * model.image_features(inputs, None, merged) @ text.T, model.read)


class _Adapted:
    """Both towers with their changes, for one task."""

    def __init__(self, hyper: FedLoRAHyper, context: pf.ClientContext, factors: Tensors):
        self._hyper, self._context, self._factors = hyper, context, factors
        self._backbone: Backbone = context.backbone
        self._gamma = hyper.alpha / (math.sqrt(hyper.r) if hyper.scaling == "root" else hyper.r)
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
            images = self.image_features(self.read(self._context.train, indices), step)
        return self._backbone.logit_scale * images @ self.text_features(step).T

    @property
    def _first(self) -> int:
        """The image tower's first changed block."""
        assert self._visual is not None
        return self._visual.layers - len(self._factors[_a(VISUAL).name])

    def read(self, split: pf.Split, indices: Tensor) -> Tensor:
        """The image tower's inputs at ``indices (B,)``: rows before the first changed block where kept, or images."""
        return split.block_rows(indices, self._first) if self._hyper.cache_blocks else split.images(indices)

    def image_features(self, inputs: Tensor, step: int | None, merged: PlainTower | None = None) -> Tensor:
        """``(B, d_e)`` normalised, of inputs as `read` gives them; by the branches, or by a ``merged`` tower."""
        tower, inputs = merged or self._visual, self._backbone.image_input(inputs)
        assert tower is not None

        def encode(part: Tensor, number: int) -> Tensor:
            low_rank = self._low_rank(VISUAL, tower.layers, step, number) if merged is None else {}
            with Towers(self._backbone, self._hyper).image_precision():
                if self._hyper.cache_blocks:
                    rows = tower.run(part, self._first, low_rank=low_rank)
                else:
                    rows = tower.run(tower.rows(part), low_rank=low_rank)
                return F.normalize(tower.project(tower.pool(rows)).float(), dim=-1)

        size = held_at_once(self._backbone, self._hyper)
        if size is None or not torch.is_grad_enabled():
            return encode(inputs, 0)
        parts = enumerate(torch.split(inputs, size))
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
            weights[f"{place}in_proj_weight"] = attention.in_proj_weight.float() + change[:3].flatten(0, 1)
            if len(change) > 3:
                weights[f"{place}out_proj.weight"] = attention.out_proj.weight.float() + change[3]
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


def _start(draws_of: DrawsOf, specs: Iterable[TensorSpec], dims: Mapping[str, int], seed: int) -> Tensors:
    """The factors before any training; the same wherever they are drawn."""
    made = {}
    for spec in specs:
        shape, draws = spec.resolve(dims), draws_of(seed, "lora", spec.name)
        if spec.name.endswith("_b"):
            made[spec.name] = draws.xp.zeros(shape, dtype=draws.xp.float32)
        else:
            made[spec.name] = (draws.uniform(*shape) * 2 - 1) / math.sqrt(shape[-1])
    return made


def _added(sums: Tensors, towers: Iterable[str], updates: pf.Updates) -> Iterator[pf.ClientUpdate]:
    """The updates, one by one; on the way the weighted products B·A are added up in ``sums``."""
    for update in updates:
        product_sums(sums, towers, update)
        yield update


def product_sums(sums: Tensors, towers: Iterable[str], update: pf.ClientUpdate) -> None:
    """Adds an update's weighted products ``(k, q, d, d)`` to ``sums``, by tower, matrix by matrix."""
    for tower in towers:
        a, b = update.tensors[f"{tower}_a"], update.tensors[f"{tower}_b"]
        products = update.weight * (single(b) @ single(a))
        sums[tower] = sums[tower] + products if tower in sums else products


def relative_error(towers: Iterable[str], factors: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> float:
    """‖B·A − sum‖/‖sum‖ over all matrices of both towers; 0 where nothing has changed."""
    off = length = 0.0
    for tower in towers:
        off += sum_of_squares(factors[f"{tower}_b"] @ factors[f"{tower}_a"] - sums[tower])
        length += sum_of_squares(sums[tower])
    return (off / length) ** 0.5 if length > 0 else 0.0


def best_of_rank(tower: str, updates: Sequence[pf.ClientUpdate], rank: int) -> Tensors:
    """Factors A and B of ``rank`` whose products are the nearest to the weighted mean of the updates' products.

    The mean is (stacked w·B)(stacked A): after a QR of either its singular vectors are those of a small core. Of each
    left one the largest entry is positive.
    """
    kind_a, kind_b = f"{tower}_a", f"{tower}_b"
    shape, xp = updates[0].tensors[kind_a].shape, namespace(updates[0].tensors[kind_a])
    made = {kind: xp.empty(tuple(updates[0].tensors[kind].shape), dtype=xp.float32) for kind in (kind_a, kind_b)}
    total = sum(update.weight for update in updates)
    for place in range(shape[0]):
        for matrix in range(shape[1]):
            left = xp.concat([double(u.tensors[kind_b][place, matrix]) * (u.weight / total) for u in updates], 1)
            right = xp.concat([double(u.tensors[kind_a][place, matrix]) for u in updates], 0)
            made[kind_b][place, matrix], made[kind_a][place, matrix] = _factored(left, right, rank)
    return made


def _factored(left: Any, right: Any, rank: int) -> tuple[Any, Any]:
    """B ``(d, rank)`` and A ``(rank, d)`` nearest to left·right."""
    xp = namespace(left)
    q_left, r_left = xp.linalg.qr(left)
    q_right, r_right = xp.linalg.qr(right.T)
    u, sizes, v = xp.linalg.svd(r_left @ r_right.T, full_matrices=False)
    u, v = q_left @ u[:, :rank], v[:rank] @ q_right.T
    signs = xp.sign(u[abs(u).argmax(0), range(u.shape[1])])
    root = xp.sqrt(sizes[:rank])
    return u * signs * root, v * signs[:, None] * root[:, None]
