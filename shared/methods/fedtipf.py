"""FedTipF (Tip-Adapter-F): zero-shot logits and votes of a cache whose keys are trained.

Notation: keys F ``(K, d_e)``, values Y one-hot labels, I an image's normalised feature, a and b the weight and the
sharpness of the votes. Keys that stay home are one for each training image of the client, and nothing travels. Shared
keys are one for each class: they start at the mean feature of all clients' images of it, and are averaged.

Source: Zhang et al., "Tip-Adapter: Training-free Adaption of CLIP for Few-shot Classification", ECCV 2022, section 3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.class_rows import check_class_rows, class_means, directions
from promptfed.shared.methods.fedtaskres import relative_rate
from promptfed.shared.methods.tip_adapter import LABELS, Cache
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

KEYS = TensorSpec("keys", ("classes", "d_e"))
MEANS = "means"  # the phase that starts shared keys


class FedTipFHyper(pf.Hyperparameters):
    """Whose the keys are, and how much their votes count."""

    keys: Literal["home", "shared"] = pf.option(
        "home",
        "home: a key for each of the client's images, which never leaves it; shared: one for each class, averaged",
    )
    alpha: float = pf.option(1.0, "a, weight of the votes; 0: zero-shot", ge=0, le=1000)
    beta: float = pf.option(5.5, "b, sharpness of the votes", ge=0, le=1000)


class FedTipF(pf.Method):
    """Nobody but their owner has keys that stay home: evaluators classify zero-shot."""

    name = "fedtipf"
    summary = "Tip-Adapter with trained keys: of the client's own images, which stay home, or one shared key per class."
    paper = (
        "Zhang et al., Tip-Adapter: Training-free Adaption of CLIP for Few-shot Classification, 2022 (Tip-Adapter-F)"
    )
    takes_losses = True
    unprotected = "its keys start as features of a client's images, untouched by noise"
    Hyper = FedTipFHyper
    hyper: FedTipFHyper
    defaults = pf.defaults(epochs=1, batch_size=32, optimizer="adam", learning_rate=0.1, weight_decay=0)

    def __init__(self, hyper: FedTipFHyper):
        super().__init__(hyper)
        self._shared = hyper.keys == "shared"
        self.personal = not self._shared

    @property
    def disclosures(self) -> tuple[pf.Disclosed, ...]:
        """Shared keys show class means."""
        told = pf.Disclosed("operator", "once: the sum of your images' features of each class; then the keys you train")
        return (pf.AGGREGATE, told) if self._shared else ()

    def check(self, spec: pf.FederationSpec) -> None:
        """Shared keys need a common list of classes."""
        if self._shared:
            check_class_rows(self, spec)

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The shared keys, zero before the first round and for a class that nobody has; else nothing."""
        return (KEYS,) if self._shared else ()

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """The keys both ways; before that, in the first round, sums of features up."""
        train = super().phases(round, rounds)
        if round > 1 or not self._shared:
            return train
        return (pf.Phase(MEANS, down=(), up=(KEYS,), mean=True), *train)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``classes`` and ``d_e``."""
        return {"classes": len(context.class_names or ()), "d_e": context.shape.d_e} if self._shared else {}

    def aggregate(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> Tensors:
        """The mean of the keys; of sums of features, normalised, since a key is a direction."""
        after = super().aggregate(state, phase, updates, combine, context)
        if phase.name != MEANS:
            return after
        return after | {KEYS.name: directions(after[KEYS.name])}

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """Sums of features, or E epochs of CE(T1) over the keys at the rate η/√d_e."""
        if context.phase == MEANS:
            return pf.TrainResult({KEYS.name: class_means(context)})
        context.expect_images()
        features, labels = context.train.features(), context.train.labels.to(context.backbone.device)
        cache = self._cache(context, payload, private)
        keys = pf.leaf(cache.keys, context.backbone)
        trained = Cache(keys, cache.labels)
        text = pf.template_features(context.backbone, context.template, context.class_names)
        loss_of = pf.ClassificationLoss(context)

        def loss(indices: Tensor) -> Tensor:
            rows = pf.sent_to(indices, labels.device)
            return loss_of(self._logits(context, trained, text, features[rows]), labels[rows])

        group = pf.Group([keys], relative_rate(context, features.shape[1]))
        final = pf.train(context, [], loss, groups=[group])
        if not self._shared:
            return pf.TrainResult({}, {KEYS.name: keys, LABELS: cache.labels}, {"loss": final})
        update = payload[KEYS.name].to(keys.device, copy=True)
        update[cache.labels] = keys.detach()
        return pf.TrainResult({KEYS.name: update}, metrics={"loss": final})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """With the shared keys or the client's own; before its first task, with its images' features."""
        cache = self._cache(context, payload, private)
        if not len(cache.keys):
            return TemplateClassifier(context)
        cache = Cache(cache.keys, context.among_candidates(cache.labels).to(cache.keys.device))
        text = pf.template_features(context.backbone, context.template, context.class_names)
        return pf.FeatureClassifier(lambda features: self._logits(context, cache, text, features))

    def _logits(self, context: pf.ClientContext, cache: Cache, text: Tensor, features: Tensor) -> Tensor:
        """(T1) ``(B, C)`` τ⁻¹·I·Tᵀ + a·exp(−b(1 − I·Fᵀ))·Y of normalised features ``(B, d_e)``."""
        plain = context.backbone.logit_scale * features @ text.T
        return plain + self.hyper.alpha * cache.votes(features, self.hyper.beta, len(text))

    def _cache(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> Cache:
        """The keys with their labels in the label space of training; shared keys of zero are left out."""
        device = context.backbone.device
        if self._shared:
            keys = payload[KEYS.name].to(device)
            known = keys.any(dim=1)
            return Cache(keys[known], known.nonzero().squeeze(1))
        if KEYS.name in private:
            return Cache(private[KEYS.name].to(device), private[LABELS].to(device))
        if not len(context.train):
            return Cache(torch.zeros(0, context.backbone.d_e), torch.zeros(0, dtype=torch.int64))
        return Cache(context.train.features(), context.train.labels.to(device))
