"""Tip-Adapter: zero-shot logits plus votes of a cache of the client's labelled training features.

Nothing is trained by gradients and nothing travels. Notation: keys F ``(N, d_e)`` normalised features of training
images, values Y one-hot labels, I an image's normalised feature, a and b the weight and the sharpness of the votes.

Source: Zhang et al., "Tip-Adapter: Training-free Adaption of CLIP for Few-shot Classification", ECCV 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, no_grad, torch

if TYPE_CHECKING:
    from torch import Generator, Tensor

KEYS, LABELS, BLEND = "keys", "key_labels", "blend"
SHARPNESSES, WEIGHTS = 200, 20  # values of b and of a that are tried
LEAST, MOST = 0.1, 13.0  # the first and the last of each
LEAST_AREA = 0.5  # of a random crop, as a share of the image
CHUNK = 32


class TipAdapterHyper(pf.Hyperparameters):
    """What the cache holds, and how much it is listened to."""

    alpha: float = pf.option(1.17, "a, weight of the cache's votes, unless searched", ge=0, le=1000)
    beta: float = pf.option(1.0, "b, sharpness of the votes, unless searched", ge=0, le=1000)
    validation: float = pf.option(
        0.25, "share of each class's training images on which a and b are searched; 0: fixed", ge=0, lt=1
    )
    keys: Literal["images", "means"] = pf.option("images", "a key for each training image, or for each class's mean")
    augment: int = pf.option(1, "random crops of each training image whose mean is its key; 1: the image", ge=1, le=100)


@dataclass(frozen=True)
class Cache:
    """Keys ``(N, d_e)`` with the place of each one's class among the candidates ``(N,)``, -1 where it is none."""

    keys: Tensor
    labels: Tensor

    def votes(self, features: Tensor, beta: float, classes: int) -> Tensor:
        """``(B, C)`` exp(−b(1 − I·Fᵀ))·Y of normalised features ``(B, d_e)``."""
        nearness = torch.exp(-beta * (1 - features @ self.keys.T))
        known = (self.labels >= 0).unsqueeze(1)
        return nearness @ (F.one_hot(self.labels.clamp(min=0), classes) * known).to(nearness.dtype)

    def means(self) -> Cache:
        """One key for each class, its normalised mean."""
        classes = torch.unique(self.labels)
        means = torch.stack([self.keys[self.labels == label].mean(0) for label in classes])
        return Cache(F.normalize(means, dim=-1), classes)


class TipAdapter(pf.Method):
    """Each client stores its own keys; clients without keys classify zero-shot."""

    name = "tip_adapter"
    summary = "No training: zero-shot logits and votes of the client's own training features, which never leave it."
    paper = "Zhang et al., Tip-Adapter: Training-free Adaption of CLIP for Few-shot Classification, 2022"
    personal = True
    unprotected = "it keeps features of a client's images, untouched by noise"
    metrics = ("alpha", "beta", "validation_accuracy")
    shares = ("validation_accuracy",)
    Hyper = TipAdapterHyper
    hyper: TipAdapterHyper
    defaults = pf.defaults(1)

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """Empty: the coordinator holds nothing."""
        return ()

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """No symbol, since there is no tensor."""
        return {}

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """Fills the cache; a and b are those of the best accuracy on held-out training images, where there are any."""
        context.expect_images()
        labels = context.train.labels.to(context.backbone.device)
        keys = self._keys(context)
        alpha, beta, metrics = self.hyper.alpha, self.hyper.beta, {}
        held = held_out(context, self.hyper.validation).to(labels.device)
        if held.any() and not held.all():
            alpha, beta, best = self._searched(context, self._cache(keys[~held], labels[~held]), held)
            metrics = {"validation_accuracy": best}
        cache = self._cache(keys, labels)
        blend = torch.tensor([alpha, beta])
        kept = {KEYS: cache.keys.cpu(), LABELS: cache.labels.cpu(), BLEND: blend}
        return pf.TrainResult({}, kept, metrics | {"alpha": alpha, "beta": beta})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """With the client's cache; before its first task, with its features and the a and b that are given."""
        if KEYS in private:
            keys, labels = private[KEYS], private[LABELS]
            alpha, beta = map(float, private[BLEND])
        elif len(context.train):
            cache = self._cache(context.train.features(), context.train.labels)
            keys, labels, alpha, beta = cache.keys, cache.labels, self.hyper.alpha, self.hyper.beta
        else:
            return TemplateClassifier(context)
        device = context.backbone.device
        cache = Cache(keys.to(device), context.among_candidates(labels).to(device))
        text = pf.template_features(context.backbone, context.template, context.class_names)

        def logits(features: Tensor) -> Tensor:
            """(T1) τ⁻¹·I·Tᵀ + a·exp(−b(1 − I·Fᵀ))·Y."""
            plain = context.backbone.logit_scale * features @ text.T
            return plain + alpha * cache.votes(features, beta, len(text))

        return pf.FeatureClassifier(logits)

    def _cache(self, keys: Tensor, labels: Tensor) -> Cache:
        cache = Cache(keys, labels.to(keys.device))
        return cache.means() if self.hyper.keys == "means" else cache

    @no_grad
    def _keys(self, context: pf.ClientContext) -> Tensor:
        """``(N, d_e)`` normalised features of the images, or the normalised mean of raw features of random crops."""
        if self.hyper.augment == 1:
            return context.train.features()
        draws = pf.generator(context.seed, "crops", context.client)
        parts = []
        for some in torch.split(torch.arange(len(context.train)), CHUNK):
            images = context.train.images(some)
            # As released: the mean is of features as the tower gives them, so that a longer one counts for more.
            crops = (cropped(images, draws) for _ in range(self.hyper.augment))
            views = [context.backbone.encode_images(crop, normalize=False) for crop in crops]
            parts.append(F.normalize(torch.stack(views).mean(0), dim=-1))
        return torch.cat(parts)

    @no_grad
    def _searched(self, context: pf.ClientContext, cache: Cache, held: Tensor) -> tuple[float, float, float]:
        """The a and b of the best accuracy on the images that are ``held`` out (of equals the least b, then a)."""
        own = context.for_training()
        features = context.train.features()[held]
        labels = context.train.labels.to(features.device)[held]
        text = pf.template_features(own.backbone, own.template, own.class_names)
        plain = own.backbone.logit_scale * features @ text.T
        best = (self.hyper.alpha, self.hyper.beta, -1.0)
        for beta in torch.linspace(LEAST, MOST, SHARPNESSES).tolist():
            votes = cache.votes(features, beta, len(text))
            for alpha in torch.linspace(LEAST, MOST, WEIGHTS).tolist():
                right = float(((plain + alpha * votes).argmax(1) == labels).float().mean())
                if right > best[2]:
                    best = (alpha, beta, right)
        return best


def held_out(context: pf.ClientContext, share: float) -> Tensor:
    """``(N,)`` bool: of each class ⌊share·n⌋ training images, drawn by the federation's seed."""
    labels = context.train.labels.cpu()
    order = torch.randperm(len(labels), generator=pf.generator(context.seed, "held out", context.client))
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in torch.unique(labels):
        own = order[labels[order] == label]
        held[own[: int(share * len(own))]] = True
    return held


def cropped(images: Tensor, draws: Generator) -> Tensor:
    """Images ``(B, 3, H, W)``, each a random crop of at least half of its area, or its mirror image, in full size."""
    height, width = images.shape[-2:]
    crops = []
    for image in images:
        area, across, down, flip = torch.rand(4, generator=draws).tolist()
        side = (LEAST_AREA + (1 - LEAST_AREA) * area) ** 0.5
        h, w = max(1, round(side * height)), max(1, round(side * width))
        top, left = round(down * (height - h)), round(across * (width - w))
        part = F.interpolate(image[None, :, top : top + h, left : left + w], (height, width), mode="bilinear")
        crops.append(part.flip(-1) if flip < 1 / 2 else part)
    return torch.cat(crops)
