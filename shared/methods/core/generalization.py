"""FedDG-GA's weights and FedSR's representation, for domains that nobody has.

FedDG-GA's weights: a client whose loss is larger under the mean than under its own update gets a larger weight.

Source: Zhang et al., "Federated Domain Generalization with Generalization Adjustment", CVPR 2023. Notation: n clients
of the roster, a (n) their weights, gap_k the loss of the received state minus that of the client's own last update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.client_rows import row_of
from promptfed.shared.methods.core.heads import SHARED_HEAD, LinearHead, head_start
from promptfed.shared.seeds import DrawsOf
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.arrays import double, namespace, single
from promptfed.shared.tensors.lazy import F, Tensor, torch

WEIGHTS = TensorSpec("ga_weights", ("n",), shared_with_clients=False)
ROUND = TensorSpec("ga_round", (), dtype="int64", shared_with_clients=False)
GAP = TensorSpec("gap", ())
OWN_LOSS = "own_loss"  # loss of the client's last update, stored by the client
STEP = 0.2  # d in the first round
HELD_OUT = 10  # one image out of this number
DRAWS = 20  # draws of z whose probabilities are averaged in classification
MAPS = (*pf.layer("sr_mean", "d_z", "d_f", join="_"), *pf.layer("sr_scale", "d_z", "d_f", join="_"))

REFERENCE = (
    TensorSpec("sr_class_mean", ("classes", "d_z")),
    TensorSpec("sr_class_scale", ("classes", "d_z")),
    TensorSpec("sr_factor", ()),
)
"""r, s and c, which each client keeps for itself."""

SHARED = (*SHARED_HEAD, *MAPS)
"""What is shared of all that is trained behind the tower. The linear head stands on z: its ``d_h`` is d_z."""


def split_start(context: pf.ServerContext) -> Tensors:
    """Equal weights, before the first round."""
    count, xp = len(context.clients), context.draws().xp
    weights = xp.full((count,), 1 / max(1, count), dtype=xp.float32)
    return {WEIGHTS.name: weights, ROUND.name: xp.zeros((), dtype=xp.int64)}


def joined(state: Tensors, client: pf.ClientInfo, context: pf.ServerContext) -> Tensors:
    """The state with a weight for a newcomer: the mean of the others."""
    at, weights = row_of(client.name, context), state[WEIGHTS.name]
    xp = namespace(weights)
    mean_weight = weights.mean().reshape(1) if len(weights) else xp.ones(1, dtype=xp.float32)
    grown = xp.concat([weights[:at], mean_weight, weights[at:]])
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
    differences = xp.asarray([gaps[name] for name in names], dtype=xp.float64)
    if centred:
        differences = differences - differences.mean()
    round = int(state[ROUND.name]) + 1
    step = STEP * (1 - (round - 1) / context.rounds)
    most = float(abs(differences).max())
    moved = differences * (step / (len(names) * most)) if most > 0 else differences
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


def fedsr_start(draws_of: DrawsOf, seed: int, classes: int, width: int, size: int) -> Tensors:
    """The shared tensors before any training, drawn from the seed: maps uniform in ±1/√d_f."""
    tensors = head_start(draws_of, seed, classes, size)
    for name in ("sr_mean", "sr_scale"):
        draws = draws_of(seed, name)
        bias = draws.xp.zeros(size, dtype=draws.xp.float32)
        weight = (draws.uniform(size, width) * 2 - 1) / math.sqrt(width)
        tensors |= {f"{name}_weight": weight, f"{name}_bias": bias}
    return tensors


def reference(private: Mapping[str, Tensor], classes: int, size: int) -> Tensors:
    """The client's r, s and c; before its first training r is zero, s and c are one."""
    start = {
        "sr_class_mean": torch.zeros(classes, size),
        "sr_class_scale": torch.ones(classes, size),
        "sr_factor": torch.ones(()),
    }
    return {name: private.get(name, tensor) for name, tensor in start.items()}


@dataclass(frozen=True)
class Representation:
    """``names`` of the classes, in the order of the head's rows, and the tensors by name."""

    names: tuple[str, ...]
    tensors: Tensors

    @classmethod
    def of(cls, names: Sequence[str], given: Mapping[str, Tensor], private: Mapping[str, Tensor]) -> Representation:
        """From a payload and the client's private tensors. Raises MethodError if the payload has other classes."""
        head = LinearHead.shared(names, given)
        private_part = reference(private, len(head.names), given["head_weight"].shape[1])
        return cls(head.names, {spec.name: given[spec.name].float() for spec in SHARED} | private_part)

    def on(self, device: torch.device, *, trainable: bool = False) -> Representation:
        """A copy on ``device``."""
        copies = {name: tensor.to(device).clone().requires_grad_(trainable) for name, tensor in self.tensors.items()}
        return Representation(self.names, copies)

    def distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """μ and σ ``(B, d_z)``."""
        weights = self.tensors
        mean = F.linear(features, weights["sr_mean_weight"], weights["sr_mean_bias"])
        return mean, F.softplus(F.linear(features, weights["sr_scale_weight"], weights["sr_scale_bias"]))

    def logits(self, representation: Tensor) -> Tensor:
        """``(B, C)`` of z."""
        return F.linear(representation, self.tensors["head_weight"], self.tensors["head_bias"])

    def losses(self, features: Tensor, labels: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-entropy at z = μ + σ·noise, mean ‖z‖², and mean KL(N(cμ, cσ) ‖ N(r_y, softplus s_y))."""
        mean, scale = self.distribution(features)
        drawn = mean + scale * noise
        length = drawn.square().sum(1).mean()
        factor = self.tensors["sr_factor"]
        divergence = gaussian_divergence(
            factor * mean,
            factor * scale,
            self.tensors["sr_class_mean"][labels],
            F.softplus(self.tensors["sr_class_scale"][labels]),
        )
        return F.cross_entropy(self.logits(drawn), labels), length, divergence.mean()

    def among(self, class_names: Sequence[str]) -> Representation:
        """A copy with the head's rows of ``class_names``. Raises MethodError for a class without a trained row."""
        head = LinearHead(self.names, self.tensors["head_weight"], self.tensors["head_bias"]).among(class_names)
        return Representation(head.names, self.tensors | {"head_weight": head.weight, "head_bias": head.bias})

    def classified(self, features: Tensor, noise: Tensor) -> Tensor:
        """Log ``(B, C)`` of the mean probabilities over the draws z = μ + σ·noise.

        ``noise (DRAWS, d_z)`` is the same for every image.
        """
        mean, scale = self.distribution(features)
        drawn = mean.unsqueeze(1) + scale.unsqueeze(1) * noise.to(mean.device)  # (B, DRAWS, d_z)
        return self.logits(drawn).log_softmax(-1).logsumexp(1) - math.log(len(noise))


def draws_for_images(seed: int, size: int) -> Tensor:
    """Fixed normal draws ``(DRAWS, d_z)``, so that an image's scores do not depend on other images."""
    return torch.randn(DRAWS, size, generator=pf.generator(seed, "fedsr", "classify"))


def gaussian_divergence(mean: Tensor, scale: Tensor, other_mean: Tensor, other_scale: Tensor) -> Tensor:
    """KL divergence ``(B,)`` of the first from the second diagonal normal distribution ``(B, d)``."""
    ratio = (scale.square() + (mean - other_mean).square()) / (2 * other_scale.square())
    # c may become negative during training; only its square matters.
    return (other_scale.log() - scale.abs().clamp_min(1e-30).log() + ratio - 0.5).sum(1)
