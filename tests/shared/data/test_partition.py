"""Partitions: disjoint, complete, seeded, and refused where impossible."""

from __future__ import annotations

from itertools import chain, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from promptfed.shared.data import open_source, partition
from promptfed.shared.data.source import DataError

SEEDS = st.integers(0, 10)


def assert_divides(parts: list[torch.Tensor], count: int) -> None:
    together = torch.cat(parts)
    assert len(together) == count
    assert together.sort().values.tolist() == list(range(count))


@given(st.integers(1, 200), st.integers(1, 20), SEEDS)
def test_iid_divides_evenly(count: int, clients: int, seed: int) -> None:
    if clients > count:
        with pytest.raises(DataError, match="fewer clients"):
            partition.iid(count, clients, seed)
        return
    parts = partition.iid(count, clients, seed)
    assert_divides(parts, count)
    sizes = [len(p) for p in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(torch.equal(a, b) for a, b in zip(parts, partition.iid(count, clients, seed), strict=True))


@given(st.integers(1, 120), st.integers(1, 20), SEEDS)
def test_pathological_gives_the_remainder_to_the_last(classes: int, clients: int, seed: int) -> None:
    if clients > classes:
        with pytest.raises(DataError, match="disjoint"):
            partition.pathological(classes, clients, seed)
        return
    parts = partition.pathological(classes, clients, seed)
    assert sorted(chain.from_iterable(parts)) == list(range(classes))
    each = len(parts[0])
    assert [len(p) for p in parts[:-1]] == [each] * (clients - 1) or clients == 1
    nearest = round(classes / clients)
    assert each == nearest if nearest * (clients - 1) < classes or clients == 1 else each == classes // clients
    assert len(parts[-1]) == classes - each * (clients - 1) > 0


FEDPGP_SETS = [
    ("OxfordIIITPet", 37, (2, 1), (4, 1)), ("Flowers102", 102, (5, 6), (10, 12)), ("DTD", 47, (2, 6), (5, 2)),
    ("Caltech101", 100, (5, 5), (10, 10)), ("Food101", 101, (5, 6), (10, 11)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "classes", "base", "whole"), FEDPGP_SETS)
def test_fedpgp_s_sets_of_ten_clients(name: str, classes: int, base: tuple[int, int], whole: tuple[int, int]) -> None:
    """Table 1 divides the base half, Table 3 all classes; rounded down, nine of Pets' clients had one base class."""
    for count, wanted in ((len(partition.halves(classes)[0]), base), (classes, whole)):
        sizes = [len(part) for part in partition.pathological(count, 10, 0)]
        assert (set(sizes[:-1]), sizes[-1]) == ({wanted[0]}, wanted[1]), name


@given(st.integers(1, 120), st.integers(1, 30), SEEDS)
def test_classes_each_gives_every_client_its_number(classes: int, each: int, seed: int) -> None:
    parts = partition.classes_each(classes, each, seed)
    assert sorted(chain.from_iterable(parts)) == list(range(classes))
    assert len(parts) == partition.clients_of(classes, each) == max(1, round(classes / each))
    assert all(len(p) == each for p in parts[:-1])
    assert len(parts) == 1 or each / 2 <= len(parts[-1]) <= 1.5 * each


@pytest.mark.parametrize(("each", "clients"), [(20, 30), (10, 59), (5, 119)])
def test_fedtpg_s_nine_sets_make_the_papers_numbers_of_clients(each: int, clients: int) -> None:
    """Section 4.1 and Table 4; rounded up, 20 classes each made 33 clients, and Pets had too few for one."""
    sizes = {"Caltech101": 100, "Flowers102": 102, "FGVCAircraft": 100, "UCF101": 101, "OxfordPets": 37}
    sizes |= {"Food101": 101, "DTD": 47, "StanfordCars": 196, "SUN397": 397}
    base = {name: len(partition.halves(classes)[0]) for name, classes in sizes.items()}
    assert sum(partition.clients_of(count, each) for count in base.values()) == clients
    if each == 20:
        parts = {name: [len(p) for p in partition.classes_each(count, each, 0)] for name, count in base.items()}
        assert (parts["OxfordPets"], parts["DTD"], parts["Caltech101"]) == ([19], [24], [20, 30])
        assert (parts["Flowers102"], parts["StanfordCars"]) == ([20, 20, 11], [20, 20, 20, 20, 18])


def test_classes_each_refuses_a_number_of_clients_that_does_not_fit() -> None:
    assert len(partition.classes_each(100, 20, 0, clients=5)) == 5
    with pytest.raises(DataError, match="classes_per_client=0 is not at least 1"):
        partition.classes_each(100, 0, 0)
    with pytest.raises(DataError, match="need 5 clients, not 4"):
        partition.classes_each(100, 20, 0, clients=4)


@given(st.integers(8, 12), st.integers(1, 4), st.floats(0.3, 100), SEEDS)
def test_dirichlet_divides_every_split(classes: int, clients: int, alpha: float, seed: int) -> None:
    train = torch.arange(classes).repeat_interleave(20)
    test = torch.arange(classes).repeat_interleave(5)
    parts = partition.dirichlet([train, test], clients, alpha, seed)
    assert_divides(parts[0], len(train))
    assert_divides(parts[1], len(test))
    assert all(len(rows) for part in parts for rows in part)


@pytest.mark.parametrize(
    ("alpha", "clients"), [*product((1.0, 10.0, 100.0, 1e4, 1e9), (2, 6, 40)), *product((0.01, 0.3), (2, 6))]
)
def test_every_alpha_from_one_on_divides_what_iid_divides(alpha: float, clients: int) -> None:
    """Cuts of all classes at the same rounded places left clients without an image, the more so the larger alpha."""
    for classes, each in ((2, 1), (2, 20), (3, 16), (3, 50), (10, 1), (10, 5), (100, 1), (100, 5), (100, 50)):
        labels = torch.arange(classes).repeat_interleave(each)
        if len(labels) < clients:
            with pytest.raises(DataError, match=f"{len(labels)} images cannot be divided over {clients} clients; ask"):
                partition.dirichlet([labels], clients, alpha, 0)
            continue
        try:
            [parts] = partition.dirichlet([labels], clients, alpha, 0)
        except DataError:
            if alpha >= 1:
                raise
            continue
        assert_divides(parts, len(labels))
        sizes = np.array([len(rows) for rows in parts])
        assert sizes.min() > 0
        even = len(labels) / clients
        if alpha >= 1e4:  # what iid gives, but for what rounding and the last of the draws' unevenness leave
            assert np.abs(sizes - even).max() <= 1 + 4 * even / np.sqrt(alpha)
            counts = np.array([torch.bincount(labels[rows], minlength=classes).tolist() for rows in parts])
            assert np.abs(counts - each / clients).max() <= 1 + 4 * each / clients / np.sqrt(alpha) + (even < 1.5)


def test_no_place_among_clients_gets_more_of_few_images() -> None:
    """With one image of each class a rounded cut gave nearly all to the clients in the middle."""
    labels, sizes = torch.arange(60), np.zeros(6)
    for seed in range(60):
        [parts] = partition.dirichlet([labels], 6, 0.5, seed)
        sizes += [len(rows) for rows in parts]
    assert np.abs(sizes / sizes.mean() - 1).max() < 0.2


def test_dirichlet_test_data_follow_the_train_mix() -> None:
    train, test = torch.arange(5).repeat_interleave(400), torch.arange(5).repeat_interleave(100)
    parts = partition.dirichlet([train, test], 4, 0.5, 3)
    for rows, test_rows in zip(*parts, strict=True):
        mix = torch.bincount(train[rows], minlength=5) / 400
        test_mix = torch.bincount(test[test_rows], minlength=5) / 100
        assert (mix - test_mix).abs().max() <= 0.02


def test_a_small_alpha_is_more_uneven_than_a_large_one() -> None:
    labels = torch.arange(10).repeat_interleave(100)

    def largest_share(alpha: float) -> float:
        parts = partition.dirichlet([labels], 5, alpha, 0)[0]
        return max(torch.bincount(labels[rows], minlength=10).max().item() for rows in parts) / 100

    assert largest_share(0.1) > 0.8
    assert largest_share(1000.0) < 0.3


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan")])
def test_dirichlet_refuses_alpha(alpha: float) -> None:
    with pytest.raises(DataError, match="alpha"):
        partition.dirichlet([torch.tensor([0, 1])], 1, alpha, 0)


def test_what_cannot_be_divided_is_named() -> None:
    for kind in ("iid", "dirichlet"):
        with pytest.raises(DataError, match="1 test image cannot be divided over 2 clients; ask for fewer"):
            uri = f"symbols:sketch?only=sun&per_class=4&test_per_class=1&partition={kind}&clients=2&client=0"
            open_source(uri)
    with pytest.raises(DataError, match="class sun has one image"):
        open_source("symbols:sketch?only=sun&per_class=1&test_per_class=1&validation=0.5")


@given(st.integers(2, 101))
def test_halves_by_label_order(count: int) -> None:
    base, novel = partition.halves(count)
    assert [*base, *novel] == list(range(count))
    assert len(base) - len(novel) in (0, 1)


def test_halves_refuses_one_class() -> None:
    with pytest.raises(DataError, match="base and novel"):
        partition.halves(1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 8), SEEDS)
def test_few_shot_takes_so_many_of_each_class(labels: list[int], shots: int, seed: int) -> None:
    target = torch.tensor(labels)
    rows = partition.few_shot(target, shots, seed)
    assert len(rows.unique()) == len(rows)
    for label in set(labels):
        assert int((target[rows] == label).sum()) == min(shots, labels.count(label))


@given(st.lists(st.integers(2, 20), min_size=1, max_size=6), SEEDS)
def test_train_test_divides_each_class(counts: list[int], seed: int) -> None:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    train, test = partition.train_test(labels, seed)
    assert_divides([train, test], len(labels))
    for label, count in enumerate(counts):
        inside = int((labels[test] == label).sum())
        assert 1 <= inside < count
        assert abs(inside - 0.2 * count) <= 1


def test_another_seed_is_another_division() -> None:
    assert not torch.equal(partition.iid(50, 2, 0)[0], partition.iid(50, 2, 1)[0])
    assert partition.pathological(50, 5, 0) != partition.pathological(50, 5, 1)


@given(st.integers(0, 1000))
def test_another_seed_draws_other_dirichlet_shares(seed: int) -> None:
    labels = torch.arange(10).repeat_interleave(50)

    def mix(seed: int) -> list[list[int]]:
        [parts] = partition.dirichlet([labels], 4, 0.5, seed)
        return [torch.bincount(labels[rows], minlength=10).tolist() for rows in parts]

    assert mix(seed) == mix(seed)
    assert mix(seed) != mix(seed + 1)


def test_turns_of_a_split_test_on_every_image_once() -> None:
    labels = torch.arange(5).repeat_interleave(8)
    tested = [partition.train_test(labels, 3, 0.25, turn) for turn in range(4)]
    assert sorted(torch.cat([test for _, test in tested]).tolist()) == list(range(40))
    assert all(sorted([*train.tolist(), *test.tolist()]) == list(range(40)) for train, test in tested)
    groups = [f"p{row // 2}" for row in range(40)]
    held_out = [partition.whole_groups(groups, labels, 3, "folder:x", 0.25, turn)[1] for turn in range(4)]
    assert sorted(torch.cat(held_out).tolist()) == list(range(40))
    for option, known in (("", 0), ("&validation_seed=0", 0), ("&validation_seed=2", 2)):
        source = open_source(f"symbols:neon?topic=weather&per_class=8&validation=0.25{option}")
        whole = open_source("symbols:neon?topic=weather&per_class=8").train.labels
        assert source.test.labels.tolist() == whole[partition.train_test(whole, 0, 0.25, known)[1]].tolist()


def test_a_group_has_its_most_frequent_class() -> None:
    classes, members = partition.grouped(["b", "a", "b", "b"], torch.tensor([0, 2, 1, 1]))
    assert (classes.tolist(), [rows.tolist() for rows in members]) == ([1, 2], [[0, 2, 3], [1]])


@pytest.mark.parametrize(("share", "tested"), [(0.1, 1), (0.5, 2), (0.9, 3), (1.0, 3)])
def test_both_parts_keep_one_of_few(share: float, tested: int) -> None:
    groups, labels = ["a", "b", "c", "d"], torch.zeros(4, dtype=torch.int64)
    for train, test in (partition.whole_groups(groups, labels, 0, "x:", share), partition.train_test(labels, 0, share)):
        assert (len(train), len(test)) == (4 - tested, tested)
    with pytest.raises(DataError, match="all images of 1 of the classes are of groups that are tested on"):
        partition.whole_groups(groups, torch.tensor([0, 1, 0, 0]), 0, "x:", 0.9)
    with pytest.raises(DataError, match="one group cannot be both"):
        partition.whole_groups(["a"] * 4, labels, 0, "x:")


# The training and the test rows of three clients: published figures are of such parts.
DRAWN = {
    0.3: [[[12, 14, 15, 16], [2, 6, 7, 8, 9, 10, 11, 13, 17], [0, 1, 3, 4, 5]], [[6, 8], [0, 3, 4, 5, 7], [1, 2]]],
    2.0: [[[0, 1, 2, 6, 7, 9, 10], [3, 4, 5, 12, 16], [8, 11, 13, 14, 15, 17]], [[0, 2, 3, 6], [1, 5], [4, 7, 8]]],
}


@pytest.mark.parametrize("alpha", DRAWN)
def test_drawn_shares_stay_the_same(alpha: float) -> None:
    labels = torch.arange(3).repeat_interleave(6)
    found = partition.dirichlet([labels, labels[::2]], 3, alpha, 5)
    assert [[rows.tolist() for rows in part] for part in found] == DRAWN[alpha]


@pytest.mark.parametrize(("classes", "each", "shares", "alpha", "sizes"), [
    (6, 11, (0.49, 0.51), 0.5, [30, 36]), (10, 11, (0.49, 0.51), 0.5, [54, 56]), (6, 11, (0.49, 0.51), 1.0, [32, 34]),
    (6, 3, (0.45, 0.55), 0.5, [6, 12]), (6, 3, (0.45, 0.55), 1.0, [8, 10]), (6, 1, (0.45, 0.55), 0.5, [3, 3]),
    (1, 3, (0.2, 0.8), 0.5, [1, 2]), (12, 10, (0.434, 0.566), 0.5, [48, 72]), (6, 1, (0.2, 0.8), 0.5, [0, 6]),
    (3, 1, (0.45, 0.55), 0.5, [1, 2]), (2, 2, (0.25, 0.75), 0.5, [0, 4]), (6, 2, (0.375, 0.25, 0.375), 0.5, [5, 3, 4]),
    (6, 1, (0.3, 0.69, 0.01), 0.5, [2, 4, 0]), (6, 1, (0.3, 0.69, 0.01), 1.0, [2, 3, 1]),
])  # fmt: skip
def test_cuts_are_rounded_in_each_class_where_that_is_fair(
    classes: int, each: int, shares: tuple[float, ...], alpha: float, sizes: list[int]
) -> None:
    """Rounding may move a client by 3·√(C/6) images or one, but by no more than half of an even part."""
    labels = torch.arange(classes).repeat_interleave(each)
    parts = partition._by_shares(labels, np.tile(shares, (classes, 1)), 0, 0, alpha)
    assert [len(rows) for rows in parts] == sizes


@pytest.mark.parametrize(("shares", "sizes", "counts"), [
    ([(0.55, 0.44, 0.01), (0.495, 0.504, 0.001)], (1, 10), [[0, 0, 1], [5, 5, 0]]),
    ([(0.46, 0.37, 0.16, 0.01)] * 2, (0, 5), [[0] * 4, [1, 2, 1, 1]]),  # of the first class there is none to give
])  # fmt: skip
def test_who_has_most_gives_of_the_class_furthest_above_its_share(shares: Any, sizes: Any, counts: Any) -> None:
    assert partition._evenly(np.array(shares), np.array(sizes), True).tolist() == counts


def test_every_class_of_any_split_has_shares_and_an_endless_alpha_shares_evenly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes, divide = set(), partition._by_shares
    monkeypatch.setattr(partition, "_by_shares", lambda *given: shapes.add(given[1].shape) or divide(*given))
    for splits in ([torch.arange(3), torch.zeros(3)], [torch.zeros(3), torch.arange(3)]):
        parts = partition.dirichlet([labels.long() for labels in splits], 2, float("inf"), 0)
        assert [sorted(map(len, part)) for part in parts] == [[1, 2]] * 2
    assert shapes == {(3, 2)}


def test_two_images_of_several_labels_are_divided_and_a_single_one_is_trained_on() -> None:
    train, test = partition.train_test(torch.tensor([[1, 0], [1, 0], [0, 1]]), 0)
    assert (len(train), 2 in train.tolist(), len(test)) == (2, True, 1)
