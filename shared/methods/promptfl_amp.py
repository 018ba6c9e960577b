"""Prompt+AMP: each client gets a mixture of all contexts, weighted by similarity to its own (FedAMP for prompts).

Source: Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data" (FedAMP, HeurFedAMP), AAAI 2021.
Notation: w_i the last context of client i as one vector, u_i the mixture that it is sent, ``a`` contexts in all.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.client_rows import ROWS, ClientRowsMethod, row_of
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.arrays import double, lengths, namespace, single

if TYPE_CHECKING:
    from torch import Tensor

MESSAGE = TensorSpec("message", ("m", "d_t"))
COSINE_SIGMA = 10.0


class PromptFLAMPHyper(pf.ContextHyper):
    """A learned context, and how much others' count."""

    similarity: Literal["distance", "cosine"] = pf.option(
        "distance", "FedAMP's weights e^(−‖w_i − w_j‖²/σ)/a, or HeurFedAMP's, in proportion to e^(σ·cos)"
    )
    sigma: float | None = pf.option(
        None, "σ; default: the median of the squared distances, or 10 for cosine", gt=0, le=1e6
    )
    proximal: float = pf.option(1.0, "weight λ of (λ/2)·‖w − u‖²; stands for the paper's λ/α", ge=0, le=1e6)


def mixing_weights(rows: Any, similarity: str, sigma: float | None) -> Any:
    """ξ ``(a, a)`` float64 of contexts ``(a, ...)``, each row summing to 1 (Eq. 6.1)."""
    count, xp = len(rows), namespace(rows)
    flat, others = double(rows).reshape(count, -1), 1 - xp.eye(count, dtype=xp.float64)
    if count == 1:
        return xp.ones((1, 1), dtype=xp.float64)
    if similarity == "cosine":
        directions = flat / xp.clip(lengths(flat), 1e-300, None)[:, None]
        powers = xp.exp((sigma or COSINE_SIGMA) * (directions @ directions.T - 1)) * others
        weights = powers / powers.sum(1)[:, None] * (1 - 1 / count)
    else:
        squares = xp.stack([((flat - context) * (flat - context)).sum(1) for context in flat])
        scale = sigma or median(squares[i, j].item() for i in range(count) for j in range(i))
        weights = others * (xp.exp(-squares / scale) / count if scale > 0 else 1 / count)
    return weights + xp.diag(1 - weights.sum(1))


class PromptFLAMP(ClientRowsMethod):
    """CE + (λ/2)·‖w − u‖² from the client's own last context; nothing is averaged, everybody gets a mixture.

    Who has no row yet gets the mean of the rows, and before round 2 the common start; so do evaluators.
    """

    name = "promptfl_amp"
    summary = "Each client trains a context of its own, held near a mixture of all that are like it."
    paper = "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data (FedAMP), 2021; PromptFL as above"
    personal = True
    protects = True
    Hyper = PromptFLAMPHyper
    hyper: PromptFLAMPHyper
    disclosures = (
        pf.Disclosed("operator", "this client's last context by itself, kept until its updates are deleted"),
        pf.Disclosed(
            "sites",
            "mixtures in which this client's last context has a part; with two sites the other can work it out",
        ),
    )

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """One exchange a round: the mixture down, the client's own context up."""
        return (pf.Phase("train", down=(MESSAGE,), up=(pf.CONTEXT,)),)

    def payload(
        self, state: Tensors, phase: pf.Phase | None, client: pf.ClientInfo, context: pf.ServerContext
    ) -> Tensors:
        """u_i, the mixture for this client."""
        usable = self.usable(state, context)
        if not usable:
            return {MESSAGE.name: state[pf.CONTEXT.name]}
        rows = state[ROWS.name][usable]
        at = row_of(client.name, context) if any(other.name == client.name for other in context.clients) else None
        if at not in usable:
            return {MESSAGE.name: single(double(rows).mean(0))}
        weights = mixing_weights(rows, self.hyper.similarity, self.hyper.sigma)[usable.index(at)]
        return {MESSAGE.name: single(namespace(rows).einsum("a,amd->md", weights, double(rows)))}

    def payload_tensors(self, phase: pf.Phase | None) -> tuple[TensorSpec, ...]:
        """The mixture, to be evaluated with as to train from."""
        return (MESSAGE,)

    def aggregate(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> Tensors:
        """The rows of those counted become their contexts."""
        return self.with_answers(state, updates, context)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the client's last context, held near the mixture; sends the context."""
        mixture, weight = payload[MESSAGE.name].to(context.backbone.device), self.hyper.proximal

        def held(learned: Tensor, text: Tensor) -> Tensor:
            return weight / 2 * (learned - mixture).square().sum()

        learned, loss = pf.train_context(context, self._own(payload, private), held if weight else None)
        return pf.TrainResult({pf.CONTEXT.name: learned}, {pf.CONTEXT.name: learned}, {"loss": loss})

    def _own(self, payload: Tensors, private: Tensors) -> Tensor:
        return private.get(pf.CONTEXT.name, payload[MESSAGE.name])

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TextPromptClassifier:
        """With the client's own context; with what it was sent where it has trained none."""
        return pf.TextPromptClassifier(context, self._own(payload, private))
