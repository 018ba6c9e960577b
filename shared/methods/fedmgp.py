"""FedMGP: several small pairs of text and visual prompts for each client, of which it shares a few each round.

The shared ones are drawn on the client, by their likeness to the last global ones; a term of the loss pushes a client's
pairs apart. Notation: ``G`` groups, ``s`` shared ones, ``m`` vectors of each, t_j and v_j the prompts of group j.

Source: Bo et al., "FedMGP: Personalized Federated Learning with Multi-Group Text-Visual Prompts", NeurIPS 2025
(arXiv 2511.00480).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Literal

from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core import visual
from promptfed.shared.methods.core.visual import CHUNK, Towers, VisualHyper, drawn
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, no_grad, torch

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from promptfed.shared.clip import Backbone

log = logging.getLogger("promptfed.methods")

TEXT, VISUAL = "text", "visual"
WIDTHS = {TEXT: "d_t", VISUAL: "d_v"}
WORDS_STD = 0.01  # of what is added to the words' embeddings, so that groups differ


class FedMGPHyper(VisualHyper):
    """How many groups, how they are kept apart, and which are shared."""

    groups: int = pf.option(5, "G, pairs of prompts of a client", ge=1, le=32)
    shared: int = pf.option(2, "s, pairs that it shares each round", ge=1, le=32)
    m: int = pf.option(2, "vectors of each prompt", ge=1, le=64)
    context_init: str | None = pf.option(
        "a photo of a",
        "words whose first m token embeddings start each text prompt; the others stand between it and "
        "the class name; null: random, and no words",
        max_length=200,
    )
    modalities: Literal["both", "text", "visual"] = pf.option(
        "both", "which prompts there are; text: no image tower is trained"
    )
    diversity: Literal["cos", "l1", "l2", "none"] = pf.option("cos", "what of two groups' features is made small")
    diversity_weight: float = pf.option(1.0, "λ of the diversity term", ge=0, le=1000)
    select: Literal["similar", "random", "fixed", "all"] = pf.option(
        "similar", "similar: drawn by likeness to the global ones; fixed: the first s; all: of s = G, each"
    )
    temperature: float = pf.option(1.0, "τ_s of select: similar", gt=0, le=1000)
    inference: Literal["mean", "max", "features"] = pf.option(
        "mean", "of the groups' logits the mean or the largest, or the logits of their mean features"
    )


Prompts = dict[str, "Tensor"]
"""By modality ``(G, m, d)``."""


def diversity(features: Tensor, kind: str) -> Tensor:
    """(G2) of normalised features ``(G, R, d_e)``, the mean over pairs of groups and rows; smaller is farther apart."""
    pairs = list(combinations(range(len(features)), 2))
    if not pairs or kind == "none":
        return features.sum() * 0
    first, second = (features[list(side)] for side in zip(*pairs, strict=True))
    if kind == "cos":
        alike: Tensor = (first * second).sum(-1).mean()
        return alike
    if kind == "l1":
        return -(first - second).abs().mean()
    apart: Tensor = torch.linalg.vector_norm(first - second, dim=-1).mean()
    return -apart


def likeness(groups: Tensor, last: Tensor, temperature: float) -> Tensor:
    """(G3) q ``(G,)`` = softmax(max_i cos(p_j, p̃_i)/τ_s) of groups ``(G, m, d)`` and global ones ``(s, m, d)``."""
    own, common = F.normalize(groups.flatten(1).double(), dim=1), F.normalize(last.flatten(1).double(), dim=1)
    return (own @ common.T).amax(1).div(temperature).softmax(0)


def draw_slots(shares: Tensor, count: int, draws: Generator) -> Tensor:
    """``(count,)`` int64, one after the other without replacement by ``shares (G,)``."""
    left, slots = shares.double().clone(), []
    for _ in range(count):
        slot = int(torch.multinomial(left, 1, generator=draws))
        slots.append(slot)
        left[slot] = 0
    return torch.tensor(slots, dtype=torch.int64)


def worded(backbone: Backbone, class_names: Sequence[str], hyper: FedMGPHyper) -> tuple[str, ...]:
    """The class names behind the words of ``context_init`` that no prompt replaces: "of a dog" for "a photo of a".

    The prompts replace the first m tokens, so that the text is ``[SOS] v1 v2 of a dog . [EOT]`` with m = 2.

    Raises:
        BackboneError: the words have fewer than m tokens, or the m-th one ends within a word.
    """
    if hyper.context_init is None or hyper.modalities == VISUAL:
        return tuple(class_names)
    words = hyper.context_init.split()
    counts = [len(backbone.embed_words(" ".join(words[: place + 1]))) for place in range(len(words))]
    if not counts or counts[-1] < hyper.m:
        total = counts[-1] if counts else 0
        raise BackboneError(f"context_init has {total} tokens, fewer than m = {hyper.m}: lower m or add words")
    if hyper.m not in counts:
        raise BackboneError(f"m = {hyper.m} tokens end within a word of context_init: choose m from {sorted(counts)}")
    kept = " ".join(words[counts.index(hyper.m) + 1 :])
    return tuple(f"{kept} {name}".strip() for name in class_names)


class Groups:
    """Features of texts and images under a client's groups."""

    def __init__(self, context: pf.ClientContext, hyper: FedMGPHyper):
        self._context, self._towers, self._hyper = context, Towers(context.backbone, hyper), hyper
        self.scale = context.backbone.logit_scale
        self._names = worded(context.backbone, context.class_names, hyper)

    def texts(self, prompts: Prompts) -> Tensor:
        """``(G, C, d_e)``, or of no text prompts ``(1, C, d_e)``, the template's."""
        context = self._context
        if TEXT not in prompts:
            return pf.template_features(context.backbone, context.template, context.class_names).unsqueeze(0)
        return context.backbone.encode_prompts(
            prompts[TEXT], context.backbone.class_prompts(self._names, self._hyper.m)
        )

    def images(self, prompts: Prompts, split: pf.Split, indices: Tensor) -> Tensor:
        """``(G, B, d_e)``, or without visual prompts ``(1, B, d_e)``, those that are kept."""
        if VISUAL not in prompts:
            features = split.features()
            return features[pf.sent_to(indices, features.device)].unsqueeze(0)
        images = split.images(indices)
        return torch.stack([self._towers.images(images, group.unsqueeze(0)) for group in prompts[VISUAL]])

    def logits(self, images: Tensor, texts: Tensor) -> Tensor:
        """(G1) ``(G, B, C)``."""
        return self.scale * images @ texts.transpose(-1, -2)


class GroupsClassifier:
    """Brings the groups' answers together."""

    def __init__(self, context: pf.ClientContext, prompts: Prompts, hyper: FedMGPHyper):
        self._groups, self._how = Groups(context, hyper), hyper.inference
        self._prompts = {kind: groups.to(context.backbone.device) for kind, groups in prompts.items()}
        with torch.no_grad():
            self._texts = self._groups.texts(self._prompts)

    @no_grad
    def logits(self, split: pf.Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        return torch.cat([self._of(split, part) for part in torch.split(indices, CHUNK)])

    def _of(self, split: pf.Split, indices: Tensor) -> Tensor:
        images = self._groups.images(self._prompts, split, indices)
        if self._how == "features":
            images, texts = (F.normalize(each.mean(0), dim=-1) for each in (images, self._texts))
            return self._groups.logits(images, texts)
        logits = self._groups.logits(images, self._texts)
        return logits.mean(0) if self._how == "mean" else logits.amax(0)


class FedMGP(pf.Method):
    """Groups are private but for those that are drawn; the slots last sent take the mean of all clients' ones."""

    name = "fedmgp"
    summary = "Several pairs of text and visual prompts for each client; those most like the shared ones are averaged."
    paper = "Bo et al., FedMGP: Personalized Federated Learning with Multi-Group Text-Visual Prompts, 2025"
    personal = True
    unprotected = "which of its prompts it sends depends on its images"
    metrics = ("loss", "text_entropy", "visual_entropy", "text_slot_*", "visual_slot_*")
    Hyper = FedMGPHyper
    hyper: FedMGPHyper
    needs = visual.NEEDS
    defaults = pf.defaults(10, epochs=2, batch_size=8, learning_rate=0.001)

    def __init__(self, hyper: FedMGPHyper):
        super().__init__(hyper)
        self.kinds = (TEXT, VISUAL) if hyper.modalities == "both" else (hyper.modalities,)
        if VISUAL not in self.kinds:
            self.needs = pf.Needs()

    @property
    def disclosures(self) -> tuple[pf.Disclosed, ...]:
        """Which pairs leave."""
        shown = f"{self.hyper.shared} of your {self.hyper.groups} pairs of prompts in each round"
        return (pf.AGGREGATE, pf.Disclosed("operator", shown))

    def check(self, spec: pf.FederationSpec) -> None:
        """No more groups can be shared than there are."""
        hyper = self.hyper
        if hyper.shared > hyper.groups:
            raise pf.MethodError(
                f"of {hyper.groups} groups {hyper.shared} cannot be shared: lower shared or raise groups"
            )
        if hyper.select == "all" and hyper.shared != hyper.groups:
            raise pf.MethodError(
                f"select: all shares every group: set shared: {hyper.groups}, or choose another selection"
            )
        if spec.aggregation.rule in ("krum", "multi_krum"):
            log.warning("fedmgp under %s: the first group of one client may be unlike another's", spec.aggregation.rule)

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The global groups of each modality. (G4) their mean over clients goes rank by rank.

        Zero at the start, which means none: clients draw their groups themselves.
        """
        return tuple(TensorSpec(shared(kind), ("s", "m", WIDTHS[kind])) for kind in self.kinds)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``s``, ``m`` and the towers' widths."""
        sizes = {"s": self.hyper.shared, "m": self.hyper.m}
        if TEXT in self.kinds:
            sizes["d_t"] = pf.text_width(self.name, self.hyper.m, context)
        if VISUAL in self.kinds:
            sizes["d_v"] = visual.vision_width(self.name, context)
        return sizes

    def check_texts(self, backbone: Backbone, class_names: tuple[str, ...], template: str) -> None:
        """Every class name must fit behind the prompts, and into the template."""
        super().check_texts(backbone, class_names, template)
        if TEXT in self.kinds:
            backbone.class_prompts(worded(backbone, class_names, self.hyper), self.hyper.m)

    def current(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> Prompts:
        """(G5) the client's groups ``(G, m, d)``: the slots that it sent last hold the current global ones.

        Who has none has the common start, with the global groups in its first slots.
        """
        current = {}
        for kind in self.kinds:
            own, last = private.get(groups(kind)), payload[shared(kind)]
            slots = private[sent(kind)] if own is not None else torch.arange(self.hyper.shared)
            own = self.start(context.backbone, context.seed, kind) if own is None else own.clone()
            if last.any():
                own[slots] = last.to(own)
            current[kind] = own
        return current

    def start(self, backbone: Backbone, seed: int, kind: str) -> Tensor:
        """``(G, m, d)`` before any training, the same for all clients."""
        hyper = self.hyper
        width = backbone.d_t if kind == TEXT else backbone.d_v
        noise: Tensor = drawn(pf.generator(seed, self.name, kind), hyper.groups, hyper.m, width)
        if kind == VISUAL or hyper.context_init is None:
            return noise
        words = backbone.embed_words(hyper.context_init).detach().float().cpu()[: hyper.m]
        started: Tensor = words + noise * (WORDS_STD / pf.INIT_STD)
        return started

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs over all groups; sends those that are drawn, keeps all."""
        hyper, device, towers = self.hyper, context.backbone.device, Groups(context, self.hyper)
        start = self.current(context, payload, private)
        trained = pf.leaves(start, context.backbone)
        labels = context.train.labels.to(device)

        def loss(indices: Tensor) -> Tensor:
            texts, images = towers.texts(trained), towers.images(trained, context.train, indices)
            logits, wanted = towers.logits(images, texts), labels[pf.sent_to(indices, device)]
            value = torch.stack([F.cross_entropy(scores, wanted) for scores in logits]).mean()
            apart = [diversity(features, hyper.diversity) for features in (texts, images)]
            return value + hyper.diversity_weight / 2 * (apart[0] + apart[1])

        final = pf.train(context, list(trained.values()), loss)
        ready = {kind: prompts.detach().cpu() for kind, prompts in trained.items()}
        slots, metrics = self._slots(context, payload, ready)
        update = {shared(kind): ready[kind][slots[kind]].clone() for kind in self.kinds}
        kept = {groups(kind): ready[kind] for kind in self.kinds} | {sent(kind): slots[kind] for kind in self.kinds}
        return pf.TrainResult(update, kept, {"loss": final} | metrics)

    def _slots(
        self, context: pf.ClientContext, payload: Tensors, ready: Prompts
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """(G3) by modality, and numbers for the report."""
        hyper = self.hyper
        draws = pf.generator(context.seed, context.round, context.client, "groups")
        if hyper.select in ("fixed", "all"):
            return dict.fromkeys(self.kinds, torch.arange(hyper.shared)), {}
        alike = torch.full((hyper.groups,), 1 / hyper.groups, dtype=torch.float64)
        if hyper.select == "random" or not any(payload[shared(kind)].any() for kind in self.kinds):
            common = draw_slots(alike, hyper.shared, draws)
            return dict.fromkeys(self.kinds, common), _told(dict.fromkeys(self.kinds, common))
        chances = {kind: likeness(ready[kind], payload[shared(kind)], hyper.temperature) for kind in self.kinds}
        slots = {kind: draw_slots(chances[kind], hyper.shared, draws) for kind in self.kinds}
        entropy = {f"{kind}_entropy": float(-(q * q.log()).sum()) for kind, q in chances.items()}
        return slots, entropy | _told(slots)

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """A trainer's own groups; the global ones for an evaluator, the template before there are any."""
        if private or len(context.train):
            return GroupsClassifier(context, self.current(context, payload, private), self.hyper)
        return self.global_classifier(context, payload)

    def global_classifier(self, context: pf.ClientContext, payload: Tensors) -> pf.Classifier:
        """The global groups alone."""
        last = {kind: payload[shared(kind)] for kind in self.kinds}
        if not any(groups.any() for groups in last.values()):
            return TemplateClassifier(context)
        return GroupsClassifier(context, last, self.hyper)

    def variants(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> dict[str, pf.Classifier]:
        """``global``: a trainer's data under an evaluator's classifier."""
        return {"global": self.global_classifier(context, payload)} if private or len(context.train) else {}


def shared(kind: str) -> str:
    """The state's tensor of a modality."""
    return f"global_{kind}"


def groups(kind: str) -> str:
    """A client's groups of a modality."""
    return f"{kind}_groups"


def sent(kind: str) -> str:
    """The slots of a modality that a client sent last."""
    return f"{kind}_slots"


def _told(slots: dict[str, Tensor]) -> dict[str, float]:
    return {
        f"{kind}_slot_{rank}": float(slot) for kind, some in slots.items() for rank, slot in enumerate(some.tolist())
    }
