"""The embedded backbone, and its features in a folder of each module's own."""

from __future__ import annotations

import pytest
import torch

from promptfed.shared.clip import Backbone, FeatureCache, load_backbone
from promptfed.shared.clip.embedded import tiny


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.set_num_threads(1)
    return load_backbone(tiny.MODEL, tiny.PRETRAINED)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return FeatureCache(tmp_path_factory.mktemp("features"))
