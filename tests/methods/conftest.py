"""A small backbone with random weights and a client with made-up features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shared.clip import Backbone, load_backbone
from shared.methods.base import ClientContext
from shared.spec import TrainingSpec

NAMES = ("sun", "chess knight", "umbrella", "pair of scissors", "hot air balloon")


@dataclass
class MadeUpSplit:
    """Random features on the sphere with labels."""

    values: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def features(self) -> Tensor:
        return self.values

    def images(self, indices: Tensor) -> Tensor:
        raise AssertionError("a method with cached features must not look at images")


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    torch.set_num_threads(1)
    return load_backbone("promptfed-tiny", None)


@pytest.fixture
def make_context(backbone: Backbone) -> Callable[..., ClientContext]:
    def make(count: int = 10, *, round: int = 1, rounds: int = 4, **training: Any) -> ClientContext:
        draws = torch.Generator().manual_seed(5)
        features = F.normalize(torch.randn(count, backbone.d_e, generator=draws), dim=-1)
        labels = torch.randint(len(NAMES), (count,), generator=draws)
        return ClientContext(
            backbone=backbone,
            class_names=NAMES,
            template="a photo of a {}.",
            training=TrainingSpec(**training),
            client="hospital-a",
            domain=None,
            peers=(),
            round=round,
            rounds=rounds,
            phase="train",
            seed=3,
            train=MadeUpSplit(features, labels),
        )

    return make
