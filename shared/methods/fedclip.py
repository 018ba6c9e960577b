"""FedCLIP: an attention adapter behind the frozen image tower.

It weighs the coordinates of an image's embedding, a(I) = softmax(W₂·tanh(W₁I + b₁) + b₂) over d_e, and classes are told
apart by the cosine of a(I) ⊙ I with the template's text features. It is all that is trained and all that travels. The
paper pairs each image with its own text within a batch, where other images of the same class count as wrong. With class
labels we take the cross-entropy over the classes instead, as for all compared methods.
Source: Lu et al., "FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning", 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.feature_layers import START, Start, started
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, Tensor, torch

Read = Callable[[pf.Split], "Tensor"]
"""A split's image features ``(N, d_e)``."""

ADAPTER = (
    TensorSpec("adapter_w1", ("d_e", "d_e")),
    TensorSpec("adapter_b1", ("d_e",)),
    TensorSpec("adapter_w2", ("d_e", "d_e")),
    TensorSpec("adapter_b2", ("d_e",)),
)


class FedCLIPHyper(pf.Hyperparameters):
    """What the adapter sees and where it starts; it is as wide as the embeddings."""

    features: Literal["raw", "normalized"] = pf.option(
        "raw", "image features as the tower gives them, which the released code adapts, or on the unit sphere"
    )
    start: Start = START


def attended(adapter: Tensors, features: Tensor) -> Tensor:
    """``(B, d_e)`` normalised a(I) ⊙ I of image ``features (B, d_e)`` of any length."""
    w1, b1, w2, b2 = (adapter[spec.name] for spec in ADAPTER)
    attention = F.linear(torch.tanh(F.linear(features, w1, b1)), w2, b2).softmax(dim=-1)
    return F.normalize(attention * features, dim=-1)


def attended_each(adapters: Tensors, features: Tensor) -> Tensor:
    """`attended` of each row of ``features (b, d_e)`` by an adapter of its own, ``adapters`` of ``(b, *shape)``."""
    w1, b1, w2, b2 = (adapters[spec.name] for spec in ADAPTER)
    hidden = torch.tanh(torch.einsum("bij,bj->bi", w1, features) + b1)
    attention = (torch.einsum("bij,bj->bi", w2, hidden) + b2).softmax(dim=-1)
    return F.normalize(attention * features, dim=-1)


class FedCLIP(pf.Method):
    """One exchange a round: the adapter down, the trained adapter up; the mean weighted by samples."""

    name = "fedclip"
    summary = "An attention adapter behind the frozen image tower; the adapter is all that is trained and travels."
    paper = "Lu et al., FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning, 2023"
    several_labels = True
    protects = True
    Hyper = FedCLIPHyper
    hyper: FedCLIPHyper
    defaults = pf.defaults(20, epochs=3, batch_size=32, optimizer="adam", learning_rate=4e-4, weight_decay=0)
    disclosures = (
        pf.AGGREGATE,
        pf.Disclosed(
            "operator",
            "features of single images: the adapter's gradients are multiples of them, and a coordinator that "
            "chooses the adapter can read them out of an update nearly exactly",
        ),
    )

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The adapter."""
        return ADAPTER

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``d_e``."""
        return {"d_e": context.shape.d_e}

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """Every entry uniform in ±1/√d_e, as linear layers usually start; by default zeros in the second layer.

        All coordinates weigh the same then, which is zero-shot.
        """
        return started(ADAPTER, self.dims(context), draws, self.hyper.start)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of the adapter on CE(τ⁻¹·cos(a(I) ⊙ I, T(y)))."""
        device = context.backbone.device
        adapter = pf.leaves(payload, context.backbone)
        features, labels = self._read(context.train), context.train.labels.to(device)
        text = pf.template_features(context.backbone, context.template, context.class_names)
        loss_of = pf.ClassificationLoss(context)

        def loss(indices: Tensor) -> Tensor:
            some = pf.sent_to(indices, device)
            logits = context.backbone.logit_scale * attended(adapter, features[some]) @ text.T
            return loss_of(logits, labels[some])

        def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
            some, adapters = pf.sent_to(indices, device), dict(zip(adapter, copies, strict=True))
            logits = context.backbone.logit_scale * attended_each(adapters, features[some]) @ text.T
            return loss_of.each(logits, labels[some])

        final = pf.train(context, list(adapter.values()), loss, objective=pf.Objective(units))
        return pf.TrainResult(adapter, metrics={"loss": final})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.FeatureClassifier:
        """Classifies by τ⁻¹·cos(a(I) ⊙ I, T(y)) with the global adapter."""
        backbone = context.backbone
        adapter = {name: tensor.to(backbone.device) for name, tensor in payload.items()}
        text = pf.template_features(backbone, context.template, context.class_names)
        return pf.FeatureClassifier(
            lambda features: backbone.logit_scale * attended(adapter, features) @ text.T, self._read
        )

    def _read(self, split: pf.Split) -> Tensor:
        return split.raw_features() if self.hyper.features == "raw" else split.features()
