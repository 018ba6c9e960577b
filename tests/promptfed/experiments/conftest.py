"""Features in a folder of each module's own."""

from __future__ import annotations

import pytest

from promptfed.shared.clip import FeatureCache


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return FeatureCache(tmp_path_factory.mktemp("features"))
