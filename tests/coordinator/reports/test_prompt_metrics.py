"""The mathematics of what people are shown: drift, cosines, the plane, nearest words."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor

from promptfed.coordinator.reports import prompt_metrics
from promptfed.shared.tensors import encode


def test_drift_is_the_distance_from_the_start_and_its_multiple_of_the_start_s_length() -> None:
    start = {"context": torch.tensor([[3.0, 4.0]]), "bias": torch.zeros(2), "gone": torch.ones(1)}
    now = {"context": torch.tensor([[3.0, 7.0]]), "bias": torch.tensor([1.0, 0.0]), "rows": torch.ones(2)}
    found = prompt_metrics.drift(start, now)
    assert set(found) == {"context", "bias"}
    assert found["context"].distance == pytest.approx(3.0)
    assert found["context"].relative == pytest.approx(0.6)
    assert found["bias"].distance == pytest.approx(1.0)
    assert found["bias"].relative is None, "a start of zeros has no length to compare with"


def test_a_step_is_the_distance_from_an_earlier_state_in_lengths_of_the_start() -> None:
    start = {"context": torch.tensor([[3.0, 4.0]]), "bias": torch.zeros(2), "late": torch.ones(1)}
    before = {"context": torch.tensor([[3.0, 5.0]]), "bias": torch.ones(2), "late": torch.ones(2)}
    now = {"context": torch.tensor([[3.0, 7.0]]), "bias": torch.tensor([1.0, 0.0]), "late": torch.ones(1)}
    found = prompt_metrics.drift(start, now, before)
    assert (found["context"].step, found["context"].relative_step) == (pytest.approx(2.0), pytest.approx(0.4))
    assert (found["bias"].step, found["bias"].relative_step) == (pytest.approx(1.0), None)
    assert (found["late"].step, found["late"].relative_step) == (None, None), "it had another shape then"


def test_rows_that_joined_later_have_no_drift() -> None:
    assert prompt_metrics.drift({"d": torch.zeros(2, 3)}, {"d": torch.ones(3, 3)}) == {}


@pytest.fixture
def written(tmp_path: Path) -> list[Path]:
    generator = torch.Generator().manual_seed(3)
    paths = []
    for number in range(4):
        path = tmp_path / f"{number}.safetensors"
        tensors = {"a": torch.randn(5, 7, generator=generator), "b": torch.randn(11, generator=generator)}
        path.write_bytes(encode(tensors | {"rows": torch.arange(3)}))
        paths.append(path)
    return paths


def changes(paths: list[Path], before: dict[str, Tensor]) -> np.ndarray:
    from promptfed.shared.tensors import decode

    rows = []
    for path in paths:
        tensors = decode(path.read_bytes())[0]
        parts = [tensors[name] - before.get(name, torch.zeros(())) for name in ("a", "b")]
        rows.append(np.concatenate([part.double().numpy().ravel() for part in parts]))
    return np.stack(rows)


@pytest.mark.parametrize("columns", [1 << 16, 4])
def test_cosines_are_those_of_what_clients_changed(
    written: list[Path], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(prompt_metrics, "COLUMNS", columns)
    for before in ({}, {"a": torch.full((5, 7), 0.5), "b": torch.full((11,), -0.25)}):
        rows = changes(written, before)
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        np.testing.assert_allclose(np.array(prompt_metrics.cosines(written, before)), unit @ unit.T, atol=1e-6)


def test_a_client_that_changed_nothing_has_no_direction(tmp_path: Path) -> None:
    still, moved = tmp_path / "still", tmp_path / "moved"
    still.write_bytes(encode({"a": torch.ones(3)}))
    moved.write_bytes(encode({"a": torch.tensor([1.0, 2.0, 1.0])}))
    assert prompt_metrics.cosines([still, moved], {"a": torch.ones(3)}) == [[None, None], [None, 1.0]]


def test_the_plane_is_that_of_the_first_two_principal_components() -> None:
    rows = torch.randn(6, 20, generator=torch.Generator().manual_seed(1)) * torch.linspace(3, 0.1, 20)
    vectors = dict(zip("fbadec", rows, strict=True))
    found = prompt_metrics.plane(vectors)
    assert found is not None
    names = sorted(vectors)
    reference = PCA(2).fit(torch.stack([vectors[name] for name in names]).double().numpy())
    scores = reference.transform(torch.stack([vectors[name] for name in names]).double().numpy())
    ours = np.array([found.points[name] for name in names])
    signs = np.sign((ours * scores).sum(axis=0))  # a component has no sign of its own
    np.testing.assert_allclose(ours, scores * signs, atol=1e-6)
    np.testing.assert_allclose(found.explained, reference.explained_variance_ratio_, atol=1e-9)
    assert prompt_metrics.plane(vectors) == found


def test_two_clients_lie_on_a_line_and_one_has_no_plane() -> None:
    found = prompt_metrics.plane({"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([1.0, 3.0])})
    assert found is not None
    assert found.explained[0] == pytest.approx(1.0)
    assert sorted(x for x, _ in found.points.values()) == pytest.approx([-1.0, 1.0])
    assert all(abs(y) < 1e-9 for _, y in found.points.values())
    assert prompt_metrics.plane({"a": torch.ones(2)}) is None
    same = prompt_metrics.plane({"a": torch.ones(2), "b": torch.ones(2)})
    assert same is not None
    assert same.explained == (0.0, 0.0)
    assert all(math.isfinite(value) for point in same.points.values() for value in point)


def test_nearest_words_come_with_their_euclidean_distance() -> None:
    embeddings = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    [first, second] = prompt_metrics.nearest(torch.tensor([[0.0, 0.1], [3.0, 3.0]]), embeddings, 2)
    assert [row for row, _ in first] == [0, 2]
    assert [distance for _, distance in first] == pytest.approx([0.1, 0.9])
    assert second[0] == (1, pytest.approx(1.0))
    assert len(prompt_metrics.nearest(torch.zeros(1, 2), embeddings, 9)[0]) == 3


def test_the_yardstick_is_how_far_words_are_from_their_nearest_others() -> None:
    line = torch.arange(5.0).unsqueeze(1)
    assert prompt_metrics.spacing(line) == pytest.approx(1.0)
    assert prompt_metrics.spacing(torch.zeros(1, 3)) is None
