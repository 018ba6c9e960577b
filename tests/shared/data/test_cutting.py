"""What the options common to all sources cut from one, on a few images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image

from promptfed.shared.data import DataError, Source
from promptfed.shared.data.cutting import apply_common, divided, kept_names, only
from promptfed.shared.data.options import SymbolsOptions
from promptfed.shared.data.partition import train_test
from promptfed.shared.data.source import Split

NAMES, COUNTS = ["bird", "cat", "zebra"], {"bird": 3, "zebra": 2}


def options(**given: object) -> SymbolsOptions:
    return SymbolsOptions.model_validate({"uri": "symbols:neon"} | given)


@pytest.mark.parametrize(("only", "least", "kept"), [
    (None, None, NAMES), ("zebra,bird", None, ["bird", "zebra"]), (None, 1, ["bird", "zebra"]),
    (None, 2, ["bird", "zebra"]), (None, 3, ["bird"]), ("zebra,cat", 2, ["zebra"]),
])  # fmt: skip
def test_classes_are_kept_in_their_order(only: str | None, least: int | None, kept: list[str]) -> None:
    given = {"only": only, "min_per_class": least}
    assert kept_names(NAMES, COUNTS, options(**{key: one for key, one in given.items() if one is not None})) == kept


@pytest.mark.parametrize(("only", "least", "words"), [
    (None, 4, "min_per_class=4 leaves no class; the largest has 3 images"),
    ("cat", 1, "min_per_class=1 leaves no class"),
    ("bird,cow", None, "only= names the class 'cow', which is not one of its classes"),
    ("birds,zebras", None, "the class 'birds', .*; nearest: 'bird' to 'birds'; known"),
])  # fmt: skip
def test_no_class_is_refused(only: str | None, least: int | None, words: str) -> None:
    given = {"only": only, "min_per_class": least}
    with pytest.raises(DataError, match=words):
        kept_names(NAMES, COUNTS, options(**{key: one for key, one in given.items() if one is not None}))


def test_without_a_choice_nothing_is_cut() -> None:
    assert only(FEW, options()) is FEW


def test_without_images_the_largest_has_none() -> None:
    with pytest.raises(DataError, match="the largest has 0 images"):
        kept_names(NAMES, {}, options(min_per_class=1))


def source(train: list[Any], test: list[Any], names: str = "abc", groups: str | None = None) -> Source:
    """Images whose shade is their row, 100 and more in the tests; ``groups``: a letter each, of both parts."""

    def part(labels: list[Any], first: int, own: str | None) -> Split:
        given = torch.tensor(labels, dtype=torch.int8 if labels and isinstance(labels[0], list) else torch.long)
        return Split(given, lambda row: Image.new("RGB", (1, 1), (first + row,) * 3), own and list(own))

    own = (groups or "")[: len(train)] or None, (groups or "")[len(train) :] or None
    return Source("x:", tuple(names), None, "a {}", part(train, 0, own[0]), part(test, 100, own[1]))


def cut(given: Source, role: str, query: dict[str, Any], known: Any = None) -> tuple[Any, ...]:
    """Class names, and the shade and the label of each image of train and test."""
    options = SymbolsOptions.model_validate({"uri": "x:", "role": role} | query)
    found = apply_common(given, options, known)
    parts = [
        [(part.image(row).getpixel((0, 0))[0], part.labels[row].tolist()) for row in range(len(part))]
        for part in (found.train, found.test)
    ]
    return "".join(found.class_names), *parts


FEW = source([0, 1, 2, 0, 1, 2, 0, 1], [0, 1, 2])
AB = [(0, 0), (1, 1), (3, 0), (4, 1), (6, 0), (7, 1)]
DIVIDED = {"partition": "pathological", "clients": 3}
SEVERAL = source([[1, 0, 0], [1, 1, 0], [0, 0, -1]], [[0, 0, 1]])


@pytest.mark.parametrize(("given", "role", "query", "names", "train", "test"), [
    (FEW, "trainer", {"classes": "base"}, "ab", AB, [(100, 0), (101, 1)]),
    (FEW, "trainer", {"classes": "novel"}, "c", [(2, 0), (5, 0)], [(102, 0)]),
    (FEW, "trainer", {"min_per_class": 4}, "ab", AB, [(100, 0), (101, 1)]),
    (FEW, "evaluator", {"test_on": "all", "only": "c"}, "c", [(2, 0), (5, 0)], [(102, 0), (2, 0), (5, 0)]),
    (FEW, "tests", {"test_on": "test", "only": "c"}, "c", [(2, 0), (5, 0)], [(102, 0)]),
    (SEVERAL, "trainer", {"only": "c,a"}, "ac", [(0, [1, 0]), (1, [1, 0]), (2, [0, -1])], [(100, [0, 1])]),
])  # fmt: skip
def test_classes_and_tests_are_cut(
    given: Source, role: str, query: dict[str, Any], names: str, train: Any, test: Any
) -> None:
    assert cut(given, role, query) == (names, train, test)


@pytest.mark.parametrize(
    ("given", "role", "query", "says"),
    [
        (FEW, "trainer", {"validation_seed": 0}, "validation_seed needs validation="),
        (source([], [0, 1]), "trainer", {"validation": 0.5}, "holds out training images, and there are none"),
        (FEW, "trainer", {"test_on": "all"}, "test_on=all would test a trainer on its training images"),
        (FEW, "evaluator", {"test_on": "all", "validation": 0.5}, "which validation= keeps out of sight"),
        (FEW, "trainer", {"template": "no place"}, "must hold '{}' exactly once"),
        (FEW, "trainer", {"template": "{} {}"}, "must hold '{}' exactly once"),
        *[(FEW, "trainer", {name: 1}, f"{name} needs partition=iid, dirichlet or pathological")
          for name in ("alpha", "clients", "client", "classes_per_client", "partition_seed")],
        (FEW, "trainer", {"partition": "iid", "clients": 2}, "partition=iid needs client=0 to 1"),
        (FEW, "trainer", {"partition": "iid", "clients": 2, "client": 2}, "client=2 is not one of the 2 clients"),
        (FEW, "trainer", {"partition": "iid", "client": 0}, "partition=iid needs clients=, the number of clients"),
        (FEW, "trainer", {"partition": "iid", "clients": 2, "classes_per_client": 1}, "classes_per_client is for"),
        (FEW, "trainer", {"partition": "iid", "clients": 2, "alpha": 1}, "alpha is for partition=dirichlet"),
        (FEW, "trainer", {"partition": "pathological", "clients": 2, "alpha": 1}, "alpha is for partition=dirichlet"),
        (SEVERAL, "trainer", {"partition": "pathological", "clients": 2}, "is for one label per image"),
        (source([0, 1, 2], [0], groups="xyxz"), "trainer", DIVIDED, "would divide a group"),
        (source([0], [0, 1, 2], groups="xyzy"), "trainer", DIVIDED, "would divide a group"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(given: Source, role: str, query: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as caught:
        cut(given, role, query)
    assert says in str(caught.value)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "pathological"])
@pytest.mark.parametrize("groups", [None, "pqrpqrpqstu"])
def test_every_image_has_one_client_and_a_group_stays_whole(kind: str, groups: str | None) -> None:
    whole, known = source([0, 1, 2, 0, 1, 2, 0, 1], [0, 1, 2], groups=groups), {}
    options = {"partition": kind, "clients": 3} | ({"alpha": 2.0} if kind == "dirichlet" else {})
    parts = [cut(whole, "trainer", options | {"client": client}, known) for client in range(3)]
    assert len(known) == 1
    for side, shades in ((1, [*range(8)]), (2, [100, 101, 102])):
        assert sorted(shade for part in parts for shade, _ in part[side]) == shades
    own = [{(groups or "")[shade] for shade, _ in part[1]} for part in parts] if groups else []
    assert sum(map(len, own)) == len(set().union(*own))
    if kind == "pathological":
        assert sorted(part[0] for part in parts) == ["a", "b", "c"]
        assert all(label == 0 for part in parts for _, label in part[1])


@pytest.mark.parametrize(("kind", "even"), [("iid", True), ("dirichlet", False)])
def test_equal_parts_are_of_iid_alone(kind: str, even: bool) -> None:
    whole = source([0, 1] * 15, [0, 1] * 15)
    parts = [cut(whole, "trainer", {"partition": kind, "clients": 3, "client": client}) for client in range(3)]
    assert ([[len(side) for side in part[1:]] for part in parts] == [[10, 10]] * 3) is even


def test_an_evaluators_images_alone_are_divided_too() -> None:
    for whole, side in ((source([], [0, 1, 0, 1]), 2), (source([0, 1, 0, 1], []), 1)):
        parts = [cut(whole, "evaluator", {"partition": "iid", "clients": 2, "client": k}) for k in range(2)]
        assert [len(part[side]) for part in parts] == [2, 2]
        assert [len(part[3 - side]) for part in parts] == [0, 0]


@pytest.mark.parametrize(("splits", "groups", "query", "parts"), [
    (["test", "train", "train"], None, {}, ([1, 2], [0])), (["test", "train", "train"], "xyy", {}, ([1, 2], [0])),
    (["test", "train", "train"], "xyx", {}, "the group x has images in train and in test"),
    (["test", "train", "train"], "xyx", {"role": "evaluator"}, ([], [0, 1, 2])),
    (["test", "train", "train"], "xyx", {"names_only": True}, ([0, 1, 2], [0, 1, 2])),
    (["test", "train", "train"], None, {"role": "evaluator", "test_on": "test"}, ([1, 2], [0])),
    ([None], "x", {}, "one group cannot be both"), ([None], None, {}, "class a has one image"),
    (["test"] * 8 + ["train"] * 8, "hgfedcba" * 2, {}, "the group a has images in train and in test"),
])  # fmt: skip
def test_images_are_divided_by_their_splits(splits: list[str], groups: str, query: Any, parts: Any) -> None:
    whole, options = (
        source([0] * len(splits), [], groups=groups).train,
        SymbolsOptions.model_validate({"uri": "x:"} | query),
    )
    if isinstance(parts, str):
        with pytest.raises(DataError, match=parts):
            divided(whole, splits, ("a",), None, "a {}", options)
        return
    found = divided(whole, splits, ("a",), None, "a {}", options, ("left",))
    assert tuple(part._rows.tolist() for part in (found.train, found.test)) == parts
    assert (found.uri, found.class_names, found.template, found.left_out) == ("x:", ("a",), "a {}", ("left",))


@pytest.mark.parametrize(
    ("share", "seed", "drawn", "turn"),
    [(0.25, None, 0, 0), (0.9, 1, 1, 0), (0.5, 1, 0, 1), (0.5, 2, 1, 0), (0.25, 7, 1, 3), (0.4, 1, 0, 1)],
)
def test_turns_go_round_before_another_order(share: float, seed: int | None, drawn: int, turn: int) -> None:
    labels = [0, 1] * 10
    given = {} if seed is None else {"validation_seed": seed}
    found = cut(source(labels, [0]), "trainer", {"validation": share} | given)
    _, held_out = train_test(torch.tensor(labels), drawn, share, turn)
    assert [shade for shade, _ in found[2]] == held_out.tolist()
