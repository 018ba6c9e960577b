"""Training images that a selection of rounds holds out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from promptfed.client_service.exits import ClientError
from promptfed.client_service.training.data import held_out
from promptfed.shared.data import open_source

DATA = "symbols:neon?topic=weather&per_class=8&test_per_class=2&partition=iid&clients=2&client={}"


def test_held_out_images_are_training_images_that_are_not_trained_on() -> None:
    source = open_source(DATA.format(0))
    divided = held_out(source, 0.25, 7)

    def digests(split: Any) -> set[str]:
        return {split.digest(row) for row in range(len(split))}

    assert digests(divided.train) | digests(divided.test) == digests(source.train)
    assert not digests(divided.train) & digests(divided.test)
    assert not digests(divided.test) & digests(source.test)
    assert digests(held_out(source, 0.25, 7).test) == digests(divided.test) != digests(held_out(source, 0.25, 8).test)


def test_of_a_class_with_one_image_nothing_is_held_out() -> None:
    source = open_source(DATA.format(0))
    first = [int((source.train.labels == label).nonzero()[0]) for label in range(len(source.class_names))]
    rows = torch.tensor(sorted({*first, *(source.train.labels == 0).nonzero()[:, 0].tolist()}))
    few = held_out(type(source)(**{**vars(source), "train": source.train.select(rows)}), 0.25, 7)
    assert set(few.test.labels.tolist()) == {0}
    assert len(few.train) + len(few.test) == len(rows)


def test_groups_that_cannot_be_divided_end_the_client_before_anything_is_sent() -> None:
    source = open_source(DATA.format(0))
    source.train.groups = ("one patient",) * len(source.train)
    with pytest.raises(ClientError, match=r"no training images can be held out: .*one group"):
        held_out(source, 0.25, 7)
