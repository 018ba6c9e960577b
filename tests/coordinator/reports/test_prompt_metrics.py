"""The mathematics of what people are shown: drift, cosines, the plane, nearest words."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.decomposition import PCA

from promptfed.coordinator.reports import prompt_metrics
from promptfed.shared.tensors import Array, Arrays, decode, encode


def array(values: object) -> Array:
    return np.array(values, np.float32)


def full(value: float, *shape: int) -> Array:
    return np.full(shape, value, np.float32)


def test_drift_is_the_distance_from_the_start_and_its_multiple_of_the_start_s_length() -> None:
    start = {"context": array([[3.0, 4.0]]), "bias": full(0.0, 2), "gone": full(1.0, 1)}
    now = {"context": array([[3.0, 7.0]]), "bias": array([1.0, 0.0]), "rows": full(1.0, 2)}
    found = prompt_metrics.drift(start, now)
    assert set(found) == {"context", "bias"}
    assert found["context"].distance == pytest.approx(3.0)
    assert found["context"].relative == pytest.approx(0.6)
    assert found["bias"].distance == pytest.approx(1.0)
    assert found["bias"].relative is None, "a start of zeros has no length to compare with"


def test_a_step_is_the_distance_from_an_earlier_state_in_lengths_of_the_start() -> None:
    start = {"context": array([[3.0, 4.0]]), "bias": full(0.0, 2), "late": full(1.0, 1)}
    before = {"context": array([[3.0, 5.0]]), "bias": full(1.0, 2), "late": full(1.0, 2)}
    now = {"context": array([[3.0, 7.0]]), "bias": array([1.0, 0.0]), "late": full(1.0, 1)}
    found = prompt_metrics.drift(start, now, before)
    assert (found["context"].step, found["context"].relative_step) == (pytest.approx(2.0), pytest.approx(0.4))
    assert (found["bias"].step, found["bias"].relative_step) == (pytest.approx(1.0), None)
    assert (found["late"].step, found["late"].relative_step) == (None, None), "it had another shape then"


def test_rows_that_joined_later_have_no_drift() -> None:
    assert prompt_metrics.drift({"d": full(0.0, 2, 3)}, {"d": full(1.0, 3, 3)}) == {}


@pytest.fixture
def written(tmp_path: Path) -> list[Path]:
    random = np.random.default_rng(3)
    paths = []
    for number in range(4):
        path = tmp_path / f"{number}.safetensors"
        tensors = {"a": array(random.standard_normal((5, 7))), "b": array(random.standard_normal(11))}
        path.write_bytes(encode(tensors | {"rows": np.arange(3)}))
        paths.append(path)
    return paths


def changes(paths: list[Path], before: Arrays) -> Array:
    rows = []
    for path in paths:
        tensors = decode(path.read_bytes())[0]
        parts = [tensors[name] - before.get(name, full(0.0)) for name in ("a", "b")]
        rows.append(np.concatenate([part.astype(float).ravel() for part in parts]))
    return np.stack(rows)


@pytest.mark.parametrize("columns", [1 << 16, 4])
def test_cosines_are_those_of_what_clients_changed(
    written: list[Path], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(prompt_metrics, "COLUMNS", columns)
    befores: list[Arrays] = [{}, {"a": full(0.5, 5, 7), "b": full(-0.25, 11)}]
    for starts in ([befores[0]] * len(written), [befores[number % 2] for number in range(len(written))]):
        rows = np.concatenate([changes([path], before) for path, before in zip(written, starts, strict=True)])
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        np.testing.assert_allclose(np.array(prompt_metrics.cosines(written, starts)), unit @ unit.T, atol=1e-6)


def test_a_client_that_changed_nothing_has_no_direction(tmp_path: Path) -> None:
    still, moved = tmp_path / "still", tmp_path / "moved"
    still.write_bytes(encode({"a": full(1.0, 3)}))
    moved.write_bytes(encode({"a": array([1.0, 2.0, 1.0])}))
    assert prompt_metrics.cosines([still, moved], [{"a": full(1.0, 3)}] * 2) == [[None, None], [None, 1.0]]


def test_the_plane_is_that_of_the_first_two_principal_components() -> None:
    rows = array(np.random.default_rng(1).standard_normal((6, 20)) * np.linspace(3, 0.1, 20))
    vectors = dict(zip("fbadec", rows, strict=True))
    found = prompt_metrics.plane(vectors)
    assert found is not None
    names = sorted(vectors)
    reference = PCA(2).fit(np.stack([vectors[name] for name in names]).astype(float))
    scores = reference.transform(np.stack([vectors[name] for name in names]).astype(float))
    ours = np.array([found.points[name] for name in names])
    signs = np.sign((ours * scores).sum(axis=0))  # a component has no sign of its own
    np.testing.assert_allclose(ours, scores * signs, atol=1e-6)
    np.testing.assert_allclose(found.explained, reference.explained_variance_ratio_, atol=1e-9)
    assert prompt_metrics.plane(vectors) == found


def test_two_clients_lie_on_a_line_and_one_has_no_plane() -> None:
    found = prompt_metrics.plane({"a": array([1.0, 1.0]), "b": array([1.0, 3.0])})
    assert found is not None
    assert found.explained[0] == pytest.approx(1.0)
    assert sorted(x for x, _ in found.points.values()) == pytest.approx([-1.0, 1.0])
    assert all(abs(y) < 1e-9 for _, y in found.points.values())
    assert prompt_metrics.plane({"a": full(1.0, 2)}) is None
    same = prompt_metrics.plane({"a": full(1.0, 2), "b": full(1.0, 2)})
    assert same is not None
    assert same.explained == (0.0, 0.0)
    assert all(math.isfinite(value) for point in same.points.values() for value in point)


def test_nearest_words_come_with_their_euclidean_distance() -> None:
    embeddings = array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    [first, second] = prompt_metrics.nearest(array([[0.0, 0.1], [3.0, 3.0]]), embeddings, 2)
    assert [row for row, _ in first] == [0, 2]
    assert [distance for _, distance in first] == pytest.approx([0.1, 0.9])
    assert second[0] == (1, pytest.approx(1.0))
    assert len(prompt_metrics.nearest(full(0.0, 1, 2), embeddings, 9)[0]) == 3


def test_the_yardstick_is_how_far_words_are_from_their_nearest_others() -> None:
    line = array([[0], [1], [2], [3], [4]])
    assert prompt_metrics.spacing(line) == pytest.approx(1.0)
    assert prompt_metrics.spacing(full(0.0, 1, 3)) is None
