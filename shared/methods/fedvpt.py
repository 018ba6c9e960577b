"""FedVPT: visual prompts, averaged; in all layers; and at one site alone. FedPR: they stay in a null space.

Notation of FedPR: P_l ``(m, d_v)`` the prompts of block l as the round began, Π_l the projection away from what they
hold. Source: Feng et al., "Learning Federated Visual Prompt in Null Space for MRI Reconstruction", CVPR 2023, whose
prompts stand in a network for images of another kind; PLAN's tables carry it over to CLIP without settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core import visual
from promptfed.shared.methods.core.heads import Head, HeadRate, LinearHead, TextHead, check_head_rate, head_width
from promptfed.shared.methods.core.visual import ImageClassifier, PromptedHead, Towers, VisualHyper, vpt_bound
from promptfed.shared.seeds import Draws, initial_draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import Tensor, no_grad, torch

PROMPTS = TensorSpec("visual_prompts", ("depth_v", "m", "d_v"))
ROUNDING = 1e-9  # of (1 − ρ)·d, which binary arithmetic may leave under a whole number


class VptHyper(VisualHyper):
    """Hyperparameters of visual prompt tuning; shallow unless told otherwise."""

    m: int = pf.option(
        10, "prompt tokens in each block that has any; 0: a linear head alone (singleset_vpt)", ge=0, le=512
    )
    depth: int | None = pf.option(1, "blocks with prompts, counted from the first; null: all", ge=1, le=256)
    head: Literal["text", "linear"] = pf.option(
        "text",
        "text: cosines with the template's features, as CLIP; linear: a linear head on the pooled "
        "feature, private to each client, as in pFedPG's tables",
    )
    projected: bool = pf.option(False, "the linear head stands on the feature behind the image tower's projection")
    head_learning_rate: HeadRate = None


class VisualPromptMethod(pf.Method):
    """Base of the methods that train visual prompts ``(depth_v, m, d_v)`` under a text or a linear head."""

    Hyper = VptHyper
    hyper: VptHyper
    needs = visual.NEEDS
    defaults = pf.defaults(20, epochs=1, batch_size=32)

    def __init__(self, hyper: VptHyper):
        super().__init__(hyper)
        if hyper.head == "linear":
            self.needs = replace(visual.NEEDS, text_tower=False)
            self.personal = True
            self.takes_evaluators = False  # the head is made by training only

    def check(self, spec: pf.FederationSpec) -> None:
        """``projected`` says where a linear head stands: without one it would say nothing."""
        if self.hyper.projected and self.hyper.head == "text":
            raise pf.MethodError("projected is for a linear head: take head: linear with it, or leave it out")
        if self.hyper.m == 0 and (self.hyper.head == "text" or self.state_tensors()):
            raise pf.MethodError("m: 0 leaves a linear head alone: take singleset_vpt with head: linear, or prompts")
        linear = self.hyper.head == "linear"
        check_head_rate(self.name, self.hyper.head_learning_rate, linear=linear, alone=self.hyper.m == 0)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``m``, ``d_v`` and ``depth_v``. Raises MethodError where the image tower takes no such prompts."""
        sizes = visual.vision_dims(self.name, self.hyper.depth, context)
        vpt_bound(context.shape.patch_size, sizes["d_v"])
        return {"m": self.hyper.m} | sizes

    def start(self, depth: int, width: int, patch_size: int | None, draws: Draws) -> Any:
        """Prompts ``(depth, m, width)`` before any training."""
        bound = vpt_bound(patch_size, width)
        return (draws.uniform(depth, self.hyper.m, width) * 2 - 1) * bound

    def train_prompts(
        self, context: pf.ClientContext, start: Tensor, private: Tensors
    ) -> tuple[Tensor, Tensors, dict[str, float]]:
        """CE over prompts ``(depth, m, d_v)`` and a linear head: the trained prompts, the head's tensors, metrics."""
        prompts, head = pf.leaf(start, context.backbone), self.head(context, private)
        trained = self.under(context, head.trainable(context.backbone.device))
        loss = trained.train(context, prompts, self.settling(context, prompts))
        return prompts, trained.head.private(), {"loss": loss}

    def settling(self, context: pf.ClientContext, prompts: Tensor) -> Callable[[], None]:
        """What is done to ``prompts (depth, m, d_v)`` after each of the optimizer's steps: nothing."""
        return lambda: None

    def classify(self, context: pf.ClientContext, prompts: Tensor, private: Tensors) -> ImageClassifier:
        """Classifies with ``prompts (depth, m, d_v)`` and the method's head."""
        return self.under(context, self.head(context, private).among(context.class_names)).classifier(context, prompts)

    def head(self, context: pf.ClientContext, private: Tensors) -> Head:
        """The template's texts, or the client's own linear head."""
        if self.hyper.head == "text":
            return TextHead.of(context)
        return LinearHead.of(context, private, head_width(context.backbone, self.hyper.projected))

    def under(self, context: pf.ClientContext, head: Head) -> PromptedHead:
        """Prompts under ``head``, as the options say."""
        towers = Towers(context.backbone, self.hyper)
        return PromptedHead(towers, head, self.hyper.projected, self.hyper.head_learning_rate)


class FedVPT(VisualPromptMethod):
    """See the module: the mean is weighted by samples; a linear head never leaves its client."""

    name = "fedvpt"
    summary = "Visual prompts at the input, averaged over clients; text head, or a private linear one."
    paper = "Jia et al., Visual Prompt Tuning (VPT), 2022; averaged as in the tables of pFedPG (Yang et al., 2023)"
    several_labels = True
    protects = True

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The prompts."""
        return (PROMPTS,)

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """VPT's uniform start."""
        dims = self.dims(context)
        return {PROMPTS.name: self.start(dims["depth_v"], dims["d_v"], context.shape.patch_size, draws)}

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the global prompts and the client's own head."""
        prompts, head, metrics = self.train_prompts(context, payload[PROMPTS.name], private)
        return pf.TrainResult(update={PROMPTS.name: prompts}, private=head, metrics=metrics)

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> ImageClassifier:
        """Classifies with the global prompts and the client's own head."""
        return self.classify(context, payload[PROMPTS.name], private)


class FedVPTDeepHyper(VptHyper):
    """As in pFedPG's tables: one token in each of all blocks."""

    m: int = pf.option(1, "prompt tokens in each block that has any", ge=1, le=512)
    depth: int | None = pf.option(None, "blocks with prompts, counted from the first; null: all", ge=1, le=256)


class FedVPTDeep(FedVPT):
    """VPT-Deep (Jia et al., 2022, section 3.2) averaged over clients."""

    name = "fedvpt_deep"
    summary = "Visual prompts in every block, averaged over clients; text head, or a private linear one."
    protects = True
    several_labels = True
    Hyper = FedVPTDeepHyper
    hyper: FedVPTDeepHyper


class SingleSetVPT(VisualPromptMethod):
    """The local baseline of pFedPG's tables. It starts like `fedvpt`, so the two differ only in sharing."""

    name = "singleset_vpt"
    summary = "Each client trains visual prompts of its own and never shares them."
    paper = "Jia et al., Visual Prompt Tuning (VPT), 2022; SingleSet-VPT in pFedPG's tables (Yang et al., 2023)"
    personal = True
    unprotected = "it sends nothing up; withhold evaluations"

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """Empty: the coordinator holds nothing."""
        return ()

    def current(self, context: pf.ClientContext, private: Tensors) -> Tensor:
        """The client's prompts ``(depth, m, d_v)``: what it has trained, or the start that all have in common."""
        if PROMPTS.name in private:
            return private[PROMPTS.name]
        backbone = context.backbone
        depth = backbone.vision_layers if self.hyper.depth is None else self.hyper.depth
        start: Tensor = self.start(depth, backbone.d_v, backbone.patch_size, initial_draws(context.seed))
        return start

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the client's own prompts; sends no tensor."""
        prompts, head, metrics = self.train_prompts(context, self.current(context, private), private)
        return pf.TrainResult(update={}, private={PROMPTS.name: prompts, **head}, metrics=metrics)

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> ImageClassifier:
        """Classifies with the client's own prompts and head; an evaluator, which trains none, has the start."""
        return self.classify(context, self.current(context, private), private)


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
    received = prompts.detach().double()
    rows, width = received.shape
    dropped = int((1 - rho) * width + ROUNDING)
    if rows <= dropped:
        basis = torch.linalg.qr(received.T).Q
    else:
        basis = torch.linalg.eigh(received.T @ received).eigenvectors.flip(1)[:, :dropped]  # eigh ascends

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
