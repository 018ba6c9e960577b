"""A client's counts: its training images of each class, and the calibration scores of held-out images.

What leaves is exact in a secure sum, and noisy where the site's records are protected. Otherwise it leaves only if the
site tells its accuracies in the clear, and each count as the largest multiple of the site's floor that it reaches.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from promptfed.client_service.exits import Failure
from promptfed.client_service.training.data import TRAIN, ClientData
from promptfed.client_service.training.evaluation import probabilities
from promptfed.client_service.training.site import SitePrivacy
from promptfed.shared.messages import SpendReport, Task
from promptfed.shared.methods.core.interface.base import Classifier, ClientContext, Method
from promptfed.shared.methods.core.statistics import (
    CALIBRATION,
    COUNTS,
    SITES,
    UNIT,
    Statistics,
    counted_labels,
    statistics_of,
)
from promptfed.shared.metrics.conformal import Histograms
from promptfed.shared.metrics.disclosure import coded, leaves_room
from promptfed.shared.privacy.noise import NoiseStream
from promptfed.shared.tensors import Tensors

log = logging.getLogger("promptfed.client")
Counts = NDArray[np.int64]


def class_counts(data: ClientData, names: tuple[str, ...], statistics: Statistics) -> Counts:
    """The training images of each class; none without labels."""
    if data.unlabelled:
        return np.zeros((2 if statistics.several else 1, statistics.classes), dtype=np.int64)
    return np.asarray(counted_labels(data.split(TRAIN, names).labels, statistics))


def score_counts(data: ClientData, classifier: Classifier, names: tuple[str, ...], layout: Histograms) -> Counts:
    """The held-out images whose score is in each bin, ``(rows, bins)``; of each patient one image counts."""
    if CALIBRATION not in data.tests or not data.count(CALIBRATION):
        return np.zeros((layout.rows, layout.bins), dtype=np.int64)
    split, images = data.split(CALIBRATION, names), data.images_of(CALIBRATION)
    return layout.counts(split.labels, probabilities(classifier, split), images.subgroups, images.groups)


def above_floor(counts: Counts, floor: int) -> Counts:
    """Each count as the largest multiple of ``floor`` that it reaches; zeros where the ranges would tell more."""
    ranges = [coded(int(count), floor) for count in counts.reshape(-1)]
    if floor > 1 and not leaves_room([coded(int(counts.sum()), floor)], ranges, floor):
        log.warning("no calibration scores are sent: with so few images they would tell of counts below the floor")
        return np.zeros_like(counts)
    return np.array([each.low for each in ranges]).reshape(counts.shape)


def noisy(counts: Counts, epsilon: float, stream: NoiseStream) -> Counts:
    """The counts with discrete Laplace noise, which may make them negative: the noise of a sum has the mean 0."""
    drawn = [stream.discrete_laplace(epsilon) for _ in range(counts.size)]
    return counts + np.array(drawn, dtype=np.int64).reshape(counts.shape)


def as_update(phase: str, counts: Counts, floor: int = 1) -> Tensors:
    """The tensors of the phase."""
    update = {phase: _tensor(counts)}
    if phase == CALIBRATION:
        told = floor == 1 or bool(counts.any())
        update[SITES] = _tensor(np.array([1, floor - 1]) * told)
    return update


def _tensor(counts: Counts) -> Tensor:
    return torch.from_numpy(counts / UNIT).float()


def counted(
    task: Task,
    method: Method,
    context: ClientContext,
    tensors: tuple[Tensors, Tensors],
    data: ClientData,
    privacy: SitePrivacy,
) -> tuple[Tensors, SpendReport | None]:
    """The update of a phase that counts, as it may leave, and what its noise costs.

    ``tensors``: the payload, and the client's private tensors.

    Raises:
        Failure: terms-changed, or privacy-budget-exhausted.
    """
    statistics, site, floor, spent = statistics_of(method), privacy.protection, 1, None
    assert statistics is not None
    assert task.config.class_names is not None
    context = replace(context, class_names=tuple(task.config.class_names))
    cost = statistics.cost(task.phase)
    if (site is None) != (cost is None):
        raise Failure("terms-changed", "the noise of the counts is not what this client enrolled for")
    summed = task.config.secure_aggregation is not None
    if task.phase == COUNTS and not summed and cost is None:
        raise Failure("terms-changed", "class counts leave this client only in a secure sum or with noise")
    if task.phase == COUNTS:
        counts = class_counts(data, context.class_names, statistics)
    else:
        with torch.no_grad():
            classifier = method.classifier(context, *tensors)
        counts = score_counts(data, classifier, context.class_names, statistics.histograms)
    if site is not None and cost is not None:
        spent = site.report(cost)
        counts = noisy(counts, cost.z, privacy.noise.stream(task.round, task.phase, context.client))
    elif not summed:
        floor = privacy.floor
        counts = above_floor(counts, floor) * (privacy.leaving == "plain")
    return as_update(task.phase, counts, floor), spent
