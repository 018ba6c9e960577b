"""FedSR's head: a distribution behind the tower's feature, held near what its class alone would say.

Source: Nguyen, Torr & Lim, "FedSR: A Simple and Effective Domain Generalization Method for Federated Learning",
NeurIPS 2022. Notation: f (B, d_f) pooled features, z (B, d_z) the representation, y labels, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.shared.methods.core.base import MethodError
from promptfed.shared.methods.core.heads import SHARED_HEAD, LinearHead, head_start
from promptfed.shared.seeds import generator
from promptfed.shared.tensors import Tensors, TensorSpec

DRAWS = 20  # of z, whose logits are averaged where images are classified

MAPS = (
    TensorSpec("sr_mean_weight", ("d_z", "d_f")),
    TensorSpec("sr_mean_bias", ("d_z",)),
    TensorSpec("sr_scale_weight", ("d_z", "d_f")),
    TensorSpec("sr_scale_bias", ("d_z",)),
)
REFERENCE = (
    TensorSpec("sr_class_mean", ("classes", "d_z")),
    TensorSpec("sr_class_scale", ("classes", "d_z")),
    TensorSpec("sr_factor", ()),
)
TENSORS = (*SHARED_HEAD, *MAPS, *REFERENCE)
"""All that is trained behind the tower. The linear head stands on z: its ``d_h`` is d_z."""


def start(seed: int, classes: int, width: int, size: int) -> Tensors:
    """The tensors before any training, drawn from the seed: maps uniform in ±1/√d_f, r zero, s and c one."""
    tensors = head_start(seed, classes, size)
    for name in ("sr_mean", "sr_scale"):
        draws = torch.rand(size, width, generator=generator(seed, name))
        tensors |= {f"{name}_weight": (draws * 2 - 1) / math.sqrt(width), f"{name}_bias": torch.zeros(size)}
    ones = {"sr_class_scale": torch.ones(classes, size), "sr_factor": torch.ones(())}
    return tensors | {"sr_class_mean": torch.zeros(classes, size)} | ones


@dataclass(frozen=True)
class Representation:
    """``names`` of the classes, in the order of the head's rows, and the tensors by name."""

    names: tuple[str, ...]
    tensors: Tensors

    @classmethod
    def of(cls, names: Sequence[str], given: Mapping[str, Tensor]) -> Representation:
        """From a payload. Raises MethodError where it has other classes."""
        head = LinearHead.shared(names, given)
        return cls(head.names, {spec.name: given[spec.name].float() for spec in TENSORS})

    def on(self, device: torch.device, *, trainable: bool = False) -> Representation:
        """A copy on ``device``."""
        copies = {name: tensor.to(device).clone().requires_grad_(trainable) for name, tensor in self.tensors.items()}
        return Representation(self.names, copies)

    def distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """μ and σ ``(B, d_z)``."""
        given = self.tensors
        mean = F.linear(features, given["sr_mean_weight"], given["sr_mean_bias"])
        return mean, F.softplus(F.linear(features, given["sr_scale_weight"], given["sr_scale_bias"]))

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
        """With the head's rows of ``class_names``. Raises MethodError for a class that it was never trained for."""
        head = LinearHead(self.names, self.tensors["head_weight"], self.tensors["head_bias"]).among(class_names)
        return Representation(head.names, self.tensors | {"head_weight": head.weight, "head_bias": head.bias})

    def classified(self, features: Tensor, noise: Tensor) -> Tensor:
        """``(B, C)`` mean logits of the draws z = μ + σ·noise, ``noise (DRAWS, d_z)`` the same for every image."""
        mean, scale = self.distribution(features)
        return self.logits(mean + scale * noise.to(mean.device).mean(0))  # the head is linear


def draws_for_images(seed: int, size: int) -> Tensor:
    """``(DRAWS, d_z)`` normal numbers, so that no image's logits depend on those that are scored beside it."""
    return torch.randn(DRAWS, size, generator=generator(seed, "fedsr", "classify"))


def gaussian_divergence(mean: Tensor, scale: Tensor, other_mean: Tensor, other_scale: Tensor) -> Tensor:
    """``(B,)`` KL of diagonal normal distributions ``(B, d)``, the first from the other."""
    ratio = (scale.square() + (mean - other_mean).square()) / (2 * other_scale.square())
    # c may become negative on the way, and only its square has a meaning.
    return (other_scale.log() - scale.abs().clamp_min(1e-30).log() + ratio - 0.5).sum(1)


def check_options(head: str, private: str) -> None:
    """Raise MethodError where FedSR's head would not stand on what is shared."""
    if head != "linear":
        raise MethodError("fedsr puts a linear head behind a distribution of its own: take head: linear with it")
    if private != "none":
        raise MethodError("fedsr shares one distribution behind one tower: leave private out")
