"""FedGDA: one exchange of class means and a second moment, from which every client makes a Gaussian classifier.

Gaussian discriminant analysis on frozen features (Wang et al., "A Hard-to-Beat Baseline for Training-Free CLIP-based
Adaptation", ICLR 2024), whose sums pool over clients exactly; a trainer's posterior and the fusion with the template
follow TOFA (AAAI 2026), of which only a summary could be read. Notation: ``C`` classes, ``d`` numbers of a feature, n_c
images of class c with mean μ_c, S the sum over all images of (x − μ_y)(x − μ_y)ᵀ.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.arrays import cholesky, double, namespace
from promptfed.shared.tensors.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("promptfed.methods")

SHARE = TensorSpec("class_share", ("classes",))
SUM = TensorSpec("class_sum", ("classes", "d_e"))
MOMENT = TensorSpec("moment", ("d_e", "d_e"))
TOTAL = TensorSpec("total", (), dtype="int64")
SENT = (SHARE, SUM, MOMENT)


class FedGDAHyper(pf.Hyperparameters):
    """The prior's strength and how the Gaussians and the template are brought together."""

    rho: float = pf.option(1.0, "ρ: what an image of the federation counts beside a trainer's own", ge=0, le=1e6)
    fusion: Literal["adaptive", "fixed", "text", "image"] = pf.option(
        "adaptive",
        "adaptive: probabilities of both, weighed by how sure each is (TOFA); fixed: the template's "
        "logits + λ·g (CLIP-GDA); or one of them alone",
    )
    fixed_weight: float = pf.option(1.0, "λ of fusion: fixed", ge=0, le=1000)
    min_count: int = pf.option(
        2, "images of a class under which a client sends nothing of it: of one, the mean is its feature", ge=1, le=1000
    )


@dataclass(frozen=True)
class ClassGaussians:
    """``counts (C,)``, ``means (C, d)`` (zero where a class has no image) and ``scatter (d, d)``, float64."""

    counts: Tensor
    means: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, classes: int) -> ClassGaussians:
        """Of features ``(N, d)`` and labels ``(N,)`` below ``classes``."""
        share, sums, moment = statistics(features, labels, classes)
        return cls.of_sums(share, sums, moment, max(1, len(features)))

    @classmethod
    def of_sums(cls, share: Tensor, sums: Tensor, moment: Tensor, total: float) -> ClassGaussians:
        """Of Σ_{y=c} 1/N ``(C,)``, Σ_{y=c} x/N ``(C, d)`` and Σ xxᵀ/N ``(d, d)``, N = ``total``."""
        share, sums, moment = double(share), double(sums), double(moment)
        where, there = namespace(share).where, share * total > 1 / 2
        means = where(there[:, None], sums / where(there, share, 1.0)[:, None], 0.0)
        counts = where(there, share * total, 0.0)
        return cls(counts, means, total * moment - (counts[:, None] * means).T @ means)

    def with_prior(self, prior: ClassGaussians, strength: float) -> ClassGaussians:
        """The power posterior: every image of ``prior`` counts ``strength`` (ρ) times an own one.

        n′ = n + ρm, μ′ = (nμ + ρmν)/n′, S′ = S + ρR + Σ_c (n·ρm/n′)(μ − ν)(μ − ν)ᵀ, with n′ and S′ divided by 1 + ρ:
        so ρ = 0 is this alone, and for a large ρ it becomes ``prior``.
        """
        other = strength * prior.counts
        counts = self.counts + other
        whole = counts.where(counts > 0, torch.ones_like(counts))
        means = (self.counts[:, None] * self.means + other[:, None] * prior.means) / whole[:, None]
        apart = self.means - prior.means
        between = (self.counts * other / whole)[:, None] * apart
        scatter = self.scatter + strength * prior.scatter + between.T @ apart
        return ClassGaussians(counts / (1 + strength), means, scatter / (1 + strength))

    def _factor(self) -> Any | None:
        """The Cholesky factor of S + tr S/(N − 1)·1; None where S is no scatter of more than one image."""
        total, trace, xp = float(self.counts.sum()), float(self.scatter.trace()), namespace(self.scatter)
        if total <= 1 or trace <= 0:
            return None
        shrunk = (self.scatter + self.scatter.T) / 2
        factor = cholesky(shrunk + trace / (total - 1) * xp.eye(len(shrunk), dtype=xp.float64))
        return factor if factor is not None and bool(xp.isfinite(factor).all()) else None

    @property
    def is_scatter(self) -> bool:
        """Whether S is the scatter of more than one image."""
        return self._factor() is not None

    def precision(self) -> Tensor | None:
        """Λ = d·(S + tr S/(N − 1)·1)⁻¹ ``(d, d)``; None where S is no scatter of more than one image."""
        factor = self._factor()
        return None if factor is None else len(self.scatter) * torch.cholesky_inverse(factor)


def statistics(features: Tensor, labels: Tensor, classes: int, least: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """n_c/N ``(C,)``, Σ_{y=c} x/N ``(C, d)`` and Σ xxᵀ/N ``(d, d)``, float64, N = the number of features.

    Classes of fewer than ``least`` images are left out of all three.
    """
    total, labels = max(1, len(features)), labels.cpu()
    wide = features.detach().cpu().double()
    counts = torch.bincount(labels, minlength=classes)
    kept = counts[labels] >= least
    wide, labels = wide[kept], labels[kept]
    sums = torch.zeros(classes, wide.shape[1], dtype=torch.float64).index_add_(0, labels, wide)
    share = torch.bincount(labels, minlength=classes).double()
    return share / total, sums / total, wide.T @ wide / total


def discriminants(gaussians: ClassGaussians, precision: Tensor, features: Tensor) -> Tensor:
    """g_c(x) = xᵀΛμ_c − ½μ_cᵀΛμ_c − log C ``(B, C)`` of features ``(B, d)``, float64."""
    weighted = gaussians.means @ precision
    constants = (weighted * gaussians.means).sum(1) / 2
    wide: Tensor = features.double() @ weighted.T - constants - torch.log(torch.tensor(float(len(weighted))))
    return wide


def fused(text: Tensor, image: Tensor, hyper: FedGDAHyper) -> Tensor:
    """Logits ``(B, C)`` of the template's and the Gaussians' ones."""
    if hyper.fusion == "image":
        return image
    if hyper.fusion == "fixed":
        return text + hyper.fixed_weight * image
    first, second = image.softmax(1), text.softmax(1)
    sure, other = first.amax(1, keepdim=True), second.amax(1, keepdim=True)
    share = sure / (sure + other)
    return torch.log(share * first + (1 - share) * second)


class FedGDA(pf.Method):
    """Trainers classify by their own images with the federation's as a prior, everybody else by the federation's."""

    name = "fedgda"
    summary = "No training: class means and a second moment, pooled once, make a Gaussian classifier."
    paper = "Wang et al., A Hard-to-Beat Baseline for Training-Free CLIP-based Adaptation, 2024, made federated"
    personal = True
    unprotected = "it sends sums of features, to which its noise would have to be fitted"
    metrics = ()
    Hyper = FedGDAHyper
    hyper: FedGDAHyper
    defaults = pf.defaults(1, {"aggregation": {"weighting": "samples", "max_weight_share": 1.0}})
    disclosures = (
        pf.AGGREGATE,
        pf.Disclosed(
            "operator",
            "once: how many images of each class you have, each class's mean feature, and the second moment of all",
        ),
    )

    def check(self, spec: pf.FederationSpec) -> None:
        """One round, a common list of classes, and means that are those of all images together."""
        if spec.class_names is None:
            raise pf.MethodError("fedgda pools by class: list the federation's class_names in the spec")
        if self.hyper.label_space != "federation":
            raise pf.MethodError("fedgda pools over the federation's classes: leave label_space out")
        if spec.rounds != 1:
            raise pf.MethodError("fedgda exchanges once, and more rounds would change nothing: set rounds: 1")
        if spec.aggregation.rule == "mean" and (
            spec.aggregation.weighting != "samples" or spec.aggregation.max_weight_share != 1
        ):
            raise pf.MethodError(
                "fedgda's means are those of all images only where clients weigh what their samples say: take "
                "aggregation.weighting: samples and max_weight_share: 1, or leave both out"
            )

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The statistics, and of how many images they are: zero at the start, when everybody classifies zero-shot."""
        return (*SENT, TOTAL)

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """The statistics up, nothing down."""
        return (pf.Phase("statistics", down=(), up=SENT, mean=True),)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``classes`` and ``d_e``."""
        return {"classes": len(context.class_names or ()), "d_e": context.shape.d_e}

    def aggregate(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> Tensors:
        """The means over all images; what is no scatter, as a robust rule may make of them, is not taken."""
        samples = {client.name: client.num_samples for client in context.clients}
        counted: list[str] = []

        def noted() -> pf.Updates:
            for update in updates:
                counted.append(update.client)
                yield update

        pooled = combine(noted())
        xp = namespace(pooled[SHARE.name])
        after = pooled | {TOTAL.name: xp.asarray(sum(samples[name] for name in counted), dtype=xp.int64)}
        return after if pooled_gaussians(after).is_scatter else state

    def measure(self, before: Tensors, phase: pf.Phase, after: Tensors, context: pf.ServerContext) -> pf.Measured:
        """Of how many images the statistics are; 0 where they were no scatter and not taken."""
        return pf.Measured(phase={"pooled_images": float(after[TOTAL.name])})

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """The statistics of the client's own images."""
        context.expect_images()
        sums = statistics(
            context.train.features(), context.train.labels, len(context.class_names), self.hyper.min_count
        )
        return pf.TrainResult({spec.name: sent.float() for spec, sent in zip(SENT, sums, strict=True)})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """The posterior's for a trainer, the federation's for others; the template where a class has no images."""
        own = len(context.train) > 0
        gaussians = pooled_gaussians(payload)
        if own:
            features, labels = context.train.features(), context.train.labels
            mine = ClassGaussians.of(features, labels, len(context.label_space or context.class_names))
            gaussians = mine.with_prior(gaussians, self.hyper.rho)
        return self._classifier(context, gaussians)

    def variants(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> dict[str, pf.Classifier]:
        """``global``: a trainer's data under an evaluator's classifier."""
        return {"global": self._classifier(context, pooled_gaussians(payload))} if len(context.train) else {}

    def _classifier(self, context: pf.ClientContext, gaussians: ClassGaussians) -> pf.Classifier:
        rows = context.trained_rows()
        without = [
            name
            for name, row in zip(context.class_names, rows, strict=True)
            if row < 0 or not float(gaussians.counts[row])
        ]
        precision = gaussians.precision()
        if self.hyper.fusion == "text" or precision is None or without:
            if precision is not None and without:
                log.warning(
                    "client %s: nobody has images of %r, so these %d classes are told apart by the template alone",
                    context.client,
                    without[0],
                    len(rows),
                )
            return TemplateClassifier(context)
        chosen = ClassGaussians(gaussians.counts[rows], gaussians.means[rows], gaussians.scatter)
        text = pf.template_features(context.backbone, context.template, context.class_names)

        def logits(features: Tensor) -> Tensor:
            """(S4) the Gaussians' scores and the template's, brought together."""
            image = discriminants(chosen, precision, features.cpu()).to(features.device, features.dtype)
            return fused(context.backbone.logit_scale * features @ text.T, image, self.hyper)

        return pf.FeatureClassifier(logits)


def pooled_gaussians(state: Tensors) -> ClassGaussians:
    """The Gaussians of a state's statistics."""
    share, sums, moment = (state[spec.name] for spec in SENT)
    return ClassGaussians.of_sums(share, sums, moment, float(state[TOTAL.name]))
