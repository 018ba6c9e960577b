"""FedPR: deep visual prompts that a client moves only in the null space of the global prompts.

Notation: P_l ``(m, d_v)`` the prompts of block l as the round began, Π_l the projection away from what they hold.

Source: Feng et al., "Learning Federated Visual Prompt in Null Space for MRI Reconstruction", CVPR 2023, whose prompts
stand in a network for images of another kind; PLAN's tables carry it over to CLIP without settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.fedvpt import FedVPT, FedVPTDeepHyper
from promptfed.shared.tensors.lazy import no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1e-9  # of (1 − ρ)·d, which binary arithmetic may leave under a whole number


class FedPRHyper(FedVPTDeepHyper):
    """Prompts in every block, and how much of the space they may not move in."""

    m: int = pf.option(8, "prompt tokens in each block that has any", ge=1, le=512)
    rho: float = pf.option(0.8, "ρ, share of the directions in which prompts may move; 1: no projection", gt=0, le=1)
    normalise: bool = pf.option(True, "steps are divided by √(ρ·d_v), the projection's length, as in the paper")


def projection(prompts: Tensor, rho: float) -> Callable[[Tensor], Tensor]:
    """(N1) v ↦ v·U₀U₀ᵀ for v ``(..., d)``, of one block's ``prompts (m, d)``; float64 inside.

    Where all that the prompts hold is dropped, the null space is all of the rest, and no eigenvectors are needed, of
    which most would be arbitrary ones.
    """
    if rho == 1:
        return lambda moved: moved
    given = prompts.detach().double()
    rows, width = given.shape
    dropped = int((1 - rho) * width + ROUNDING)
    if rows <= dropped:
        basis = torch.linalg.qr(given.T).Q
    else:
        basis = torch.linalg.eigh(given.T @ given).eigenvectors.flip(1)[:, :dropped]  # eigh ascends

    def away(moved: Tensor) -> Tensor:
        wide = moved.double()
        left: Tensor = wide - wide @ basis @ basis.T
        return left.to(moved.dtype)

    return away


class NullSpace:
    """Keeps prompts ``(depth, m, d)`` in the null space of where they ``start``: every step is projected."""

    def __init__(self, prompts: Tensor, rho: float, normalise: bool):
        self._prompts, self._before = prompts, prompts.detach().clone()
        self._away = [projection(block, rho) for block in self._before]
        self._length = math.sqrt(rho * prompts.shape[-1]) if normalise else 1.0

    @no_grad
    def settle(self) -> None:
        """(N3) what the optimizer has added since the last time goes through Π, in place."""
        steps = self._prompts.detach() - self._before
        moved = torch.stack([away(step) for away, step in zip(self._away, steps, strict=True)]) / self._length
        self._before = self._before + moved
        self._prompts.copy_(self._before)


class FedPR(FedVPT):
    """FedVPT in every block under Adam, whose steps are projected from round 2 on; all classify alike."""

    name = "fedpr"
    summary = "Deep visual prompts that clients move only in the null space of the global ones."
    paper = "Feng et al., Learning Federated Visual Prompt in Null Space for MRI Reconstruction (FedPR), 2023"
    unprotected = "its steps are projected after the optimizer's, which the noise has not been fitted to"
    Hyper = FedPRHyper
    hyper: FedPRHyper
    defaults = pf.defaults(50, epochs=10, batch_size=32, optimizer="adam", learning_rate=0.1, weight_decay=0.0)

    def settling(self, context: pf.ClientContext, prompts: Tensor) -> Callable[[], None]:
        """The projection of each step; none in round 1, where the global prompts hold nothing yet."""
        if context.round == 1:
            return super().settling(context, prompts)
        return NullSpace(prompts, self.hyper.rho, self.hyper.normalise).settle
