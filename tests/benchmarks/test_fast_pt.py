"""The benchmark of FaST-PT's mixtures runs, and asserts that its ways are equal."""

from __future__ import annotations

from benchmarks.fast_pt import M, largest_difference, made_up, one_by_one, right, speed
from promptfed.shared.clip import Backbone
from promptfed.shared.methods.fast_pt.style_transfer import EmbeddedSplit


def test_every_way_is_timed_and_equal(backbone: Backbone) -> None:
    found = speed(backbone, classes=4, images=6, few=2, repeats=1)
    assert set(found["images_per_second"]) == {"plain", "prefix", "batched", "hard"}
    assert all(rate > 0 for rate in found["images_per_second"].values())
    assert 0 <= found["largest_difference"] <= 1e-4


def test_the_slow_way_is_the_classifiers(backbone: Backbone) -> None:
    case = made_up(backbone, 4, 5)
    assert case.general.shape == (M, backbone.d_t)
    assert largest_difference(case, 5) < 1e-4
    best = one_by_one(case, 5, "plain").argmax(dim=1)
    assert right(case.classifier("soft"), EmbeddedSplit(case.features, best)) == 1.0
