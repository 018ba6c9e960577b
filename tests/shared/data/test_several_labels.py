"""Sources with several labels per image: drawn scenes, tables and data sets of the Hugging Face library."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from promptfed.shared.data import DataError, open_source
from promptfed.shared.data.partition import class_counts, strata
from promptfed.shared.data.sharing import SharedSources
from promptfed.shared.data.sheet import contact_sheet

SCENES = "emoji-scenes:flat?count=300&test_count=60"


def refused(uri: str) -> str:
    with pytest.raises(DataError) as error:
        open_source(uri)
    return " ".join(error.value.problems)


def test_scenes_show_one_to_five_kinds_and_follow_from_their_seed() -> None:
    scenes, again = open_source(SCENES), open_source(SCENES)
    assert scenes.train.labels.dtype == torch.int8
    assert scenes.train.labels.shape == (300, 11)
    assert set(scenes.train.labels.sum(1).tolist()) == {1, 2, 3, 4, 5}
    assert scenes.train.digest(7) == again.train.digest(7)
    assert torch.equal(scenes.test.labels, again.test.labels)
    assert open_source(SCENES + "&seed=1").train.digest(7) != scenes.train.digest(7)
    assert open_source("emoji-scenes:noto?count=300").train.digest(7) != scenes.train.digest(7)
    assert scenes.train.digest(7) != scenes.test.digest(7)
    seen = open_source(SCENES + "&purpose=train").test
    assert torch.equal(seen.labels, scenes.test.labels)
    assert seen.digest(3) != scenes.test.digest(3)
    pixels = np.asarray(scenes.train.image(0), dtype=float)
    assert pixels.shape == (64, 64, 3)
    assert np.abs(np.diff(pixels[:3], axis=1)).mean() > 5, "noise"
    assert contact_sheet(scenes.train, scenes.class_names, 8).width > 400


def test_a_tail_of_scenes_is_drawn() -> None:
    tailed = open_source("emoji-scenes:flat?count=6000&tail=100")
    counts = class_counts(tailed.train.labels, 11)
    assert counts[0] > counts[3] > counts[6] > counts[10]
    # A scene shows no kind twice, so that common kinds are drawn less often than alone.
    assert 30 < counts[0] / counts[10] < 130
    balanced = class_counts(tailed.test.labels, 11)
    assert max(balanced) < 1.5 * min(balanced)
    assert "tail=0.5 is less than 1" in refused(SCENES + "&tail=0.5")


def test_hidden_labels_are_unknown_in_training_alone() -> None:
    whole, hidden = open_source(SCENES), open_source(SCENES + "&hide=0.8")
    known = hidden.train.labels >= 0
    assert int((~known).sum()) == round(0.8 * 300 * 11)
    assert torch.equal(hidden.train.labels[known], whole.train.labels[known])
    assert torch.equal(hidden.test.labels, whole.test.labels)
    assert "hide=1 is not between 0 and 1" in refused(SCENES + "&hide=1")
    assert "hide is for several labels per image" in refused("digits?hide=0.5")


def test_images_are_divided_by_their_rarest_class() -> None:
    labels = torch.tensor([[1, 1, 0], [1, 0, 0], [1, -1, 1], [0, 0, 0], [1, 1, -1]], dtype=torch.int8)
    assert strata(labels).tolist() == [1, 0, 2, 3, 1]
    assert class_counts(labels, 3) == [4, 2, 1]
    parts = [open_source(f"{SCENES}&partition=dirichlet&alpha=0.3&clients=3&client={k}") for k in range(3)]
    assert sum(len(part.train) for part in parts) == 300
    assert sum(len(part.test) for part in parts) == 60
    digests = [part.train.digest(row) for part in parts for row in range(len(part.train))]
    assert len(set(digests)) == 300
    held = open_source(SCENES + "&validation=0.25")
    assert len(held.train) + len(held.test) == 300
    assert min(class_counts(held.test.labels, 11)) > 0
    shots = open_source(SCENES + "&shots=4")
    assert max(torch.bincount(strata(open_source(SCENES).train.labels)).tolist()) > 4
    assert len(shots.train) == 44


def test_classes_left_out_leave_their_images() -> None:
    part = open_source(SCENES + "&only=mammal,fruit")
    assert part.class_names == ("fruit", "mammal")
    assert part.train.labels.shape == (300, 2)
    whole = open_source(SCENES)
    assert torch.equal(part.train.labels, whole.train.labels[:, [5, 7]])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("flip=0.4", "flip is for one label per image"),
        ("classes=novel&among=base", "among is for one label per image"),
        ("partition=pathological&clients=2&client=0", "partition=pathological is for one label per image"),
        ("unlabelled=true", "leave unknown ones empty"),
        ("seed=-1", "seed=-1 is less than 0"),
        ("purpose=all", "choose one of test, train"),
    ],
)
def test_options_that_need_one_label_are_refused(options: str, text: str) -> None:
    assert text in refused(f"{SCENES}&{options}")


def test_clients_in_one_process_draw_the_same_scenes() -> None:
    shared = SharedSources()
    for uri in (f"{SCENES}&tail=10", f"{SCENES}&tail=100&partition=iid&clients=2&client=1"):
        own, alone = shared.open(uri), open_source(uri)
        assert torch.equal(own.train.labels, alone.train.labels)
        assert own.train.digest(0) == alone.train.digest(0)


def test_without_labels_no_training_label_is_read() -> None:
    whole, unlabelled = open_source("digits?shots=3"), open_source("digits?shots=3&unlabelled=true")
    assert unlabelled.unlabelled
    assert not whole.unlabelled
    assert unlabelled.train.labels.tolist() == [-1] * 30
    assert torch.equal(unlabelled.test.labels, whole.test.labels)
    assert unlabelled.class_names == whole.class_names
