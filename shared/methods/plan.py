"""PLAN: deep text and visual prompts, learned beside a fixed reference, then put together by attention.

Gong et al., "Federated Domain Generalization via Prompt Learning and Aggregation"; equations are the paper's. A round
has two phases. In ``prompts`` each client trains all prompts on CE + α·KL to the global prediction (Eq. 10); in
``aggregators`` everybody's prompts come down, and only the aggregators train (Eq. 15). Notation as in `visual.py`; `K`
clients whose prompts were counted, `r` = d // reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core import visual
from promptfed.shared.methods.core.visual import ImageClassifier, Towers, VisualHyper, drawn
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.arrays import namespace, relu, softmax
from promptfed.shared.tensors.lazy import F, Tensor, torch

TEXT, VISUAL = "text", "visual"
AXES = {TEXT: ("depth_t", "d_t", "r_t"), VISUAL: ("depth_v", "d_v", "r_v")}
OWNERS = TensorSpec("prompt_owners", ("K",), dtype="int64", shared_with_clients=False)


class PlanHyper(VisualHyper):
    """PLAN's hyperparameters (section V-C) and the ablations of its Table VI."""

    m: int = pf.option(8, "prompt tokens in each block, text and visual alike", ge=1, le=64)
    depth: int | None = pf.option(None, "blocks with prompts, counted from the first; null: all", ge=1, le=256)
    alpha: float = pf.option(1.0, "weight α of the KL divergence to the global prediction; 0: without it", ge=0, le=1e6)
    zero_shot_reference: bool = pf.option(
        True, "round 1 takes zero-shot CLIP for the global prediction; false: no KL in round 1"
    )
    text_aggregation: Literal["attention", "mean"] = pf.option("attention", "mean: without the text aggregator A_t")
    visual_aggregation: Literal["attention", "mean"] = pf.option("attention", "mean: without the visual aggregator A_v")
    reduction: int = pf.option(8, "width of a block over its perceptrons' hidden one", ge=1, le=1024)
    residual: bool = pf.option(True, "perceptrons are x + W₂·ReLU(W₁x + b₁) + b₂; false: without the x")
    aggregators: Literal["persist", "reset"] = pf.option(
        "persist",
        "persist: a round's aggregators train on from the last round's mean (Algorithm 1 as printed); "
        "reset: from their common start, the plain mean",
    )
    local_prompts: Literal["restart", "persist"] = pf.option(
        "restart",
        "restart: Tᵏ := T^g, Vᵏ := V^g in every round (Algorithm 1 as printed); persist: clients start a round from "
        "their own prompts",
    )


def prompts_of(modality: str) -> TensorSpec:
    """The global prompts."""
    depth, d, _ = AXES[modality]
    return TensorSpec(f"{modality}_prompts", (depth, "m", d))


GLOBAL = (prompts_of(TEXT), prompts_of(VISUAL))


def clients_prompts_of(modality: str) -> TensorSpec:
    """All clients' prompts, between the phases of a round; without a row outside them."""
    depth, d, _ = AXES[modality]
    return TensorSpec(f"client_{modality}_prompts", ("K", depth, "m", d))


def aggregator_of(modality: str) -> tuple[TensorSpec, ...]:
    """The aggregators of all blocks: the query Q and the perceptrons F_q and F_a."""
    depth, d, r = AXES[modality]
    parts: dict[str, tuple[str, ...]] = {"query": (depth, "m", d)}
    for net in ("fq", "fa"):
        parts |= {
            f"{net}.w1": (depth, r, d),
            f"{net}.b1": (depth, r),
            f"{net}.w2": (depth, d, r),
            f"{net}.b2": (depth, d),
        }
    return tuple(TensorSpec(f"{modality}_aggregator.{part}", shape) for part, shape in parts.items())


@dataclass(frozen=True)
class Aggregator:
    """The attention aggregators of one modality, one for every block; ``tensors`` are those of `aggregator_of`."""

    modality: str
    tensors: Mapping[str, Any]
    residual: bool

    def shares(self, prompts: Any) -> Any:
        """γ ``(K, depth)`` of prompts ``(K, depth, m, d)``: softmax over clients of ⟨Q, F_q(Tᵏ)⟩ (Eq. 12)."""
        scores = (self._part("query") * self._perceptron("fq", prompts)).sum((-2, -1))
        return softmax(scores, 0)

    def __call__(self, prompts: Any) -> Any:
        """The global prompts ``(depth, m, d)`` = Σ γ_k·F_a(Tᵏ) of prompts ``(K, depth, m, d)`` (Eq. 13)."""
        return (self.shares(prompts)[..., None, None] * self._perceptron("fa", prompts)).sum(0)

    def _perceptron(self, net: str, tokens: Any) -> Any:
        einsum = namespace(tokens).einsum
        hidden = einsum("klmd,lrd->klmr", tokens, self._part(f"{net}.w1")) + self._part(f"{net}.b1")[:, None]
        out = einsum("klmr,ldr->klmd", relu(hidden), self._part(f"{net}.w2")) + self._part(f"{net}.b2")[:, None]
        return tokens + out if self.residual else out

    def _part(self, name: str) -> Any:
        return self.tensors[f"{self.modality}_aggregator.{name}"]


class Reference:
    """log p_global of a client's training images: the fixed end of the KL divergence.

    Computed once per image, or, not ``kept``, each time: of images that are another crop in every batch.
    """

    def __init__(self, count: int, classes: int, logits: Callable[[Tensor, Tensor], Tensor], *, kept: bool = True):
        """``logits(indices (b,), images (b, 3, H, W))`` gives the global prediction's ``(b, C)``."""
        self._kept = kept
        self._log_p: Tensor | None = None  # made with the first prediction, whose dtype is the backbone's
        self._shape = count, classes
        self._known = torch.zeros(count, dtype=torch.bool)
        self._logits = logits

    def of(self, indices: Tensor, images: Tensor) -> Tensor:
        """``(B, C)`` at ``indices (B,)``, whose preprocessed ``images`` are at hand."""
        if not self._kept:
            with torch.no_grad():
                return torch.log_softmax(self._logits(indices, images), dim=-1)
        [new] = (~self._known[indices]).nonzero(as_tuple=True)
        if len(new):
            with torch.no_grad():
                log_p = torch.log_softmax(self._logits(indices[new], images[pf.sent_to(new, images.device)]), dim=-1)
            if self._log_p is None:
                self._log_p = log_p.new_zeros(self._shape)
            self._log_p[pf.sent_to(indices[new], log_p.device)] = log_p
            self._known[indices[new]] = True
        assert self._log_p is not None
        return self._log_p[pf.sent_to(indices, self._log_p.device)]


def divergence(log_reference: Tensor, logits: Tensor) -> Tensor:
    """KL(p_global ‖ p_local), mean over images, of log p_global ``(B, C)`` and local logits ``(B, C)`` (Eq. 9)."""
    return F.kl_div(torch.log_softmax(logits, dim=-1), log_reference, log_target=True, reduction="batchmean")


class Plan(pf.Method):
    """See the module. All clients' prompts are shown to all who take part in a round: that is the method's bridge."""

    name = "plan"
    summary = "Deep text and visual prompts tied to a global reference, aggregated by trained attention."
    paper = "Gong et al., Federated Domain Generalization via Prompt Learning and Aggregation (PLAN), 2024"
    unprotected = "its aggregators have millions of numbers"
    change_per_number = 0.5  # prompts pass through the perceptrons in each round, so long ones grow from round to round
    Hyper = PlanHyper
    hyper: PlanHyper
    needs = visual.NEEDS
    defaults = pf.defaults(20, {"aggregation": {"weighting": "uniform"}}, epochs=1, batch_size=32, learning_rate=0.0015)

    def __init__(self, hyper: PlanHyper):
        super().__init__(hyper)
        kinds = {TEXT: hyper.text_aggregation, VISUAL: hyper.visual_aggregation}
        self.attentive = tuple(modality for modality in (TEXT, VISUAL) if kinds[modality] == "attention")

    @property
    def disclosures(self) -> tuple[pf.Disclosed, ...]:
        """All prompts come down in the phase ``aggregators``, one client's beside the other's."""
        if not self.attentive:
            return (pf.AGGREGATE,)
        kinds = " and ".join(self.attentive)
        text = f"this client's own {kinds} prompts as it trained them: each round they go to all who take part in it"
        return (pf.AGGREGATE, pf.Disclosed("sites", f"{text}, unnamed"))

    # Server half

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """Global prompts; for each attentive modality the aggregators and, within a round, the clients' prompts."""
        attentive = [(clients_prompts_of(modality), *aggregator_of(modality)) for modality in self.attentive]
        owners = (OWNERS,) if self.attentive else ()
        return (*GLOBAL, *(spec for specs in attentive for spec in specs), *owners)

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """``prompts``, then ``aggregators`` where there are any."""
        first = pf.Phase("prompts", down=GLOBAL, up=GLOBAL, mean=not self.attentive)
        if not self.attentive:
            return (first,)
        trained = tuple(spec for modality in self.attentive for spec in aggregator_of(modality))
        shown = tuple(
            clients_prompts_of(modality) if modality in self.attentive else prompts_of(modality)
            for modality in (TEXT, VISUAL)
        )
        return (first, pf.Phase("aggregators", down=(*shown, *trained), up=trained, mean=True))

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """Widths and depths of both towers, and the perceptrons' hidden widths."""
        hyper = self.hyper
        sizes = {"m": hyper.m}
        sizes |= visual.text_dims(self.name, hyper.m, hyper.depth, context)
        sizes |= visual.vision_dims(self.name, hyper.depth, context)
        return sizes | {"r_t": max(1, sizes["d_t"] // hyper.reduction), "r_v": max(1, sizes["d_v"] // hyper.reduction)}

    @property
    def prompt_length(self) -> int:
        """As many as ``m``."""
        return self.hyper.m

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """One common start for all: prompts and queries N(0, 0.02²), perceptrons that add nothing yet."""
        dims = self.dims(context)
        state = {spec.name: drawn(draws, *spec.resolve(dims)) for spec in GLOBAL}
        return state | self._new_aggregators(dims, draws) | self._nobodys_prompts(dims, draws.xp)

    def _new_aggregators(self, dims: Mapping[str, int], draws: Draws) -> Tensors:
        specs = [spec for modality in self.attentive for spec in aggregator_of(modality)]
        return {spec.name: self._start(spec.name, spec.resolve(dims), draws) for spec in specs}

    def _start(self, name: str, shape: tuple[int, ...], draws: Draws) -> Any:
        """W₁ is uniform in ±1/√fan-in; W₂ and biases are zero, so that training starts at x (without it: as W₁)."""
        part = name.rpartition(".")[2]
        if part == "query":
            return drawn(draws, *shape)
        if part == "w1" or (part == "w2" and not self.hyper.residual):
            return (draws.uniform(*shape) * 2 - 1) / math.sqrt(shape[-1])
        return draws.xp.zeros(shape, dtype=draws.xp.float32)

    def _nobodys_prompts(self, dims: Mapping[str, int], xp: Any) -> Tensors:
        specs = [clients_prompts_of(modality) for modality in self.attentive] + ([OWNERS] if self.attentive else [])
        sizes = {**dims, "K": 0}
        return {spec.name: xp.zeros(spec.resolve(sizes), dtype=getattr(xp, spec.dtype)) for spec in specs}

    def payload_tensors(self, phase: pf.Phase | None) -> tuple[TensorSpec, ...]:
        """What the phase names; for an evaluation the global prompts."""
        return GLOBAL if phase is None else phase.down

    def aggregate(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> Tensors:
        """After ``prompts``: keep them by client (without an aggregator: their mean). After ``aggregators``: Eq. 16,
        then Eq. 13 with the mean aggregators."""
        if phase.name == "aggregators":
            state = state | combine(updates)
            made = {
                prompts_of(modality).name: self._aggregator(state, modality)(state[clients_prompts_of(modality).name])
                for modality in self.attentive
            }
            return state | made | self._nobodys_prompts(self.dims(context), namespace(state[OWNERS.name]))
        kept = list(updates)
        plain = [prompts_of(modality).name for modality in (TEXT, VISUAL) if modality not in self.attentive]
        means = [
            pf.ClientUpdate(update.client, update.weight, {name: update.tensors[name] for name in plain})
            for update in kept
        ]
        state = state | combine(means) if plain else dict(state)
        for modality in self.attentive:
            name = prompts_of(modality).name
            parts = [update.tensors[name] for update in kept]
            state[clients_prompts_of(modality).name] = namespace(parts[0]).stack(parts)
        if self.attentive:
            roster = [client.name for client in context.clients]
            xp = namespace(state[OWNERS.name])
            state[OWNERS.name] = xp.asarray([roster.index(update.client) for update in kept], dtype=xp.int64)
        if self.hyper.aggregators == "reset":  # every round from the same draws
            state |= self._new_aggregators(self.dims(context), context.draws(self.name, "aggregators"))
        return state

    def measure(self, before: Tensors, phase: pf.Phase, after: Tensors, context: pf.ServerContext) -> pf.Measured:
        """γ of each client, modality and block with the mean aggregators, and per modality how far it spreads."""
        if phase.name != "aggregators":
            return pf.Measured()
        names = [context.clients[row].name for row in before[OWNERS.name].tolist()]
        clients: dict[str, dict[str, float]] = {name: {} for name in names}
        spread = {}
        for modality in self.attentive:
            gamma = self._aggregator(after, modality).shares(before[clients_prompts_of(modality).name])
            for name, blocks in zip(names, gamma.tolist(), strict=True):
                clients[name] |= {f"gamma_{modality}_{block}": value for block, value in enumerate(blocks)}
            columns = list(zip(*gamma.tolist(), strict=True))
            spread[f"gamma_{modality}_spread"] = max(max(column) - min(column) for column in columns)
        return pf.Measured(phase=spread, clients=clients)

    def _aggregator(self, tensors: Mapping[str, Tensor], modality: str) -> Aggregator:
        return Aggregator(modality, tensors, self.hyper.residual)

    # Client half

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of the phase's training."""
        towers = Towers(context.backbone, self.hyper)
        if context.phase == "aggregators":
            return replace(self._train_aggregators(context, towers, payload), private=dict(private))
        return self._train_prompts(context, towers, payload, private)

    def _train_prompts(
        self, context: pf.ClientContext, towers: Towers, payload: Tensors, private: Tensors
    ) -> pf.TrainResult:
        """Tᵏ := T^g, Vᵏ := V^g, or this client's own of the last round; then CE + α·KL (Eq. 8-10)."""
        classes = context.backbone.class_prompts(context.class_names, self.hyper.m)
        start = payload | private if self.hyper.local_prompts == "persist" else payload
        text, seen = (pf.leaf(start[spec.name], context.backbone) for spec in GLOBAL)

        def logits(images: Tensor) -> Tensor:
            return towers.cosine(towers.images(images, seen), towers.text(text, classes))

        reference = self._reference(context, towers, payload)

        def term(indices: Tensor, images: Tensor, scores: Tensor) -> Tensor:
            assert reference is not None
            return self.hyper.alpha * divergence(reference.of(indices, images), scores)

        loss = visual.train_on_images(context, [text, seen], logits, term if reference is not None else None)
        update = {spec.name: tensor for spec, tensor in zip(GLOBAL, (text, seen), strict=True)}
        kept = dict(update) if self.hyper.local_prompts == "persist" else {}
        return pf.TrainResult(update, kept, {"loss": loss})

    def _reference(self, context: pf.ClientContext, towers: Towers, payload: Tensors) -> Reference | None:
        """The global prediction: zero-shot CLIP in round 1, then the global prompts' (section IV-B)."""
        first = context.round == 1
        if self.hyper.alpha == 0 or (first and not self.hyper.zero_shot_reference):
            return None
        count, classes = len(context.train), len(context.class_names)
        kept = context.training.augmentation == "none"
        if first:
            template = TemplateClassifier(context)
            if kept:
                return Reference(count, classes, lambda indices, images: template.logits(context.train, indices))
            return Reference(count, classes, lambda indices, images: template.of_images(images), kept=False)
        scores = self._logits(context, towers, payload)
        return Reference(count, classes, lambda indices, images: scores(images), kept=kept)

    def _logits(self, context: pf.ClientContext, towers: Towers, payload: Tensors) -> visual.Logits:
        """Logits of images under the global prompts."""
        text, seen = (payload[spec.name] for spec in GLOBAL)
        return visual.prompted_logits(towers, context, text, seen)

    def _train_aggregators(self, context: pf.ClientContext, towers: Towers, payload: Tensors) -> pf.TrainResult:
        """CE with the aggregated prompts, whose parts stay as they are (Eq. 14, 15)."""
        device = context.backbone.device
        classes = context.backbone.class_prompts(context.class_names, self.hyper.m)
        specs = [spec for modality in self.attentive for spec in aggregator_of(modality)]
        trained = {spec.name: pf.leaf(payload[spec.name], context.backbone) for spec in specs}
        parts = {name: tensor.to(device) for name, tensor in payload.items() if name not in trained}

        def prompts(modality: str) -> Tensor:
            if modality not in self.attentive:
                return parts[prompts_of(modality).name]
            made: Tensor = self._aggregator(trained, modality)(parts[clients_prompts_of(modality).name])
            return made

        def logits(images: Tensor) -> Tensor:
            return towers.cosine(towers.images(images, prompts(VISUAL)), towers.text(prompts(TEXT), classes))

        loss = visual.train_on_images(context, list(trained.values()), logits)
        return pf.TrainResult(trained, metrics={"loss": loss})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> ImageClassifier:
        """Classifies with the global prompts."""
        return ImageClassifier(self._logits(context, Towers(context.backbone, self.hyper), payload))
