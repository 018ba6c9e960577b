"""Zero-shot CLIP: the template only, nothing trained. The row that every table starts with."""

from __future__ import annotations

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import Tensor, torch


class ZeroShotHyper(pf.Hyperparameters):
    """None of its own: the template is the spec's."""


class TemplateClassifier(pf.TextFeatureClassifier):
    """Cosine logits of image features against the template's text features, τ⁻¹·I(x)·T(template(y))."""

    def __init__(self, context: pf.ClientContext):
        text = pf.template_features(context.backbone, context.template, context.class_names)
        super().__init__(context.backbone.logit_scale, text)
        self._backbone = context.backbone

    def of_images(self, images: Tensor) -> Tensor:
        """``(B, C)`` logits of preprocessed images ``(B, 3, H, W)``, through the image tower."""
        features = self._backbone.encode_images(images)
        return pf.cosine_logits(self._scale, features, torch.arange(len(features)), self._text)


class ZeroShot(pf.Method):
    """No tensor, no phase: a federation of it only evaluates (Radford et al., CLIP, 2021, section 3.1)."""

    name = "zero_shot"
    summary = "The template's text features; nothing is trained and nothing travels."
    paper = "Radford et al., Learning Transferable Visual Models From Natural Language Supervision (CLIP), 2021"
    unprotected = "it trains nothing"
    several_labels = True
    Hyper = ZeroShotHyper
    defaults = pf.defaults(1)
    ignores = (*pf.STEPS, "epochs", "augmentation", "views")

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """Empty: a template is no tensor."""
        return ()

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """Rounds pass without an exchange."""
        return ()

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """No symbol, since there is no tensor."""
        return {}

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """Raises MethodError: there is nothing to train."""
        raise pf.MethodError("zero_shot has nothing to train")

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> TemplateClassifier:
        """Classifies with the template."""
        return TemplateClassifier(context)
