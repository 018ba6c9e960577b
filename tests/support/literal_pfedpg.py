"""pFedPG's equations written out slowly: one client, one token, one key at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def attention(state: Mapping[str, Tensor], descriptor: Tensor) -> Tensor:
    """Equation 3: P_n = basis + softmax(Q Kᵀ/√l_k) V W_O for one client; ``(m, d_v)``."""
    basis = state["prompt_basis"]
    query = descriptor @ state["w_query"]
    scores = [torch.dot(query, token @ state["w_key"]) / math.sqrt(len(query)) for token in basis]
    largest = max(float(score.detach()) for score in scores)
    weights = [torch.exp(score - largest) for score in scores]
    mixed = sum(w / sum(weights) * (token @ state["w_value"]) for w, token in zip(weights, basis, strict=True))
    return torch.stack([token + mixed @ state["w_output"] for token in basis])


def mlp(state: Mapping[str, Tensor], descriptor: Tensor) -> Tensor:
    """Descriptor → hidden → all tokens, one linear map for each token."""
    hidden = (descriptor @ state["w_hidden"] + state["b_hidden"]).clamp(min=0)
    m = state["w_prompts"].shape[1]
    return torch.stack([hidden @ state["w_prompts"][:, token] + state["b_prompts"][token] for token in range(m)])


def adain(state: Mapping[str, Tensor], descriptor: Tensor) -> Tensor:
    """Each token normed over its width, then given the descriptor's deviation and mean."""
    tokens = []
    for token in state["prompt_basis"]:
        variance = (token - token.mean()).square().mean()
        normed = (token - token.mean()) / (variance + 1e-5).sqrt()
        deviation = ((descriptor - descriptor.mean()).square().mean() + 1e-5).sqrt()
        tokens.append(deviation * normed + descriptor.mean())
    return torch.stack(tokens)


def basis(state: Mapping[str, Tensor], descriptor: Tensor) -> Tensor:
    """The basis, whoever asks."""
    return state["prompt_basis"]


PROMPTS = {"attention": attention, "mlp": mlp, "adain": adain, "basis": basis}


class Server:
    """The server half with torch's own optimizers: one for what all share, one for each client's descriptor."""

    def __init__(self, kind: str, optimizer: str, rate: float, state: Mapping[str, Tensor], names: list[str]):
        self.kind = kind
        learned = {name: tensor for name, tensor in state.items() if not name.startswith("adam_")}
        descriptors = learned.pop("descriptors", torch.zeros(len(names), 1))
        self.shared = {name: tensor.clone().requires_grad_() for name, tensor in learned.items()}
        self.descriptors = {name: row.clone().requires_grad_() for name, row in zip(names, descriptors, strict=True)}
        make = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
        self.optimizer = make(list(self.shared.values()), lr=rate)
        self.own = {name: make([row], lr=rate) for name, row in self.descriptors.items()}

    def prompts(self, name: str) -> Tensor:
        return PROMPTS[self.kind](self.shared, self.descriptors[name])

    def step(self, deltas: Mapping[str, Tensor]) -> None:
        """Descend Σ_n ⟨P_n, −ΔP_n⟩, whose gradient with respect to P_n is −ΔP_n."""
        everything = [*self.shared.values(), *self.descriptors.values()]
        for leaf in everything:
            leaf.grad = None
        total = sum((self.prompts(name) * -delta).sum() for name, delta in deltas.items())
        assert isinstance(total, Tensor)
        total.backward()
        self.optimizer.step()
        for name in deltas:
            self.own[name].step()
