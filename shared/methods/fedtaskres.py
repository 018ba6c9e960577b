"""FedTaskRes: a residual of each class's text feature."""

from __future__ import annotations

from collections.abc import Sequence

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.feature_layers import relative_rate
from promptfed.shared.methods.core.heads import check_class_rows, rows_of_candidates
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, Tensor, torch

RESIDUAL = TensorSpec("residual", ("classes", "d_e"))


class FedTaskResHyper(pf.Hyperparameters):
    """The weight of the residual."""

    alpha: float = pf.option(
        0.5, "α, weight of the residual that is added to a text feature; 0: zero-shot", ge=0, le=100
    )


class FedTaskRes(pf.Method):
    """One exchange a round: the residuals down, the trained residuals up; the mean weighted by samples.

    A class that is not one of the federation's has no residual and is classified by the template.
    """

    name = "fedtaskres"
    summary = (
        "A residual of each class's text feature; texts are encoded once, and training needs image features alone."
    )
    paper = "Yu et al., Task Residual for Tuning Vision-Language Models, 2023, made federated"
    several_labels = True
    protects = True
    Hyper = FedTaskResHyper
    hyper: FedTaskResHyper
    defaults = pf.defaults(epochs=1, batch_size=32, optimizer="adam", learning_rate=0.03, weight_decay=0)
    disclosures = (
        pf.AGGREGATE,
        pf.Disclosed(
            "operator",
            "about a mean feature of your images of each class, since the residual of a class moves towards it",
        ),
    )

    def check(self, spec: pf.FederationSpec) -> None:
        """A common list of classes."""
        check_class_rows(self, spec)

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The residuals."""
        return (RESIDUAL,)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``classes`` and ``d_e``."""
        return {"classes": len(context.class_names or ()), "d_e": context.shape.d_e}

    def class_weights(self, text: Tensor, residual: Tensor) -> Tensor:
        """(R1) ``(..., C, d_e)`` normalised t_k + α·x_k of ``text (C, d_e)`` and residuals ``(..., C, d_e)``."""
        return F.normalize(text + self.hyper.alpha * residual, dim=-1)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of CE(τ⁻¹·I·w_k) over the residuals, at the rate η/√d_e."""
        device, scale = context.backbone.device, context.backbone.logit_scale
        residual = pf.leaf(payload[RESIDUAL.name], context.backbone)
        features, labels = context.train.features(), context.train.labels.to(device)
        text = pf.template_features(context.backbone, context.template, context.class_names)
        loss_of = pf.ClassificationLoss(context)

        def loss(indices: Tensor) -> Tensor:
            rows = pf.sent_to(indices, device)
            return loss_of(scale * features[rows] @ self.class_weights(text, residual).T, labels[rows])

        def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
            rows = pf.sent_to(indices, device)
            weights = self.class_weights(text, copies[0])
            logits = scale * torch.einsum("bd,bcd->bc", features[rows], weights)
            return loss_of.each(logits, labels[rows])

        group = pf.Group([residual], relative_rate(context, text.shape[1]))
        final = pf.train(context, [], loss, groups=[group], objective=pf.Objective(units))
        return pf.TrainResult({RESIDUAL.name: residual}, metrics={"loss": final})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TextFeatureClassifier:
        """Cosines with the class weights."""
        text = pf.template_features(context.backbone, context.template, context.class_names)
        residual = rows_of_candidates(context, payload[RESIDUAL.name].to(text.device))
        return pf.TextFeatureClassifier(context.backbone.logit_scale, self.class_weights(text, residual))
