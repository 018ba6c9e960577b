"""pFedMoAP: each client downloads the contexts of others as frozen experts, and a private gate mixes them per image.

Source: Luo, Chen and Wu, "Mixture of Experts Made Personalized: Federated Prompt Learning for Vision-Language Models",
ICLR 2025. Notation: ``B`` images, ``C`` classes, ``E`` experts and the client's own context in the first place, ``g``
width of the gate, ``h`` its heads.
"""

from __future__ import annotations

import logging
from typing import Any

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.client_rows import ANSWERED, ROWS, ClientRowsMethod, row_of
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.arrays import double
from promptfed.shared.tensors.lazy import F, Tensor, torch

log = logging.getLogger("promptfed.methods")

EXPERTS = TensorSpec("experts", ("E", "m", "d_t"))
OWN, GATE = "own_context", "gate."
PARTS = ("query", "key", "value", "output")
MANY_CLIENTS = 2000
MOST_ENTRIES = 1 << 22  # of (B, C, g) that are made at once
TIE = 1e-12  # of the largest squared distance: nearer ones are the same, and the name decides


class PFedMoAPHyper(pf.WordsHyper):
    """A learned context, the experts and the gate."""

    experts: int = pf.option(9, "K, contexts of other clients that each downloads", ge=0, le=256)
    local_weight: float = pf.option(0.5, "λ of the own context's logit beside the gate's", ge=0, le=1e3)
    gate_width: int = pf.option(128, "g, at most the joint embedding's width", ge=1, le=4096)
    heads: int = pf.option(8, "h, heads of the gate; must divide its width", ge=1, le=64)
    gate_scaling: float = pf.option(
        10.0, "s, which the gate's scores are multiplied by before the softmax", gt=0, le=1e4
    )
    gate_learning_rate: float = pf.option(0.01, "rate of the gate, constant", gt=0, le=1000)


def pooled(features: Tensor, width: int) -> Tensor:
    """π: the entries at ⌊i·d_e/g⌋ of features ``(..., d_e)``."""
    places = torch.arange(width, device=features.device) * features.shape[-1] // width
    return features[..., places]


def in_ties(rows: Any, at: int) -> Any:
    """``(n,)`` squared distances of ``rows (n, m, d_t)`` from row ``at``, as whole numbers of ties, float64."""
    wide = double(rows).reshape(len(rows), -1)
    apart = wide - wide[at]
    squares = (apart * apart).sum(1)
    return (squares / (TIE * max(float(squares.max()), 1e-300))).round()


class Gate:
    """Multi-head attention from an image's feature to the class features of own context and experts (Eq. 3.1, 3.2)."""

    def __init__(self, parameters: Tensors, hyper: PFedMoAPHyper, scale: float):
        self.parameters, self._hyper, self._scale = parameters, hyper, scale
        self._width = len(parameters["query.bias"])

    def _linear(self, part: str, rows: Tensor) -> Tensor:
        return F.linear(rows, self.parameters[f"{part}.weight"], self.parameters[f"{part}.bias"])

    def mixed(self, images: Tensor, texts: Tensor) -> Tensor:
        """O ``(B, C, g)`` of image features ``(B, d_e)`` and class features ``(1 + E, C, d_e)``."""
        heads = self._hyper.heads

        def split(rows: Tensor) -> Tensor:
            return rows.reshape(*rows.shape[:-1], heads, self._width // heads)

        query = split(self._linear("query", pooled(images, self._width)))  # (B, h, g/h)
        features = pooled(texts, self._width)
        key, value = split(self._linear("key", features)), split(self._linear("value", features))  # (1 + E, C, h, g/h)
        scores = torch.einsum("bhd,echd->bhec", query, key) * self._hyper.gate_scaling
        shares = scores.softmax(dim=2)
        return self._linear("output", torch.einsum("bhec,echd->bchd", shares, value).flatten(2))

    def logits(self, images: Tensor, texts: Tensor) -> Tensor:
        """``(B, C)`` q·(⟨π(f), O⟩ + λ·⟨f, z_own⟩)."""
        feature, mixed = pooled(images, self._width), self.mixed(images, texts)
        score = torch.einsum("bg,bcg->bc", feature, mixed) + self._hyper.local_weight * images @ texts[0].T
        return self._scale * score


class PFedMoAP(ClientRowsMethod):
    """Every participation starts from the mean of the last round's participants; the pool of contexts feeds the gates.

    Without experts (a first participation, an evaluator) it is PromptFL. Experts are chosen from the contexts as they
    were before the round.
    """

    name = "pfedmoap"
    summary = "Other clients' contexts as frozen experts, mixed with the own one by a private attention gate."
    paper = "Luo et al., Mixture of Experts Made Personalized: Federated Prompt Learning (pFedMoAP), 2025"
    personal = True
    protects = True
    Hyper = PFedMoAPHyper
    hyper: PFedMoAPHyper
    defaults = pf.defaults(10, epochs=5, batch_size=16, learning_rate=0.002)
    disclosures = (
        pf.Disclosed("operator", "this client's last context by itself, kept until its updates are deleted"),
        pf.Disclosed(
            "sites",
            "this client's last uploaded context, without its name; those whose own is most like it get it first, "
            "and with two sites the sender is plain",
        ),
    )

    # Server half

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """One exchange a round: the mean and the experts down, the trained context up."""
        return (pf.Phase("train", down=(pf.CONTEXT, EXPERTS), up=(pf.CONTEXT,)),)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``m``, ``d_t`` and ``n``; ``E`` is free. Raises MethodError where the heads do not divide g."""
        width = min(self.hyper.gate_width, context.shape.d_e)
        if width % self.hyper.heads:
            raise pf.MethodError(
                f"a gate of width {width} cannot have {self.hyper.heads} heads: give heads, or a gate_width up to "
                f"{context.shape.d_e}, so that one divides the other"
            )
        return super().dims(context)

    def check_clients(self, context: pf.ServerContext) -> None:
        """Few clients have nothing to exchange, and many make the state large: both are only warned of."""
        trainers = sum(client.role == "trainer" for client in context.clients)
        if trainers < 2:
            log.warning("pfedmoap with %d trainer has no experts: it is promptfl", trainers)
        if trainers > MANY_CLIENTS:
            size = trainers * self.length * (context.shape.d_t or 0) * 4 / 1e6
            log.warning("pfedmoap keeps the contexts of %d clients in its state: %.0f MB each round", trainers, size)

    def payload(
        self, state: Tensors, phase: pf.Phase | None, client: pf.ClientInfo, context: pf.ServerContext
    ) -> Tensors:
        """The mean context, and contexts of other active clients for one that has answered."""
        chosen: list[int] = []
        names = [other.name for other in context.clients]
        if client.role == "trainer" and client.name in names:
            at = row_of(client.name, context)
            if int(state[ANSWERED.name][at]):
                chosen = self._chosen(state, at, context)
        return {pf.CONTEXT.name: state[pf.CONTEXT.name], EXPERTS.name: state[ROWS.name][chosen]}

    def payload_tensors(self, phase: pf.Phase | None) -> tuple[TensorSpec, ...]:
        """The same to be evaluated with as to train from."""
        return (pf.CONTEXT, EXPERTS)

    def _chosen(self, state: Tensors, at: int, context: pf.ServerContext) -> list[int]:
        others = [row for row in self.usable(state, context) if row != at]
        distances = in_ties(state[ROWS.name], at)
        # The sort is stable and rows are in order of name.
        return sorted(others, key=lambda row: float(distances[row]))[: self.hyper.experts]

    def aggregate(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> Tensors:
        """The rows of those counted become their contexts, the common one their mean."""
        counted = list(updates)
        return self.with_answers(state, counted, context) | combine(counted)

    # Client half

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the mean: PromptFL's without experts, over context and gate with them; sends the context."""
        start, experts = payload[pf.CONTEXT.name], payload[EXPERTS.name]
        kept = {name: tensor for name, tensor in private.items() if name.startswith(GATE)}
        if not len(experts):
            learned, final = pf.train_context(context, start, prompted=self.prompted(context))
            return pf.TrainResult({pf.CONTEXT.name: learned}, kept | {OWN: learned}, {"loss": final})
        device = context.backbone.device
        context_leaf = pf.leaf(start, context.backbone)
        gate = self._gate(context, kept, trainable=True)
        prompted, others = self.prompted(context), self._texts(context, experts)
        features, labels = context.train.features(), context.train.labels.to(device)

        def loss(indices: Tensor) -> Tensor:
            rows = pf.sent_to(indices, device)
            texts = torch.cat([prompted(context_leaf).unsqueeze(0), others])
            return F.cross_entropy(gate.logits(features[rows], texts), labels[rows])

        group = pf.Group(list(gate.parameters.values()), self.hyper.gate_learning_rate, constant=True)
        final = pf.train(context, [context_leaf], loss, groups=[group])
        trained = {GATE + name: value for name, value in gate.parameters.items()}
        return pf.TrainResult({pf.CONTEXT.name: context_leaf}, trained | {OWN: context_leaf}, {"loss": final})

    def _texts(self, context: pf.ClientContext, contexts: Tensor) -> Tensor:
        """Class features ``(k, C, d_e)`` of fixed ``contexts (k, m, d_t)``."""
        with torch.no_grad():
            return self.prompted(context)(contexts)

    def _gate(self, context: pf.ClientContext, private: Tensors, trainable: bool = False) -> Gate:
        """The client's gate, or the one that all start with: U(±1/√g), as torch's linear layers begin."""
        gate = {name.removeprefix(GATE): value for name, value in private.items() if name.startswith(GATE)}
        if not gate:
            width = min(self.hyper.gate_width, context.backbone.d_e)
            draws, bound = pf.generator(context.seed, self.name, "gate"), width**-0.5
            for part in PARTS:
                for name, shape in ((f"{part}.weight", (width, width)), (f"{part}.bias", (width,))):
                    gate[name] = (torch.rand(shape, generator=draws) * 2 - 1) * bound
        device = context.backbone.device
        parameters = {name: value.to(device).clone().requires_grad_(trainable) for name, value in gate.items()}
        return Gate(parameters, self.hyper, context.backbone.logit_scale)

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """Own context, gate and experts; without gate or experts the own context, and before any training the mean."""
        experts, own = payload[EXPERTS.name], private.get(OWN, payload[pf.CONTEXT.name])
        if not len(experts) or not any(name.startswith(GATE) for name in private):
            return self.classified(context, own)
        texts, gate = self._texts(context, torch.cat([own.unsqueeze(0), experts])), self._gate(context, private)
        at_once = max(1, MOST_ENTRIES // (texts.shape[1] * len(gate.parameters["query.bias"])))
        return pf.FeatureClassifier(
            lambda images: torch.cat([gate.logits(part, texts) for part in torch.split(images, at_once)])
        )
