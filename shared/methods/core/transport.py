"""Entropic optimal transport between an image's patches and a class's prompts, as in FedOTP.

Notation: ``M`` patches, ``N`` prompts, one problem for each image and class, S the similarities ``(..., M, N)``, ε the
weight of the entropy, T the plan. Every problem stops by itself, so that none depends on what stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from promptfed.shared.tensors.lazy import into_graph, no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor


TINY = 1e-37  # a row of the kernel that float32 has lost: no mass goes there


@dataclass(frozen=True)
class TransportPlan:
    """Plans of many problems. None of it has a gradient.

    ``masses (..., M, N)``; ``iterations (...)`` pairs of steps, int64; ``converged (...)``, before they were used up;
    ``capped (..., M)``, the patches that carry as much as they may.
    """

    masses: Tensor
    iterations: Tensor
    converged: Tensor
    capped: Tensor


@no_grad
def unbalanced(
    similarities: Tensor, mass: float, epsilon: float, *, iterations: int = 100, threshold: float = 1e-3
) -> TransportPlan:
    """argmin ⟨1 − S, T⟩ − εH(T), at most 1/M from every patch and exactly mass/N to every prompt.

    Scaling: u ← min(1/M ⊘ (Kv), 1), v ← (mass/N) ⊘ (Kᵀu), a problem's last step always v's.
    """
    patches = similarities.shape[-2]

    def cap(kernel_v: Tensor) -> Tensor:
        return (1 / patches / kernel_v.clamp_min(TINY)).clamp_max(1)

    return _scaled(similarities, mass, epsilon, iterations, threshold, cap, start_with_u=False)


@no_grad
def balanced(similarities: Tensor, epsilon: float, *, iterations: int = 100, threshold: float = 1e-2) -> TransportPlan:
    """argmin ⟨1 − S, T⟩ − εH(T) with exactly 1/M from every patch and 1/N to every prompt (Sinkhorn's scaling)."""
    patches = similarities.shape[-2]

    def fill(kernel_v: Tensor) -> Tensor:
        return 1 / patches / kernel_v.clamp_min(TINY)

    plan = _scaled(similarities, 1.0, epsilon, iterations, threshold, fill, start_with_u=True)
    return replace(plan, capped=torch.ones_like(plan.capped))


def average(similarities: Tensor) -> TransportPlan:
    """The same mass everywhere: ⟨T, S⟩ is the mean similarity."""
    shape, device = similarities.shape, similarities.device
    return TransportPlan(
        torch.full_like(similarities.detach(), 1 / (shape[-2] * shape[-1])),
        torch.zeros(shape[:-2], dtype=torch.int64, device=device),
        torch.ones(shape[:-2], dtype=torch.bool, device=device),
        torch.zeros(shape[:-1], dtype=torch.bool, device=device),
    )


def _scaled(
    similarities: Tensor,
    mass: float,
    epsilon: float,
    iterations: int,
    threshold: float,
    u_of: Callable[[Tensor], Tensor],
    *,
    start_with_u: bool,
) -> TransportPlan:
    """T = diag(u)·K·diag(v), u and v in turn, each problem until max |v − v'| ≤ threshold·v, or ``iterations``."""
    given = similarities.detach().flatten(0, -3) if similarities.dim() > 3 else similarities.detach()
    if given.dim() == 2:
        given = given.unsqueeze(0)
    # The shift of each prompt's column is absorbed by v exactly; with it float32 holds for an ε of 0.01.
    kernel = torch.exp((given - given.amax(dim=-2, keepdim=True)) / epsilon)  # (P, M, N)
    problems, patches, prompts = kernel.shape
    share = mass / prompts
    u = kernel.new_ones(problems, patches)
    v = kernel.new_ones(problems, prompts)
    if not start_with_u:
        v = share / torch.einsum("pmn,pm->pn", kernel, u)
    used = torch.full((problems,), 0 if start_with_u else 1, dtype=torch.int64, device=kernel.device)
    active = torch.arange(problems, device=kernel.device)
    left, own_u, own_v, own_used, moving = kernel, u, v, used, torch.ones_like(used, dtype=torch.bool)
    # A GPU would have to be waited for, and a graph has the same steps for all: there later steps change nothing.
    looks = kernel.device.type == "cpu" and not into_graph()
    for _ in range(iterations - (0 if start_with_u else 1)):
        if looks and not bool(moving.any()):
            break
        if looks and not bool(moving.all()):
            u[active], v[active], used[active] = own_u, own_v, own_used
            rest = (active, left, own_u, own_v, own_used, moving)
            active, left, own_u, own_v, own_used, moving = (part[moving] for part in rest)
        next_u = u_of(torch.einsum("pmn,pn->pm", left, own_v))
        next_v = share / torch.einsum("pmn,pm->pn", left, next_u)
        going = ((next_v - own_v).abs() > threshold * next_v).any(dim=-1)
        own_u = torch.where(moving.unsqueeze(-1), next_u, own_u)
        own_v = torch.where(moving.unsqueeze(-1), next_v, own_v)
        own_used = own_used + moving
        moving = moving & going
    u[active], v[active], used[active] = own_u, own_v, own_used
    converged = torch.ones_like(used, dtype=torch.bool)
    converged[active] = ~moving
    lead = similarities.shape[:-2]
    masses = u.unsqueeze(-1) * kernel * v.unsqueeze(-2)
    return TransportPlan(
        masses.reshape(similarities.shape),
        used.reshape(lead),
        converged.reshape(lead),
        (u < 1).reshape(similarities.shape[:-1]),
    )
