"""The spec's section ``loss``: the classification loss of training, for noisy labels and unequal classes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from promptfed.shared.spec.spec_section import Section, left_out


class LossSpec(Section):
    """The loss of one image, and how it makes up for classes of unequal size."""

    kind: Annotated[
        Literal["cross_entropy", "gce", "mae", "asymmetric"],
        Field(
            description="gce: (1 - p^q)/q of the probability p of the given label, which trains less on labels that "
            "the model finds unlikely (Zhang and Sabuncu 2018); mae: 1 - p, which is gce at q = 1. Of images with "
            "several labels the sum over the classes of the binary cross-entropy, or of the asymmetric loss "
            "-(1-p)^gamma_positive·log p and -p_m^gamma_negative·log(1-p_m) with p_m = max(p - margin, 0) "
            "(Ridnik et al. 2021)"
        ),
    ] = "cross_entropy"
    q: Annotated[float, Field(gt=0, le=1, description="of gce: near 0 it is the cross-entropy, at 1 mae")] = 0.7
    gamma_positive: Annotated[float, Field(ge=0, le=10, description="of asymmetric")] = 0.0
    gamma_negative: Annotated[float, Field(ge=0, le=10, description="of asymmetric")] = 4.0
    margin: Annotated[float, Field(ge=0, lt=1, description="of asymmetric")] = 0.05
    balance: Annotated[
        Literal["none", "logit_adjusted", "class_balanced"],
        Field(
            description="by the numbers of training images of each class (`counts`); of a client without labels, by "
            "those of its predictions. logit_adjusted: training "
            "adds adjustment·log(share of the class) to its logit (Menon et al. 2021; at 1 it is the balanced softmax "
            "of Ren et al. 2020), and of images with several labels adjustment·log(π/(1-π)) with the share π of images "
            "that have it; class_balanced: each image counts 1/(1 - beta^n) of a class with n images, scaled "
            "to a mean of 1 over the client's classes (Cui et al. 2019)"
        ),
    ] = "none"
    counts: Annotated[
        Literal["own", "federation"],
        left_out(
            "own",
            description="whose images `balance` reads. federation: of all clients, counted before round 1 by a secure "
            "sum or with noise, at least 1 of each class",
        ),
    ] = "own"
    adjustment: Annotated[float, Field(gt=0, le=10, description="of logit_adjusted")] = 1.0
    beta: Annotated[float, Field(gt=0, lt=1, description="of class_balanced")] = 0.999

    unlabelled_weight: Annotated[
        float,
        left_out(
            1.0,
            gt=0,
            le=100,
            description="λ: scales the learning rate of a client without labels (`unlabelled=true`), "
            "since Adam and clipping undo a weight of its loss",
        ),
    ] = 1.0
    unlabelled_threshold: Annotated[
        float,
        left_out(
            0.95,
            gt=0,
            lt=1,
            description="least probability of a class at which a client without labels trains on an image as one of it "
            "(FixMatch, Sohn et al. 2020)",
        ),
    ] = 0.95

    @property
    def is_plain(self) -> bool:
        """Whether this is the cross-entropy over all labelled images alike."""
        return self.kind == "cross_entropy" and self.balance == "none"
