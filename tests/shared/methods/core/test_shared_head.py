"""A linear head that all clients of a federation share: where it starts, and whose its rows are."""

from __future__ import annotations

import math

import pytest
import torch

from promptfed.shared.methods.core.heads import BIAS, WEIGHT, LinearHead, head_start, shared_classes
from promptfed.shared.methods.core.interface import MethodError
from promptfed.shared.seeds import generator


def test_its_start_is_the_one_of_private_heads_and_its_rows_follow_the_spec() -> None:
    start = head_start(generator, 7, 3, 16)
    assert start[WEIGHT].shape == (3, 16)
    assert float(start[WEIGHT].abs().max()) <= 1 / math.sqrt(16)
    assert torch.equal(start[BIAS], torch.zeros(3))
    head = LinearHead.shared(("sun", "anchor", "tree"), start)
    some = head.among(("tree", "sun"))
    assert torch.equal(some.weight, start[WEIGHT][[2, 0]])


@pytest.mark.parametrize("names", [None, ("sun",), ("a", "b", "c", "d")])
def test_other_classes_than_it_has_rows_are_refused(names: tuple[str, ...] | None) -> None:
    with pytest.raises(MethodError, match="has 3 rows"):
        LinearHead.shared(names, head_start(generator, 7, 3, 16))


def test_without_class_names_in_the_spec_there_is_none() -> None:
    with pytest.raises(MethodError, match="list the federation's class_names in the spec"):
        shared_classes("fedavg", None)
    assert shared_classes("fedavg", ["a", "b"]) == 2
