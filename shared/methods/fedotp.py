"""FedOTP: for each image and class a transport plan decides which patch speaks to the shared or the private context.

Source: Li et al., "Global and Local Prompts Cooperation via Optimal Transport for Federated Learning" (FedOTP), CVPR
2024. The plan is unbalanced: only a share γ of the patches speaks at all.
"""

from __future__ import annotations

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.promptfl import PairLoss, PrivateContextMethod
from promptfed.shared.tensors.lazy import F, Tensor, into_graph, no_grad, torch

TINY = 1e-37  # a row of the kernel that float32 has lost: no mass goes there
MOST_ENTRIES = 1 << 23  # of a plan that is made at once: images are scored in parts


@no_grad
def transport_plan(
    similarities: Tensor, mass: float, epsilon: float, *, iterations: int = 100, threshold: float = 1e-3
) -> Tensor:
    """argmin ⟨1 − S, T⟩ − εH(T), at most 1/M from every patch and exactly mass/N to every prompt.

    ``(..., M, N)`` of similarities of that shape, without gradients. T = diag(u)·K·diag(v), u ← min(1/M ⊘ (Kv), 1) and
    v ← (mass/N) ⊘ (Kᵀu) in turn, a problem's last step always v's: each problem until max |v − v'| ≤ threshold·v, or
    ``iterations``.
    """
    flat = similarities.detach().flatten(0, -3) if similarities.dim() > 3 else similarities.detach()
    if flat.dim() == 2:
        flat = flat.unsqueeze(0)
    # The shift of each prompt's column is absorbed by v exactly; with it float32 holds for an ε of 0.01.
    kernel = torch.exp((flat - flat.amax(dim=-2, keepdim=True)) / epsilon)  # (P, M, N)
    problems, patches, prompts = kernel.shape
    share = mass / prompts
    u = kernel.new_ones(problems, patches)
    v = share / torch.einsum("pmn,pm->pn", kernel, u)
    active = torch.arange(problems, device=kernel.device)
    left, own_u, own_v, moving = kernel, u, v, torch.ones_like(active, dtype=torch.bool)
    # A GPU would have to be waited for, and a graph has the same steps for all: there later steps change nothing.
    looks = kernel.device.type == "cpu" and not into_graph()
    for _ in range(iterations - 1):
        if looks and not bool(moving.any()):
            break
        if looks and not bool(moving.all()):
            u[active], v[active] = own_u, own_v
            active, left, own_u, own_v, moving = (part[moving] for part in (active, left, own_u, own_v, moving))
        next_u = (1 / patches / torch.einsum("pmn,pn->pm", left, own_v).clamp_min(TINY)).clamp_max(1)
        next_v = share / torch.einsum("pmn,pm->pn", left, next_u)
        going = ((next_v - own_v).abs() > threshold * next_v).any(dim=-1)
        own_u = torch.where(moving.unsqueeze(-1), next_u, own_u)
        own_v = torch.where(moving.unsqueeze(-1), next_v, own_v)
        moving = moving & going
    u[active], v[active] = own_u, own_v
    return (u.unsqueeze(-1) * kernel * v.unsqueeze(-2)).reshape(similarities.shape)


class FedOTPHyper(pf.ContextHyper):
    """A learned context, and how patches and prompts are matched."""

    gamma: float = pf.option(0.8, "γ, the mass that goes to the prompts: 1 is balanced", gt=0, le=1)
    epsilon: float = pf.option(0.1, "weight ε of the plan's entropy", ge=0.01, le=10)
    iterations: int = pf.option(100, "most pairs of scaling steps of a plan", ge=1, le=10_000)
    threshold: float = pf.option(1e-3, "relative change of a plan's column scaling at which it is done", ge=0, lt=1)


class PatchTextLogits:
    """logit = q·Σ_pn T_pn·S_pn, S the cosines of patches and texts, with T a constant for gradients."""

    def __init__(self, scale: float, hyper: FedOTPHyper):
        self._scale, self._hyper = scale, hyper

    def __call__(self, split: pf.Split, indices: Tensor, text: Tensor) -> Tensor:
        """``(B, C)`` of the images at ``indices (B,)`` and raw ``text (N, C, d_e)``, which gradients go to."""
        prompts, classes, _ = text.shape
        directions = F.normalize(text, dim=-1)
        patches = split.patches(indices)
        at_once = max(1, MOST_ENTRIES // (classes * prompts * patches.shape[1]))
        parts = [self._scores(part, directions) for part in torch.split(patches, at_once)]
        return self._scale * torch.cat(parts)

    def _scores(self, patches: Tensor, text: Tensor) -> Tensor:
        """``(B, C)`` ⟨T, S⟩ of ``patches (B, M, d_e)`` and normalised ``text (N, C, d_e)``."""
        prompts, classes, width = text.shape
        flat = patches @ text.reshape(prompts * classes, width).T  # (B, M, N·C)
        similarities = flat.reshape(*patches.shape[:2], prompts, classes).permute(0, 3, 1, 2)  # (B, C, M, N)
        how = self._hyper
        plan = transport_plan(similarities, how.gamma, how.epsilon, iterations=how.iterations, threshold=how.threshold)
        scores: Tensor = (plan * similarities).sum(dim=(-2, -1))
        return scores


class PatchTextClassifier:
    """Classifies by the patches of an image; there are no weights that plain code could use."""

    def __init__(self, context: pf.ClientContext, hyper: FedOTPHyper, contexts: Tensor):
        """contexts: ``(N, m, d_t)``, each before every candidate's name."""
        prompts = pf.class_prompts(context, contexts.shape[1])
        with torch.no_grad():
            self._text = context.backbone.encode_prompts(contexts, prompts, normalize=False)
        self._logits = PatchTextLogits(context.backbone.logit_scale, hyper)

    def logits(self, split: pf.Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        return self._logits(split, indices, self._text)


class FedOTP(PrivateContextMethod):
    """CE of q·Σ_pn T_pn·⟨g_p, z^n⟩ over both contexts n, T constant for gradients; the shared context is averaged.

    Evaluators have one prompt, the shared context's, to which all of γ goes.
    """

    name = "fedotp"
    summary = "Optimal transport between an image's patches and a shared and a private context's class features."
    paper = "Li et al., Global and Local Prompts Cooperation via Optimal Transport for Federated Learning, 2024"
    needs = pf.Needs(patch_tokens=True)
    protects = True
    Hyper = FedOTPHyper
    hyper: FedOTPHyper
    defaults = pf.defaults(10, epochs=5, batch_size=32, learning_rate=0.001)

    def pair_loss(self, context: pf.ClientContext) -> PairLoss:
        """CE over the transported similarities; both contexts are encoded in one pass."""
        backbone, prompts = context.backbone, pf.class_prompts(context, self.hyper.m)
        labels, logits = context.train.labels.to(backbone.device), PatchTextLogits(backbone.logit_scale, self.hyper)

        def loss(indices: Tensor, shared: Tensor, local: Tensor) -> Tensor:
            text = backbone.encode_prompts(torch.stack([shared, local]), prompts, normalize=False)
            return F.cross_entropy(logits(context.train, indices, text), labels[pf.sent_to(indices, labels.device)])

        return loss

    def personal_classifier(self, context: pf.ClientContext, shared: Tensor, local: Tensor) -> PatchTextClassifier:
        """With both contexts."""
        return PatchTextClassifier(context, self.hyper, torch.stack([shared.cpu(), local.cpu()]))

    def global_classifier(self, context: pf.ClientContext, shared: Tensor) -> PatchTextClassifier:
        """With the shared context as the only prompt."""
        return PatchTextClassifier(context, self.hyper, shared.unsqueeze(0))
