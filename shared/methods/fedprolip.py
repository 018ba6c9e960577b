"""FedProLIP: the image tower's last projection is fine-tuned near its pretrained values, and averaged.

Notation: z ``(d_v,)`` an image's feature before the projection, W₀ ``(d_v, d_e)`` the frozen projection, D the shared
change, zero at first. Images are classified by the cosine of (W₀ + D)ᵀz with the template's text features. Everything
below the projection is frozen, so each task runs an image through the tower once.

Source: Fahes et al., "Fine-tuning CLIP's Last Visual Projector: A Few-Shot Cornucopia", 2024 (arXiv 2410.05270).
Summaries were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.visual import CHUNK, NEEDS, ImageClassifier
from promptfed.shared.methods.fedtaskres import relative_rate
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor

    from promptfed.shared.clip import Backbone

CHANGE = TensorSpec("projection_change", ("d_v", "d_e"))


class FedProLIPHyper(pf.Hyperparameters):
    """How strongly the projection is held."""

    weight: float | None = pf.option(
        None, "λ of λ·‖D‖²; default: 1 / images of the client per class, so that few images move it less", ge=0, le=1e6
    )


class FedProLIP(pf.Method):
    """One exchange a round: the change down, the trained change up; the mean weighted by samples."""

    name = "fedprolip"
    summary = "The image tower's last projection, fine-tuned near its pretrained values; its change is shared."
    paper = "Fahes et al., Fine-tuning CLIP's Last Visual Projector (ProLIP), 2024, made federated"
    takes_losses = True
    several_labels = True
    protects = True
    needs = NEEDS
    Hyper = FedProLIPHyper
    hyper: FedProLIPHyper
    defaults = pf.defaults(epochs=1, batch_size=32, optimizer="adam", learning_rate=0.1, weight_decay=0)
    disclosures = (
        pf.AGGREGATE,
        pf.Disclosed(
            "operator",
            "features of your images: the change is a sum of their multiples, and from a batch of one image the "
            "coordinator can read its feature",
        ),
    )

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """D."""
        return (CHANGE,)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``d_v`` and ``d_e``. Raises MethodError if the image tower is no vision transformer."""
        self.check_backbone(context.shape)
        assert context.shape.d_v is not None
        return {"d_v": context.shape.d_v, "d_e": context.shape.d_e}

    def check_texts(self, backbone: Backbone, class_names: tuple[str, ...], template: str) -> None:
        """The image tower must end with a projection."""
        super().check_texts(backbone, class_names, template)
        projection(backbone)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of CE + λ·‖D‖² over D, at the rate η·rms(W₀)/√d_v."""
        context.expect_images()
        backbone, device = context.backbone, context.backbone.device
        (frozen, bias), change = projection(backbone), pf.leaf(payload[CHANGE.name], backbone)
        rows = torch.split(torch.arange(len(context.train)), CHUNK)
        pooled = torch.cat([unprojected(backbone, context.train.images(some)) for some in rows])
        labels = context.train.labels.to(device)
        text = pf.template_features(backbone, context.template, context.class_names)
        shots = len(context.train) / len(context.class_names)
        weight = 1 / shots if self.hyper.weight is None else self.hyper.weight

        def penalty(changes: Sequence[Tensor]) -> Tensor:
            return weight * changes[0].square().sum()

        loss_of = pf.ClassificationLoss(context)

        def loss(indices: Tensor) -> Tensor:
            some = pf.sent_to(indices, device)
            images = F.normalize(pooled[some] @ (frozen + change) + bias, dim=-1)
            return loss_of(backbone.logit_scale * images @ text.T, labels[some]) + penalty([change])

        def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
            some = pf.sent_to(indices, device)
            images = F.normalize(torch.einsum("bv,bve->be", pooled[some], frozen + copies[0]) + bias, dim=-1)
            return loss_of.each(backbone.logit_scale * images @ text.T, labels[some])

        size = float(frozen.square().mean().sqrt())
        group = pf.Group([change], size * relative_rate(context, len(frozen)))
        final = pf.train(context, [], loss, groups=[group], objective=pf.Objective(units, penalty))
        return pf.TrainResult({CHANGE.name: change}, metrics={"loss": final})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> ImageClassifier:
        """Cosines of images under the changed projection."""
        backbone = context.backbone
        frozen, bias = projection(backbone)
        changed = frozen + payload[CHANGE.name].to(backbone.device)
        text = pf.template_features(backbone, context.template, context.class_names)

        def logits(images: Tensor) -> Tensor:
            return backbone.logit_scale * F.normalize(unprojected(backbone, images) @ changed + bias, dim=-1) @ text.T

        return ImageClassifier(logits)


def projection(backbone: Backbone) -> tuple[Tensor, Tensor | float]:
    """W₀ ``(d_v, d_e)`` and its bias, float32. Raises MethodError if the image tower does not end with a projection."""
    weights = backbone.vision_tower().weights
    if "proj" not in weights:
        raise pf.MethodError("fedprolip trains the image tower's last projection, and this backbone's ends with none")
    bias = weights.get("proj_bias")
    return weights["proj"].detach().float(), 0.0 if bias is None else bias.detach().float()


@no_grad
def unprojected(backbone: Backbone, images: Tensor) -> Tensor:
    """z ``(B, d_v)``, float32, of preprocessed images ``(B, 3, H, W)``."""
    tower = backbone.vision_tower()
    return tower.encode(tower.weights, backbone.image_input(images), projected=False).float()
