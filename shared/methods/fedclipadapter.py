"""FedCLIP-Adapter: a bottleneck behind the frozen image tower, whose output is blended with the feature."""

from __future__ import annotations

from collections.abc import Sequence

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.feature_layers import START, Start, relative_rate, started
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, Tensor, no_grad, torch

BOTTLENECK = TensorSpec("image_w1", ("hidden", "d_e")), TensorSpec("image_w2", ("d_e", "hidden"))


class FedCLIPAdapterHyper(pf.Hyperparameters):
    """How wide the adapter is, and how much of a feature it replaces."""

    reduction: int = pf.option(4, "the hidden layer has d_e / reduction units", ge=1, le=1024)
    alpha: float = pf.option(0.2, "α, share of A(I) in an image's feature; 0: zero-shot", ge=0, le=1)
    start: Start = START


def blended(weights: Sequence[Tensor], features: Tensor, share: float) -> Tensor:
    """(C1) ``(..., N, d_e)`` normalised s·ReLU(W₂·ReLU(W₁v)) + (1 − s)·v of ``features (..., N, d_e)``.

    ``weights``: W₁ ``(..., h, d_e)`` and W₂ ``(..., d_e, h)``.
    """
    narrow, wide = weights
    wider = torch.relu(features @ narrow.mT) @ wide.mT
    adapted = torch.maximum(wider, wider.new_zeros(()))  # a ReLU whose slope at 0 is ½: a W₂ of zeros is trained
    return F.normalize(share * adapted + (1 - share) * features, dim=-1)


class FedCLIPAdapter(pf.Method):
    """One exchange a round: the adapters down, the trained adapters up; the mean weighted by samples."""

    name = "fedclipadapter"
    summary = "A bottleneck network behind the frozen image tower, whose output is blended with the feature."
    paper = "Gao et al., CLIP-Adapter: Better Vision-Language Models with Feature Adapters, 2021, made federated"
    several_labels = True
    protects = True
    Hyper = FedCLIPAdapterHyper
    hyper: FedCLIPAdapterHyper
    defaults = pf.defaults(epochs=5, batch_size=32, optimizer="adam", learning_rate=0.1, weight_decay=0)
    disclosures = (
        pf.AGGREGATE,
        pf.Disclosed(
            "operator",
            "features of single images: the adapter's gradients are sums of multiples of them, and a coordinator that "
            "chooses the adapter can read some out of an update",
        ),
    )

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The adapter."""
        return BOTTLENECK

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``d_e`` and ``hidden``."""
        return {"d_e": context.shape.d_e, "hidden": max(1, context.shape.d_e // self.hyper.reduction)}

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """Every weight uniform in ±1/√(its inputs), as linear layers usually start; by default zeros in W₂."""
        return started(BOTTLENECK, self.dims(context), draws, self.hyper.start)

    def images(self, adapter: Tensors, features: Tensor) -> Tensor:
        """Image features ``(..., N, d_e)`` behind the adapter."""
        return blended([adapter[spec.name] for spec in BOTTLENECK], features, self.hyper.alpha)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of the adapter on the cross-entropy, each matrix at the rate η/√(its inputs)."""
        device, scale = context.backbone.device, context.backbone.logit_scale
        adapter = pf.leaves(payload, context.backbone)
        features, labels = context.train.features(), context.train.labels.to(device)
        text = pf.template_features(context.backbone, context.template, context.class_names)
        loss_of = pf.ClassificationLoss(context)

        def loss(indices: Tensor) -> Tensor:
            rows = pf.sent_to(indices, device)
            logits = scale * self.images(adapter, features[rows]) @ text.T
            return loss_of(logits, labels[rows])

        def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
            rows, adapters = pf.sent_to(indices, device), dict(zip(adapter, copies, strict=True))
            images = self.images(adapters, features[rows].unsqueeze(1))
            logits = scale * (images @ text.T).squeeze(1)
            return loss_of.each(logits, labels[rows])

        groups = [pf.Group([matrix], relative_rate(context, matrix.shape[-1])) for matrix in adapter.values()]
        final = pf.train(context, [], loss, groups=groups, objective=pf.Objective(units))
        return pf.TrainResult(adapter, metrics={"loss": final})

    @no_grad
    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """Cosines of adapted features."""
        backbone = context.backbone
        adapter = {name: tensor.to(backbone.device) for name, tensor in payload.items()}
        text = pf.template_features(backbone, context.template, context.class_names)
        return pf.FeatureClassifier(lambda features: backbone.logit_scale * self.images(adapter, features) @ text.T)
