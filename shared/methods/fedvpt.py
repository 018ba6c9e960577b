"""FedVPT: visual prompts, averaged; in all layers; and at one site alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core import visual
from promptfed.shared.methods.core.heads import Head, HeadRate, LinearHead, TextHead, check_head_rate, head_width
from promptfed.shared.methods.core.visual import ImageClassifier, PromptedHead, Towers, VisualHyper, vpt_bound
from promptfed.shared.seeds import Draws, initial_draws
from promptfed.shared.tensors import Tensors, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


PROMPTS = TensorSpec("visual_prompts", ("depth_v", "m", "d_v"))


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
