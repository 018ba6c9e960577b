"""The sum of squared losses that a client reports, beside numpy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from promptfed.client_service.training.squared_losses import squared_losses

CLASSES = 4


def given(labels: Tensor, asked: bool = True) -> tuple[Any, ...]:
    """A method whose classifier returns fixed logits, a context, and data with these labels."""
    logits = torch.randn(len(labels), CLASSES, generator=torch.Generator().manual_seed(3)) * 3

    class Split(SimpleNamespace):
        def __len__(self) -> int:
            return len(labels)

    split = Split(labels=labels)
    classifier = SimpleNamespace(logits=lambda split, rows: logits[rows])
    method = SimpleNamespace(classifier=lambda context, payload, private: classifier)
    terms = SimpleNamespace(squared_losses=asked)
    context = SimpleNamespace(terms=terms, class_names=("a", "b", "c", "d"), cancelled=lambda: False)
    data = SimpleNamespace(split=lambda name, names: split)
    return logits, cast(Any, method), cast(Any, context), cast(Any, data)


def test_of_one_label_it_is_the_cross_entropy() -> None:
    labels = torch.randint(0, CLASSES, (600,), generator=torch.Generator().manual_seed(1))
    labels[5] = -1
    logits, *parts = given(labels)
    total = 0.0
    for row, label in zip(logits.double().numpy(), labels.tolist(), strict=True):
        if label >= 0:
            total += (np.log(np.exp(row).sum()) - row[label]) ** 2
    assert squared_losses(*parts, {}, {}) == {"squared_losses": pytest.approx(total, rel=1e-9)}


def test_of_several_labels_it_is_the_mean_over_the_known_ones() -> None:
    labels = torch.randint(-1, 2, (300, CLASSES), generator=torch.Generator().manual_seed(1))
    logits, *parts = given(labels)
    total = 0.0
    for row, truth in zip(logits.double().numpy(), labels.tolist(), strict=True):
        p = 1 / (1 + np.exp(-row))
        losses = [-np.log(p[at] if known else 1 - p[at]) for at, known in enumerate(truth) if known >= 0]
        total += (sum(losses) / max(1, len(losses))) ** 2
    assert squared_losses(*parts, {}, {}) == {"squared_losses": pytest.approx(total, rel=1e-9)}


def test_nothing_is_reported_that_nobody_asks_for() -> None:
    _, *parts = given(torch.zeros(3, dtype=torch.int64), asked=False)
    assert squared_losses(*parts, {}, {}) == {}
