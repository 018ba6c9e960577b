"""FedTPG: a shared generator makes the context from the class names' own text features.

One vector set P = f_θ(T) serves all classes of a task; f_θ is what clients train and the coordinator averages, so that
prompts can also be made for classes that no client has.

Source: Qiu et al., "Federated Text-driven Prompt Generation for Vision-Language Models" (FedTPG), ICLR 2024; equation
numbers below are the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.text_features import name_features
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, Tensor, torch

FeedForward = Literal["relu", "geglu"]
WIDTHS: dict[FeedForward, tuple[int, int]] = {"relu": (1, 1), "geglu": (8, 4)}
"""Widths of the feed-forward's hidden layer, before and after its activation, in multiples of ``d_t``."""

QUERIES = "queries"
PARAMETERS = (
    TensorSpec(QUERIES, ("m", "d_t")),
    *pf.layer("norm_queries", "d_t"),
    *pf.layer("norm_classes", "d_e"),
    *pf.layer("to_query", "d_t", "d_t"),
    *pf.layer("to_key", "d_t", "d_e"),
    *pf.layer("to_value", "d_t", "d_e"),
    *pf.layer("to_output", "d_t", "d_t"),
    *pf.layer("norm_hidden", "d_t"),
    *pf.layer("widen", "ff_in", "d_t"),
    *pf.layer("narrow", "d_t", "ff_out"),
)
OUTPUTS = ("to_output.weight", "narrow.weight")  # the context is the sum of what these two layers make


class FedTPGHyper(pf.Hyperparameters):
    """The generator's sizes."""

    label_space: pf.LabelSpace = "client"
    m: int = pf.option(4, "learned vectors; and queries for them", ge=1, le=64)
    heads: int = pf.option(4, "heads of the attention; they divide the tower's width", ge=1, le=64)
    feedforward: FeedForward = pf.option(
        "relu", "h_φ: two layers of d_t with ReLU (the paper's text), or d→8d→GEGLU→4d→d (its released code)"
    )
    start: Literal["scaled", "xavier", "normal"] = pf.option(
        "scaled",
        "weights at the start: Xavier's uniform draws; scaled: those, with contexts as small as word embeddings; "
        "normal: N(0, 0.02²)",
    )


class FedTPG(pf.Method):
    """CE of cosine logits under the context that f_θ generates; θ is all that is trained and all that travels."""

    name = "fedtpg"
    summary = "A shared generator that makes the context from the text features of a client's own class names."
    paper = "Qiu et al., Federated Text-driven Prompt Generation for Vision-Language Models (FedTPG), 2024"
    several_labels = True
    of_names = True
    protects = True
    Hyper = FedTPGHyper
    hyper: FedTPGHyper
    metrics = ("loss", "context_cosine")
    defaults = pf.defaults(
        500,
        {"aggregation": {"weighting": "uniform"}},
        epochs=1,
        batch_size=200,
        optimizer="sgd",
        learning_rate=0.003,
        momentum=0.9,
        weight_decay=1e-5,
        schedule="cosine",
    )

    # Server half

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """θ: queries, norms, attention and feed-forward. The coordinator averages it (Algorithm 1)."""
        return PARAMETERS

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``m``, both widths and the feed-forward's."""
        d_t = pf.text_width(self.name, self.hyper.m, context)
        if d_t % self.hyper.heads:
            raise pf.MethodError(
                f"{self.hyper.heads} heads do not divide the text tower's width of {d_t}: choose heads that do"
            )
        wide, narrow = WIDTHS[self.hyper.feedforward]
        sizes = {"m": self.hyper.m, "d_t": d_t, "d_e": context.shape.d_e}
        return sizes | {"ff_in": wide * d_t, "ff_out": narrow * d_t}

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """θ⁰: queries from N(0, 0.02²), weights as ``start`` says, norms the identity, biases zero.

        The paper gives no initialisation. With Xavier's (Glorot and Bengio, 2010) a query's scores differ from class to
        class, and so do a task's vectors, whose entries are near 1. Text towers are trained on embeddings of about 0.02
        and may read such contexts as noise, so ``scaled`` multiplies the two layers that make them by it. With
        N(0, 0.02²) contexts are as small, and alike.
        """
        dims, state = self.dims(context), {}
        for spec in PARAMETERS:
            shape = spec.resolve(dims)
            if len(shape) == 2 and (self.hyper.start == "normal" or spec.name == QUERIES):
                state[spec.name] = draws.normal(*shape) * pf.INIT_STD
            elif len(shape) == 2:
                bound = math.sqrt(6 / sum(shape))
                if self.hyper.start == "scaled" and spec.name in OUTPUTS:
                    bound *= pf.INIT_STD / self._output_scale(dims["d_t"])
                state[spec.name] = (draws.uniform(*shape) * 2 - 1) * bound
            else:
                start = float(spec.name.endswith("weight"))
                state[spec.name] = draws.xp.full(shape, start, dtype=draws.xp.float32)
        return state

    # Client half

    @property
    def prompt_length(self) -> int:
        """As many as ``m``."""
        return self.hyper.m

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs over θ on the client's own task (Eq. 3-5); sends the trained θ."""
        backbone = context.backbone
        learned = pf.leaves(payload, backbone)
        classes = name_features(backbone, context.class_names)
        prompts, cross_entropy = pf.class_prompts(context, self.hyper.m), pf.BatchCrossEntropy(context)

        def loss(indices: Tensor) -> Tensor:
            return cross_entropy(indices, backbone.encode_prompts(self.context_of(learned, classes), prompts))

        def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
            made = torch.func.vmap(lambda *theta: self.context_of(dict(zip(learned, theta, strict=True)), classes))
            return cross_entropy.each(indices, backbone.encode_prompts(made(*copies), prompts))

        final = pf.train(context, list(learned.values()), loss, objective=pf.Objective(units))
        metrics = {"loss": final}
        if self.hyper.m > 1:
            with torch.no_grad():
                metrics["context_cosine"] = mean_cosine(self.context_of(learned, classes))
        return pf.TrainResult(learned, metrics=metrics)

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TextPromptClassifier:
        """Classifies with the context that is generated for the very class names that are to be told apart."""
        device = context.backbone.device
        theta = {name: value.to(device) for name, value in payload.items()}
        with torch.no_grad():
            generated = self.context_of(theta, name_features(context.backbone, context.class_names))
        return pf.TextPromptClassifier(context, generated)

    def context_of(self, theta: Tensors, classes: Tensor) -> Tensor:
        """P = f_θ(T) ``(m, d_t)`` (Eq. 1-2) for normalised text features T ``(C, d_e)`` of bare class names.

        Layer norms of queries and T, multi-head cross-attention with biases and an output projection, then
        x + FF(LN(x)); no residual connection round the attention. The order of the classes does not matter.
        """
        query = _linear(theta, "to_query", _norm(theta, "norm_queries", theta[QUERIES]))
        normed = _norm(theta, "norm_classes", classes)
        query, key, value = (
            _split(rows, self.hyper.heads)
            for rows in (query, _linear(theta, "to_key", normed), _linear(theta, "to_value", normed))
        )
        attended = F.scaled_dot_product_attention(query, key, value)
        mixed = _linear(theta, "to_output", attended.transpose(0, 1).flatten(1))
        hidden = _linear(theta, "widen", _norm(theta, "norm_hidden", mixed))
        if self.hyper.feedforward == "geglu":
            straight, gate = hidden.chunk(2, dim=-1)
            hidden = straight * F.gelu(gate)
        else:
            hidden = F.relu(hidden)
        return (mixed + _linear(theta, "narrow", hidden)) * self._output_scale(mixed.shape[-1])

    def _output_scale(self, width: int) -> float:
        """1/√d_t for ``scaled``: a step then moves the context about as far as a learned one, whose rates suit."""
        return 1 / math.sqrt(width) if self.hyper.start == "scaled" else 1.0


def mean_cosine(vectors: Tensor) -> float:
    """Mean cosine of the pairs of a task's context vectors ``(m, d_t)``, m > 1; 1: they are one vector m times."""
    cosines = F.normalize(vectors.double(), dim=-1) @ F.normalize(vectors.double(), dim=-1).T
    m = len(vectors)
    return float((cosines.sum() - cosines.diagonal().sum()) / (m * (m - 1)))


def _norm(theta: Tensors, name: str, rows: Tensor) -> Tensor:
    """Layer norm of ``(R, d)``."""
    return F.layer_norm(rows, rows.shape[-1:], theta[f"{name}.weight"], theta[f"{name}.bias"])


def _linear(theta: Tensors, name: str, rows: Tensor) -> Tensor:
    """``(R, i)`` -> ``(R, o)``."""
    return F.linear(rows, theta[f"{name}.weight"], theta[f"{name}.bias"])


def _split(rows: Tensor, heads: int) -> Tensor:
    """``(R, d)`` -> ``(heads, R, d / heads)``."""
    return torch.unflatten(rows, -1, (heads, -1)).transpose(0, 1)
