"""FedDG-GA's weights: a client whose loss is larger under the mean than under its own update gets a larger weight.

Source: Zhang et al., "Federated Domain Generalization with Generalization Adjustment", CVPR 2023. Notation: n clients
of the roster, a (n) their weights, gap_k the loss of the received state minus that of the client's own last update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.client_rows import row_of
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.arrays import double, namespace, single
from promptfed.shared.tensors.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = TensorSpec("ga_weights", ("n",), shared_with_clients=False)
ROUND = TensorSpec("ga_round", (), dtype="int64", shared_with_clients=False)
GAP = TensorSpec("gap", ())
OWN_LOSS = "own_loss"  # loss of the client's last update, stored by the client
STEP = 0.2  # d in the first round
HELD_OUT = 10  # one image out of this number


def start(context: pf.ServerContext) -> Tensors:
    """Equal weights, before the first round."""
    count, xp = len(context.clients), context.draws().xp
    weights = xp.full((count,), 1 / max(1, count), dtype=xp.float32)
    return {WEIGHTS.name: weights, ROUND.name: xp.zeros((), dtype=xp.int64)}


def joined(state: Tensors, client: pf.ClientInfo, context: pf.ServerContext) -> Tensors:
    """The state with a weight for a newcomer: the mean of the others."""
    at, weights = row_of(client.name, context), state[WEIGHTS.name]
    xp = namespace(weights)
    own = weights.mean().reshape(1) if len(weights) else xp.ones(1, dtype=xp.float32)
    grown = xp.concat([weights[:at], own, weights[at:]])
    return state | {WEIGHTS.name: _normalised(grown)}


def adjusted(
    state: Mapping[str, Tensor], gaps: Mapping[str, float], context: pf.ServerContext, *, centred: bool
) -> tuple[Tensors, dict[str, float]]:
    """The weights after this round's ``gaps`` by client, and each answering client's share of the mean.

    a_k ← clip(a_k + d_r·gap_k/(n·max|gap|), 0, 1), then normalised. d_r = 0.2·(1 − (r − 1)/R); n clients answered.
    """
    names = sorted(gaps)
    weights = double(state[WEIGHTS.name])
    xp = namespace(weights)
    given = xp.asarray([gaps[name] for name in names], dtype=xp.float64)
    if centred:
        given = given - given.mean()
    round = int(state[ROUND.name]) + 1
    step = STEP * (1 - (round - 1) / context.rounds)
    most = float(abs(given).max())
    moved = given * (step / (len(names) * most)) if most > 0 else given * 0
    rows = [row_of(name, context) for name in names]
    weights[rows] = xp.clip(weights[rows] + moved, 0, 1)
    shares = _normalised(weights[rows])
    after = {WEIGHTS.name: single(_normalised(weights)), ROUND.name: xp.asarray(round, dtype=xp.int64)}
    return after, dict(zip(names, shares.tolist(), strict=True))


def _normalised(weights: Tensor) -> Tensor:
    total = weights.sum()
    return weights / total if float(total) > 0 else weights * 0 + 1 / max(1, len(weights))


def held_out(seed: int, client: str, count: int) -> tuple[Tensor, Tensor]:
    """Indices of a tenth of ``count`` images (at least one), which are never trained on, and of the others.

    Raises MethodError if no training image would be left.
    """
    if count < 2:
        raise pf.MethodError(f"client {client!r} has {count} training images; weighting: ga holds one of them back")
    order = torch.randperm(count, generator=pf.generator(seed, client, "ga", "held-out"))
    size = max(1, count // HELD_OUT)
    return order[:size].sort().values, order[size:].sort().values


class Subset:
    """A subset of a split's images."""

    def __init__(self, split: pf.Split, indices: Tensor):
        self._split, self._indices = split, indices

    @property
    def labels(self) -> Tensor:
        """``(N,)`` of these images."""
        return self._split.labels[pf.sent_to(self._indices, self._split.labels.device)]

    def __len__(self) -> int:
        return len(self._indices)

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor[pf.sent_to(self._indices, tensor.device)]

    def features(self) -> Tensor:
        """As of the split."""
        return self._rows(self._split.features())

    def raw_features(self) -> Tensor:
        """As of the split."""
        return self._rows(self._split.raw_features())

    def images(self, indices: Tensor) -> Tensor:
        """As of the split."""
        return self._split.images(self._indices[pf.sent_to(indices, self._indices.device)])

    def patches(self, indices: Tensor) -> Tensor:
        """As of the split."""
        return self._split.patches(self._indices[pf.sent_to(indices, self._indices.device)])

    def block_rows(self, indices: Tensor, start: int) -> Tensor:
        """As of the split."""
        return self._split.block_rows(self._indices[pf.sent_to(indices, self._indices.device)], start)
