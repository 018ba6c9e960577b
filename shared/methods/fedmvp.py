"""FedMVP: a generator lets an image's patches look at texts of the classes, and makes visual prompts of what they find.

Notation: ``N`` patches of an image, E ``(N, d_v)`` their embeddings with positions, A ``(texts, d_e)`` normalised
features of all descriptions of the task's classes, P ``(m, d_v)`` the prompts of one image.

Source: Singha et al., "FedMVP: Federated Multimodal Visual Prompt Tuning for Vision-Language Models", ICCV 2025 (arXiv
2504.20860).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Json

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core import visual
from promptfed.shared.methods.core.visual import ImageClassifier, drawn
from promptfed.shared.seeds import Draws
from promptfed.shared.spec.class_descriptions import ClassDescriptions, texts_of
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.arrays import namespace
from promptfed.shared.tensors.lazy import F, no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor

    from promptfed.shared.clip import Backbone
    from promptfed.shared.clip.towers.functional_vision import VisionTower

log = logging.getLogger("promptfed.methods")

GENERATOR = (
    *pf.layer("proj", "d_v", "d_e", join="_"),
    *(spec for part in ("image", "text", "ff") for spec in pf.layer(f"norm_{part}", "d_v", join="_")),
    *pf.layer("in", "d_v3", "d_v", join="_"),
    *pf.layer("out", "d_v", "d_v", join="_"),
    *pf.layer("ff_1", "d_v8", "d_v", join="_"),
    *pf.layer("ff_2", "d_v", "d_v4", join="_"),
)
LORA = tuple(
    TensorSpec(f"lora_{of}_{part}", shape) for of in "qkv" for part, shape in (("a", ("d_v", "r")), ("b", ("r", "d_v")))
)
ACTIVE = TensorSpec("lora_active", (), "int64")
LOSS = TensorSpec("loss", (), shared_with_clients=False)


class FedMVPHyper(pf.Hyperparameters):
    """The generator, what images are compared with, and when its low-rank part takes over."""

    label_space: pf.LabelSpace = "client"
    m: int = pf.option(4, "prompts of an image", ge=1, le=512)
    heads: int = pf.option(4, "attention heads of the generator; must divide d_v", ge=1, le=256)
    queries: Literal["patches", "mean"] = pf.option(
        "patches",
        "patches: each looks at the texts, and what a run of them finds is averaged; mean: a run is "
        "averaged first, so that m queries look instead of one for each patch",
    )
    texts: Literal["attributes", "joined", "template"] = pf.option(
        "attributes",
        "what images are compared with: the mean of a class's descriptions (code), the template "
        "and the descriptions in one text (paper), or the template",
    )
    consistency: float = pf.option(10.0, "α of 1 − cos with the frozen tower's feature; 0: without it", ge=0, le=1000)
    flip: bool = pf.option(True, "the frozen tower sees the image mirrored half of the time; false: its kept feature")
    lora: Literal["switch", "off"] = pf.option(
        "switch", "switch: once the mean loss is under `sigma`, only a low-rank part trains; off: never"
    )
    sigma: float = pf.option(0.5, "σ, the loss under which the federation switches", gt=0, le=1e6)
    lora_from: int | None = pf.option(
        None, "switch in this round instead; from then on only the low-rank part is sent", ge=2, le=100_000
    )
    r: int = pf.option(8, "rank of the low-rank part", ge=1, le=1024)


class FedMVPOwn(pf.OwnOptions):
    """What a client chooses for itself."""

    class_descriptions: Json[ClassDescriptions] | None = pf.option(
        None, "descriptions of this client's classes, as JSON"
    )


def bins(count: int, m: int) -> list[slice]:
    """(V3) the m runs ⌊iN/m⌋ to ⌈(i+1)N/m⌉ of N patches; they overlap where m does not divide N."""
    return [slice(i * count // m, -(-(i + 1) * count // m)) for i in range(m)]


def generated(own: Mapping[str, Tensor], patches: Tensor, texts: Tensor, hyper: FedMVPHyper, lora: bool) -> Tensor:
    """(V1)-(V3) prompts ``(B, m, d_v)`` of patches E ``(B, N, d_v)`` and text features A ``(texts, d_e)``."""
    runs, width = bins(patches.shape[1], hyper.m), patches.shape[-1]
    if hyper.queries == "mean":
        patches = torch.stack([patches[:, run].mean(1) for run in runs], dim=1)
    values = F.linear(texts, own["proj_weight"], own["proj_bias"])
    query = F.layer_norm(patches, (width,), own["norm_image_weight"], own["norm_image_bias"])
    keys = F.layer_norm(values, (width,), own["norm_text_weight"], own["norm_text_bias"])
    inputs = [query, keys, values]
    if lora:
        parts = [(own[f"lora_{of}_a"], own[f"lora_{of}_b"]) for of in "qkv"]
        inputs = [x + x @ a @ b for x, (a, b) in zip(inputs, parts, strict=True)]
    weights, biases = own["in_weight"].chunk(3), own["in_bias"].chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
    heads, size = hyper.heads, width // hyper.heads
    q = q.reshape(*q.shape[:-1], heads, size).transpose(1, 2)  # (B, heads, N, size)
    k, v = (rows.reshape(len(rows), heads, size).transpose(0, 1) for rows in (k, v))  # (heads, texts, size)
    shares = (q @ k.transpose(-1, -2) / math.sqrt(size)).softmax(-1)
    mixed = F.linear((shares @ v).transpose(1, 2).flatten(2), own["out_weight"], own["out_bias"])
    hidden = F.layer_norm(mixed, (width,), own["norm_ff_weight"], own["norm_ff_bias"])
    value, gate = F.linear(hidden, own["ff_1_weight"], own["ff_1_bias"]).chunk(2, dim=-1)
    mixed = mixed + F.linear(value * F.gelu(gate), own["ff_2_weight"], own["ff_2_bias"])
    if hyper.queries == "mean":
        return mixed
    return torch.stack([mixed[:, run].mean(1) for run in runs], dim=1)


class PromptedImages:
    """The frozen image tower with prompts of each image's own beside its patches, in the first block alone."""

    def __init__(self, backbone: Backbone):
        self._backbone, self._tower = backbone, backbone.vision_tower()
        expect_class_token(self._tower)

    @no_grad
    def embedded(self, images: Tensor) -> Tensor:
        """``(B, 1 + N, d_v)``, [cls] and patches with positions, before `ln_pre`, of images ``(B, 3, H, W)``."""
        weights, images = self._tower.weights, self._backbone.image_input(images)
        conv, bias = weights["conv1_weight"], weights.get("conv1_bias")
        rows = F.conv2d(images, conv, bias, stride=self._tower.patch_size).flatten(2).transpose(1, 2)
        first = weights["class_embedding"].to(rows.dtype).expand(rows.shape[0], 1, -1)
        return torch.cat([first, rows], dim=1) + weights["positional_embedding"].to(rows.dtype)

    def features(self, rows: Tensor, prompts: Tensor) -> Tensor:
        """``(B, d_e)`` normalised, of `embedded` rows and prompts ``(B, m, d_v)``."""
        tower, weights = self._tower, self._tower.weights
        rows = torch.cat([rows, prompts.to(rows.dtype)], dim=1)
        if "ln_pre_weight" in weights:
            size = (rows.shape[-1],)
            gain, bias = weights["ln_pre_weight"], weights.get("ln_pre_bias")
            rows = F.layer_norm(
                rows.float(), size, gain.float(), None if bias is None else bias.float(), tower.blocks_shape.eps
            ).to(rows.dtype)
        rows = tower.blocks(weights, rows)
        return F.normalize(tower.project(weights, tower.pool(weights, rows)).float(), dim=-1)


def expect_class_token(tower: VisionTower) -> None:
    """Raise MethodError where prompts beside the patches would be pooled with them."""
    if tower.pooling != "tok" or "class_embedding" not in tower.weights:
        text = "needs an image tower of plain patches that pools a class token; this backbone's is none"
        raise pf.MethodError(f"fedmvp {text}")


class ClassTexts:
    """A task's descriptions: ``attributes`` A, and what images are compared with, ``compared (C, d_e)``."""

    def __init__(self, context: pf.ClientContext, hyper: FedMVPHyper, own: Mapping[str, list[str]]):
        backbone, described = context.backbone, {**context.class_descriptions, **own}
        names = context.class_names
        each = [texts_of(name, described, context.template) for name in names]
        self.described = any(name in described for name in names)
        self.attributes = backbone.encode_text([text for texts in each for text in texts])
        template = pf.template_features(backbone, context.template, names)
        if hyper.texts == "template":
            self.compared = template
        elif hyper.texts == "joined":
            base = [texts_of(name, {}, context.template)[0] for name in names]
            extra = [", ".join(described.get(name, ())) for name in names]
            self.compared = backbone.encode_text(
                [f"{text.rstrip('. ')}, {more}" if more else text for text, more in zip(base, extra, strict=True)]
            )
        else:
            groups = torch.split(self.attributes, [len(texts) for texts in each])
            self.compared = torch.stack([group.mean(0) for group in groups])


class FedMVP(pf.Method):
    """The generator both ways; all classify alike, with the descriptions of the classes that are to be told apart."""

    name = "fedmvp"
    summary = "A generator makes visual prompts for each image from its patches and texts of the classes."
    paper = "Singha et al., FedMVP: Federated Multimodal Visual Prompt Tuning for Vision-Language Models, 2025"
    unprotected = "its generator has millions of numbers"
    Hyper = FedMVPHyper
    hyper: FedMVPHyper
    Own = FedMVPOwn
    own: FedMVPOwn
    needs = visual.NEEDS
    metrics = ("loss", "lora_active")
    defaults = pf.defaults(
        100,
        {"aggregation": {"weighting": "uniform"}},
        epochs=1,
        batch_size=128,
        learning_rate=0.003,
        weight_decay=1e-5,
        schedule="cosine",
    )
    disclosures = (
        pf.AGGREGATE,
        pf.Disclosed("operator", "changes of a generator that is trained on your images' patches"),
    )

    @property
    def _watched(self) -> bool:
        """Whether the mean loss decides about the switch."""
        return self.hyper.lora == "switch" and self.hyper.lora_from is None

    def check(self, spec: pf.FederationSpec) -> None:
        """A step of the coordinator's own would be taken on the loss, too."""
        if self.hyper.lora == "off" and self.hyper.lora_from is not None:
            raise pf.MethodError("lora: off never switches: leave lora_from out")
        if self._watched and spec.aggregation.server.optimizer != "none":
            raise pf.MethodError(
                "fedmvp switches by the clients' mean loss, which a server optimizer would change: take lora_from or "
                "lora: off with it"
            )

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The generator, its low-rank part, and whether that is what trains."""
        low_rank = LORA if self.hyper.lora == "switch" else ()
        return (*GENERATOR, *low_rank, *((ACTIVE, LOSS) if self._watched else ()))

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """All of the generator both ways; after a switch that is known beforehand, its low-rank part up."""
        everything = (*GENERATOR, *(LORA if self.hyper.lora == "switch" else ()))
        down, up = ((*everything, ACTIVE), (*everything, LOSS)) if self._watched else (everything, everything)
        if self.hyper.lora_from is not None and round >= self.hyper.lora_from:
            up = LORA
        return (pf.Phase("train", down=down, up=up, mean=True),)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``d_v`` and its multiples, ``d_e``, ``r``. Raises MethodError where the heads do not divide the width."""
        width = visual.vision_width(self.name, context)
        if width % self.hyper.heads:
            raise pf.MethodError(
                f"{self.hyper.heads} heads do not divide d_v = {width}: choose another number of heads"
            )
        multiples = {f"d_v{n}": n * width for n in (3, 4, 8)}
        return {"d_v": width, "d_e": context.shape.d_e, "r": self.hyper.r} | multiples

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """Attention Xavier uniform, linear maps in ±1/√fan-in, norms 1 and 0, the low-rank part's B zero."""
        dims, made = self.dims(context), {}
        for spec in self.state_tensors():
            made[spec.name] = _start(spec.name, spec.resolve(dims), draws)
        return made

    def aggregate(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> Tensors:
        """The mean; where the loss decides, the switch is for all and for good."""
        after = state | combine(updates)
        if not self._watched:
            return after
        switched = int(state[ACTIVE.name]) or int(float(after[LOSS.name]) < self.hyper.sigma)
        xp = namespace(after[LOSS.name])
        return after | {ACTIVE.name: xp.asarray(switched, dtype=xp.int64)}

    # Client half

    def check_texts(self, backbone: Backbone, class_names: tuple[str, ...], template: str) -> None:
        """The tower must take prompts of each image, and own descriptions must fit into the text tower."""
        super().check_texts(backbone, class_names, template)
        expect_class_token(backbone.vision_tower())
        texts = [text for name in class_names for text in self._own_descriptions.get(name, ())]
        if texts:
            backbone.tokens(texts)

    @property
    def _own_descriptions(self) -> dict[str, list[str]]:
        return self.own.class_descriptions or {}

    def _active(self, payload: Tensors, round: int) -> bool:
        if self.hyper.lora_from is not None:
            return round >= self.hyper.lora_from
        return bool(self._watched and int(payload[ACTIVE.name]))

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """(V5) E epochs of the generator, or of its low-rank part alone after the switch."""
        device, hyper = context.backbone.device, self.hyper
        lora = self._active(payload, context.round)
        names = [spec.name for spec in (LORA if lora else GENERATOR)]
        own = {name: tensor.to(device) for name, tensor in payload.items()}
        own |= {name: own[name].clone().requires_grad_() for name in names}
        images, texts = PromptedImages(context.backbone), ClassTexts(context, hyper, self._own_descriptions)
        if not texts.described:
            log.warning("%s: no class is described, and prompts are made from the template's texts", context.client)
        flips = pf.generator(context.seed, context.round, context.client, "flips")
        prompted: list[Tensor] = []

        def logits(batch: Tensor) -> Tensor:
            rows = images.embedded(batch)
            prompts = generated(own, rows[:, 1:].float(), texts.attributes, hyper, lora)
            prompted[:] = [images.features(rows, prompts)]
            return context.backbone.logit_scale * prompted[0] @ texts.compared.T

        def consistency(indices: Tensor, batch: Tensor, scores: Tensor) -> Tensor:
            if hyper.flip:
                mirrored = torch.rand(len(batch), generator=flips) < 1 / 2
                turned = torch.where(pf.sent_to(mirrored, batch.device)[:, None, None, None], batch.flip(-1), batch)
                frozen = context.backbone.encode_images(turned)
            else:
                features = context.train.features()
                frozen = features[pf.sent_to(indices, features.device)]
            return hyper.consistency * (1 - (prompted[0] * frozen).sum(-1).mean())

        parameters = [own[name] for name in names]
        loss = visual.train_on_images(context, parameters, logits, consistency if hyper.consistency else None)
        return pf.TrainResult(self._update(context, own, loss), metrics={"loss": loss, "lora_active": float(lora)})

    def _update(self, context: pf.ClientContext, own: Tensors, loss: float) -> Tensors:
        [phase] = [each for each in self.phases(context.round, context.rounds) if not each.total]
        sent = own | {LOSS.name: torch.tensor(loss)}
        return {spec.name: sent[spec.name] for spec in phase.up}

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> ImageClassifier:
        """The global generator with the descriptions of ``context.class_names``."""
        backbone = context.backbone
        own = {name: tensor.to(backbone.device) for name, tensor in payload.items()}
        images, texts = PromptedImages(backbone), ClassTexts(context, self.hyper, self._own_descriptions)
        # Zero before the switch: with B = 0 the low-rank part changes nothing.
        lora = self.hyper.lora == "switch"

        def logits(batch: Tensor) -> Tensor:
            rows = images.embedded(batch)
            prompts = generated(own, rows[:, 1:].float(), texts.attributes, self.hyper, lora)
            return backbone.logit_scale * images.features(rows, prompts) @ texts.compared.T

        return ImageClassifier(logits)


def _start(name: str, shape: tuple[int, ...], draws: Draws) -> Any:
    """A tensor of the state before any training."""
    xp = draws.xp
    if name == ACTIVE.name:
        return xp.zeros(shape, dtype=xp.int64)
    if name == LOSS.name or name.endswith("_b") or name in ("in_bias", "out_bias"):
        return xp.zeros(shape, dtype=xp.float32)
    if name.startswith("norm_"):
        return xp.full(shape, float(name.endswith("weight")), dtype=xp.float32)
    if name.startswith("lora_"):
        return drawn(draws, *shape)
    uniform = draws.uniform(*shape) * 2 - 1
    if name in ("in_weight", "out_weight"):
        return uniform * math.sqrt(6 / sum(shape))
    return uniform / math.sqrt(shape[-1])  # of a bias by its own length: no wider than its weights'
