"""FedPHA: a shared context of fixed length beside a private one of a length of the client's own.

The private context is pulled to its own projection away from the shared one's leading directions, and its text features
are pushed from the shared ones. Source: Fang et al., "FedPHA: Federated Prompt Learning for Heterogeneous Client
Adaptation", ICML 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.private_context import MOST_VECTORS, PairLoss, PrivateContextMethod
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from promptfed.shared.clip import Backbone

Length = Annotated[int, Field(ge=1, le=MOST_VECTORS)]
RANK = 1e-12  # of the largest eigenvalue: a direction under it is none
ROUNDING = 1e-9  # of m·(1 − ρ), which binary arithmetic may leave under a whole number


class FedPHAHyper(pf.ContextHyper):
    """The shared context's length, the clients' own ones, and the terms of the loss."""

    local_lengths: dict[str, Length] | None = pf.option(
        None, "vectors of the private context by client; a client's own `m_local` comes first, m last"
    )
    ratio: float = pf.option(0.8, "ρ: the ⌊m·(1 − ρ)⌋ leading directions of the shared context are removed", ge=0, le=1)
    projection: Literal["complement", "span"] = pf.option(
        "complement", "onto all that is orthogonal to these, or onto the shared context's other directions alone"
    )
    pull: float = pf.option(1.0, "weight w₁ of mean (z^L − ẑ^L)²", ge=0, le=1e6)
    push: float = pf.option(1.0, "weight w₂ of mean ReLU(α − ‖z^L − z^G‖)", ge=0, le=1e6)
    alpha: float = pf.option(1.0, "distance α up to which features are pushed apart", ge=0, le=2)
    global_loss: bool = pf.option(
        True, "whether the shared context has a cross-entropy of its own; else the push trains it"
    )


class FedPHAOwn(pf.OwnOptions):
    """What a client chooses for itself."""

    m_local: Length | None = pf.option(None, "vectors of this client's private context")


def removed(m: int, ratio: float) -> int:
    """k = ⌊m·(1 − ρ)⌋, as it is written: 10·(1 − 0.8) is 2."""
    return int(m * (1 - ratio) + ROUNDING)


def directions(shared: Tensor, k: int, projection: str) -> Tensor:
    """Right singular vectors of ``shared (m, d_t)`` as columns, float64: the k leading ones, or for ``span`` the rest.

    They come from the eigenvectors of p_G·p_Gᵀ; where p_G has a lower rank there are fewer.
    """
    given = shared.detach().double()
    values, vectors = torch.linalg.eigh(given @ given.T)  # ascending
    values, vectors = values.flip(0), vectors.flip(1)
    chosen = slice(0, k) if projection == "complement" else slice(k, len(values))
    values, vectors = values[chosen], vectors[:, chosen]
    there = values > RANK * values.new_tensor(float(given.square().sum()))
    basis: Tensor = given.T @ vectors[:, there] / values[there].sqrt()
    return basis


def project(local: Tensor, basis: Tensor, projection: str) -> Tensor:
    """p̂_L = p_L·Π ``(m_l, d_t)`` with Π = I − V·Vᵀ (complement) or V·Vᵀ (span); Π has no gradient."""
    basis = basis.to(local.dtype)
    inside = local @ basis @ basis.T
    return local - inside if projection == "complement" else inside


class HeterogeneousLoss:
    """CE of both contexts, the pull to the projection and the push from the shared features."""

    def __init__(self, context: pf.ClientContext, hyper: FedPHAHyper, m_local: int):
        self._backbone: Backbone = context.backbone
        self._hyper, self._same = hyper, m_local == hyper.m
        self._shared_prompts, self._local_prompts = (
            pf.class_prompts(context, hyper.m),
            pf.class_prompts(context, m_local),
        )
        self._cross_entropy = pf.BatchCrossEntropy(context)

    def __call__(self, indices: Tensor, shared: Tensor, local: Tensor) -> Tensor:
        """Of the shared context ``(m, d_t)`` and the private one ``(m_l, d_t)``."""
        hyper = self._hyper
        z_local, z_projected, z_shared = self._features(shared, local)
        loss = self._cross_entropy(indices, z_local)
        if hyper.global_loss:
            loss = loss + self._cross_entropy(indices, z_shared)
        if z_projected is not None:
            loss = loss + hyper.pull * (z_local - z_projected).square().mean()
        distances = torch.linalg.vector_norm(z_local - z_shared, dim=-1)
        return loss + hyper.push * torch.relu(hyper.alpha - distances).mean()

    def _features(self, shared: Tensor, local: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Text features ``(C, d_e)``: of the private context, of its projection, of the shared context."""
        encode, hyper = self._backbone.encode_prompts, self._hyper
        contexts = [local]
        if hyper.pull:
            basis = directions(shared, removed(hyper.m, hyper.ratio), hyper.projection)
            contexts.append(project(local, basis, hyper.projection))
        if self._same:
            *own, z_shared = encode(torch.stack([*contexts, shared]), self._local_prompts)
        else:
            own = list(encode(torch.stack(contexts), self._local_prompts))
            z_shared = encode(shared, self._shared_prompts)
        return own[0], own[1] if hyper.pull else None, z_shared


class FedPHA(PrivateContextMethod):
    """Trained over both contexts; the shared one is averaged, the private one's length is the client's own.

    Trainers classify with the private context, evaluators with the shared one.
    """

    name = "fedpha"
    summary = "A shared context beside private ones whose length each client chooses, pulled and pushed apart."
    paper = "Fang et al., FedPHA: Federated Prompt Learning for Heterogeneous Client Adaptation, 2025"
    protects = True
    Hyper = FedPHAHyper
    hyper: FedPHAHyper
    Own = FedPHAOwn
    own: FedPHAOwn
    defaults = pf.defaults(50, epochs=1, batch_size=32, learning_rate=0.001)

    @property
    def lengths(self) -> dict[str, int]:
        """Vectors of the private context by client, as the spec says."""
        return self.hyper.local_lengths or {}

    def check(self, spec: pf.FederationSpec) -> None:
        """The pull must have a direction to remove."""
        super().check(spec)
        hyper = self.hyper
        if hyper.pull and removed(hyper.m, hyper.ratio) == 0:
            raise pf.MethodError(f"ratio {hyper.ratio:g} of m = {hyper.m} removes no direction: lower ratio or raise m")

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``m`` and the text tower's width ``d_t``; the clients' lengths must fit as well."""
        for m in self.lengths.values():
            pf.text_width(self.name, m, context)
        return super().dims(context)

    @property
    def prompt_length(self) -> int:
        """The longest context that may stand before a class name."""
        return max(self.hyper.m, self.own.m_local or max(self.lengths.values(), default=0))

    def local_length(self, context: pf.ClientContext) -> int:
        """The client's own choice, else the spec's for it, else m."""
        return self.own.m_local or self.lengths.get(context.client, self.hyper.m)

    def local_context(self, context: pf.ClientContext, private: Tensors) -> Tensor:
        """As the base's. Raises MethodError where the stored context has another length than is asked for now."""
        local, wanted = super().local_context(context, private), self.local_length(context)
        if len(local) != wanted:
            raise pf.MethodError(
                f"this client's private context has {len(local)} vectors, and m_local is {wanted} now: give m_local "
                f"{len(local)} again, or start the private context anew with --reset-private"
            )
        return local

    def pair_loss(self, context: pf.ClientContext) -> PairLoss:
        """The loss of one task."""
        return PairLoss(HeterogeneousLoss(context, self.hyper, self.local_length(context)))

    def personal_classifier(self, context: pf.ClientContext, shared: Tensor, local: Tensor) -> pf.TextPromptClassifier:
        """Classifies with the private context alone."""
        return pf.TextPromptClassifier(context, local)
