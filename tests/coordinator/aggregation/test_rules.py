"""Robust rules: each against its literal version, what it withstands, and what must not change it."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from math import sqrt
from statistics import fmean, median
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from promptfed.coordinator.aggregation import rows as matrices
from promptfed.coordinator.aggregation import rules
from promptfed.coordinator.aggregation.rules import Rows, Rule, weighted_mean
from promptfed.shared.methods.core.interface import ClientUpdate
from promptfed.shared.spec.sections import AggregationSpec
from promptfed.shared.spec.weighting import shares
from promptfed.shared.tensors import CHUNK, Tensors
from tests.support import literal_rules as literal

ROBUST = ("median", "trimmed_mean", "krum", "multi_krum")


SHAPES = {"b": (3, 2), "a": (4,)}


BASE = {"a": torch.tensor([1.0, -2.0, 0.5, 3.0]), "b": torch.arange(6.0).reshape(3, 2) / 7}


def rule_of(base: Tensors | None = None, **given: Any) -> Rule:
    return Rule(AggregationSpec.model_validate(given), base or {})


def updates_of(vectors: list[list[float]], weights: list[float] | None = None) -> list[ClientUpdate]:
    """Each vector of 10 as tensors a (4,) and b (3, 2): a comes first in order of name."""
    weights = weights or [1 / len(vectors)] * len(vectors)
    return [
        ClientUpdate(f"c{i:03d}", weight, {"b": torch.tensor(v[4:]).reshape(3, 2), "a": torch.tensor(v[:4])})
        for i, (v, weight) in enumerate(zip(vectors, weights, strict=True))
    ]


def flat(tensors: Tensors) -> list[float]:
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SHAPES
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    return [*tensors["a"].tolist(), *tensors["b"].reshape(-1).tolist()]


def is_close(found: list[float], wanted: list[float]) -> None:
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5 * max(1.0, *map(abs, wanted)))


def some(seed: int, count: int, size: int = 10) -> list[list[float]]:
    draws = random.Random(seed)
    vectors = [[draws.gauss(0, 1) for _ in range(size)] for _ in range(count)]
    # As the wire has them.
    return [torch.tensor(vector).tolist() for vector in vectors]


def some_weights(seed: int, count: int) -> list[float]:
    draws = random.Random(1000 + seed)
    found = [draws.choice([1, 2, 3, 7]) for _ in range(count)]
    return [weight / sum(found) for weight in found]


cases = pytest.mark.parametrize(("seed", "count"), list(enumerate([1, 2, 3, 4, 5, 7, 8, 10, 11, 15, 20])))


@cases
@pytest.mark.parametrize("weighted", [False, True])
def test_the_median_is_that_of_each_coordinate(seed: int, count: int, weighted: bool) -> None:
    vectors, weights = some(seed, count), some_weights(seed, count) if weighted else [1 / count] * count
    found = flat(rule_of(rule="median")(updates_of(vectors, weights)))
    is_close(found, [literal.weighted_median(list(column), weights) for column in zip(*vectors, strict=True)])
    if not weighted:
        is_close(found, [median(column) for column in zip(*vectors, strict=True)])


@cases
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("cut", [0.1, 0.2, 0.3, 0.45])
def test_the_trimmed_mean_cuts_both_ends_of_each_coordinate(seed: int, count: int, weighted: bool, cut: float) -> None:
    vectors, weights = some(seed, count), some_weights(seed, count) if weighted else [1 / count] * count
    found = flat(rule_of(rule="trimmed_mean", tolerate=cut)(updates_of(vectors, weights)))
    is_close(found, [literal.trimmed_mean(list(column), weights, cut) for column in zip(*vectors, strict=True)])
    each_side = round(cut * count)
    if not weighted and abs(each_side - cut * count) < 1e-9:
        is_close(found, [literal.plain_trimmed_mean(list(column), each_side) for column in zip(*vectors, strict=True)])


@pytest.mark.parametrize(
    ("count", "tolerate", "faulty"),
    [(5, 0.2, 1), (10, 0.2, 2), (10, 0.3, 3), (13, 0.29, 3), (20, 0.4, 8), (100, 0.29, 29)],
)
def test_krum_takes_the_update_with_the_nearest_neighbours(count: int, tolerate: float, faulty: int) -> None:
    vectors = some(count, count)
    rule = rule_of(rule="krum", tolerate=tolerate)
    wanted = literal.krum(vectors, faulty)
    is_close(flat(rule(updates_of(vectors))), wanted)
    taken = f"c{vectors.index(wanted):03d}"
    assert {name: one.verdict for name, one in rule.judged.items() if name == taken} == {taken: "counted"}
    assert {one.verdict for name, one in rule.judged.items() if name != taken} == {"rejected"}
    several = rule_of(rule="multi_krum", tolerate=tolerate)
    is_close(flat(several(updates_of(vectors))), literal.multi_krum(vectors, faulty))
    assert [one.verdict for one in several.judged.values()].count("counted") == count - faulty - 2


@pytest.mark.parametrize("rule", ["mean", *ROBUST])
@pytest.mark.parametrize("most", [0.5, 2.0, "median", 1e9])
def test_clipping_shortens_updates_from_where_their_clients_began(rule: str, most: float | str) -> None:
    moved = [[x * 3**i for x in vector] for i, vector in enumerate(some(3, 7))]
    start = flat({name: BASE[name] for name in SHAPES})
    sent = [torch.tensor([s + x for s, x in zip(start, vector, strict=True)]).tolist() for vector in moved]
    moved = [[x - s for s, x in zip(start, vector, strict=True)] for vector in sent]
    limit = median(sqrt(sum(x * x for x in vector)) for vector in moved) if most == "median" else float(most)
    clipped = [literal.clip(vector, limit) for vector in moved]
    by_hand = [[s + x for s, x in zip(start, vector, strict=True)] for vector in clipped]
    found = rule_of(BASE, rule=rule, clip_norm=most)
    aggregate = flat(found(updates_of(sent)))
    if rule == "mean":
        is_close(aggregate, [fmean(column) for column in zip(*by_hand, strict=True)])
        shorter = {f"c{i:03d}" for i, v in enumerate(moved) if v != clipped[i]}
        assert {name for name, one in found.judged.items() if one.verdict == "clipped"} == shorter
    else:
        is_close(aggregate, flat(rule_of(rule=rule)(updates_of(by_hand))))


def test_who_is_shortened_and_who_is_left_out_is_told() -> None:
    lengths = [1.0, 2.0, 4.0, 2.5]  # below the clip, at it, above it
    updates = [ClientUpdate(f"c{i}", 0.25, {"x": torch.tensor([length, 0.0])}) for i, length in enumerate(lengths)]
    found = rule_of(rule="mean", clip_norm=2)
    assert float(found(updates)["x"][0]) == pytest.approx((1 + 2 + 2 + 2) / 4)
    told = {name: (one.verdict, one.influence) for name, one in found.judged.items()}
    assert told == {"c0": ("counted", 0.25), "c1": ("counted", 0.25), "c2": ("clipped", 0.25), "c3": ("clipped", 0.25)}
    nearest = rule_of(rule="krum", tolerate=0.2, clip_norm=2)
    nearest(updates)
    assert [one.verdict for one in nearest.judged.values()] == ["rejected", "counted", "rejected", "rejected"]
    assert [one.influence for one in nearest.judged.values()] == [0, 1, 0, 0]
    one_of_three = rule_of(rule="multi_krum", tolerate=0.2)
    one_of_three(updates[:3])
    assert [one.influence for one in one_of_three.judged.values()] == [1, 0, 0], "of equals the first"


def test_clipping_begins_at_zero_where_the_state_has_no_such_tensor() -> None:
    far = [ClientUpdate("a", 1.0, {"delta": torch.tensor([3.0, 4.0])})]
    assert torch.allclose(rule_of(BASE, clip_norm=1)(far)["delta"], torch.tensor([0.6, 0.8]))
    other_size = {"delta": torch.ones(3)}
    assert torch.allclose(rule_of(other_size, clip_norm=1)(far)["delta"], torch.tensor([0.6, 0.8]))


def test_large_updates_are_taken_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = some(1, 10)
    clipped = list(rules.RULES)
    whole = {rule: flat(rule_of(BASE, rule=rule, clip_norm="median")(updates_of(vectors))) for rule in clipped}
    monkeypatch.setattr(matrices, "BLOCK", 30)
    for rule, wanted in whole.items():
        is_close(flat(rule_of(BASE, rule=rule, clip_norm="median")(updates_of(vectors))), wanted)


def attacks() -> dict[str, Callable[[Tensor, int], Tensor]]:
    draws = torch.Generator().manual_seed(5)
    same = torch.randn(60, generator=draws)
    return {
        "sign flip": lambda good, i: -10 * good,
        "scaled": lambda good, i: 1e6 * good,
        "noise": lambda good, i: 1e3 * torch.randn(60, generator=torch.Generator().manual_seed(i)),
        "the same": lambda good, i: 1e4 * same,
        "largest": lambda good, i: torch.full((60,), 3.4e38),
        "smallest": lambda good, i: torch.full((60,), -3.4e38),
    }


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("attack", attacks())
def test_as_many_bad_updates_as_are_tolerated_cannot_lead_away(rule: str, attack: str) -> None:
    draws = torch.Generator().manual_seed(1)
    good = 1 + 0.1 * torch.randn(20, 60, generator=draws)
    centre, spread = good.mean(0), float((good - good.mean(0)).norm(dim=1).max())
    # krum and its like 6 of 20, at the ends of the names and among them; the median 9 of 20.
    bad = set(range(9)) if rule == "median" else {0, 3, 7, 11, 18, 19}
    given = {} if rule == "median" else {"tolerate": 0.3}
    poison = attacks()[attack]
    sent = torch.stack([poison(row, i) if i in bad else row for i, row in enumerate(good)])
    updates = [ClientUpdate(f"c{i:02d}", 1 / 20, {"x": row}) for i, row in enumerate(sent)]
    found = rule_of(rule=rule, **given)
    away = float((found(iter(updates))["x"] - centre).norm())
    assert away <= 3 * spread
    assert float((weighted_mean(iter(updates))["x"] - centre).norm()) > 20 * spread
    influence = {name: one.influence for name, one in found.judged.items()}
    assert sum(influence.values()) == pytest.approx(1)
    farthest = sorted(found.judged, key=lambda name: -found.judged[name].distance)[: len(bad)]
    assert set(farthest) == {f"c{i:02d}" for i in bad}, "the distances tell who was bad"


@pytest.mark.parametrize("rule", ["mean", *ROBUST])
def test_one_update_or_the_same_ones_are_their_own_aggregate(rule: str) -> None:
    [one] = some(9, 1)
    assert flat(rule_of(BASE, rule=rule)(updates_of([one]))) == pytest.approx(one, abs=1e-6)
    assert flat(rule_of(BASE, rule=rule)(updates_of([one] * 4))) == pytest.approx(one, abs=1e-6)


@pytest.mark.parametrize("rule", ["mean", *ROBUST])
def test_the_same_updates_come_to_the_same_bytes(rule: str) -> None:
    first, again = (rule_of(BASE, rule=rule, clip_norm="median")(updates_of(some(6, 12))) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in SHAPES)


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6, 0.0])
@pytest.mark.parametrize(("block", "scale"), [(None, 1.0), (64, 1.0), (None, 1e6), (64, 1e-6)])
def test_distances_are_those_of_differences(
    spread: float, block: int | None, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if block is not None:
        monkeypatch.setattr(matrices, "BLOCK", block)
    draws = torch.Generator().manual_seed(3)
    sent = torch.randn(50, generator=draws) + spread * torch.randn(12, 50, generator=draws)
    sent[3] = sent[7]
    sent[5] *= 1e6
    sent *= scale
    updates = [ClientUpdate(f"{i}", 1.0, {"x": row}) for i, row in enumerate(sent)]
    found = matrices.squared_distances(Rows(updates, {}, None))
    exact = (sent.double()[:, None] - sent.double()).square().sum(2)
    assert torch.equal(found, found.T)
    assert found[3, 7] == 0
    assert torch.allclose(found, exact, rtol=1e-9, atol=0)


def test_no_update_has_no_aggregate() -> None:
    with pytest.raises(ValueError, match="no update"):
        rule_of(rule="median")([])


def test_multi_krum_takes_those_it_has_chosen_alike_where_none_has_a_weight() -> None:
    near, far = [[0.1 * number] * 10 for number in range(4)], [[100.0] * 10]
    found = flat(rule_of(rule="multi_krum", tolerate=0.2)(updates_of(near + far, [0.0, 0.0, 0.0, 0.0, 1.0])))
    assert found == pytest.approx([0.15] * 10), "the two in the middle"


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ([0.3, *[0.1] * 5, *[0.05] * 4], [3 / 8, *[1 / 8] * 5]),  # 6 of 10, by their weights among each other
        ([0.55, *[0.05] * 9], [0.4, *[0.12] * 5]),  # 0.55 of 0.8 would be over the cap of 0.4
        ([0.0] * 10, [1 / 6] * 6),
    ],
)
def test_multi_krum_weighs_what_it_has_chosen_and_keeps_the_cap(weights: list[float], wanted: list[float]) -> None:
    vectors = [[0.1 * i + 0.01 * d for d in range(10)] for i in range(6)] + [[50.0 * i] * 10 for i in range(1, 5)]
    rule = rule_of(rule="multi_krum", tolerate=0.2, weighting="samples", max_weight_share=0.4)
    aggregate = flat(rule(updates_of(vectors, weights)))
    influence = [rule.judged[f"c{i:03d}"].influence for i in range(10)]
    assert influence == pytest.approx([*wanted, *[0.0] * 4])
    is_close(aggregate, [sum(w * v[d] for w, v in zip(wanted, vectors, strict=False)) for d in range(10)])


@pytest.mark.parametrize(
    "given", [{"rule": "mean", "clip_norm": 9.0}, {"rule": "median"}, {"rule": "trimmed_mean", "tolerate": 0.2}]
)
def test_only_the_proportions_of_weights_count(given: dict[str, Any]) -> None:
    vectors, weights = some(3, 5), [0.1, 0.3, 0.2, 0.25, 0.15]
    small, large = rule_of(**given), rule_of(**given)
    is_close(flat(small(updates_of(vectors, weights))), flat(large(updates_of(vectors, [4 * one for one in weights]))))
    for rule in (small, large):
        assert sum(one.influence for one in rule.judged.values()) == pytest.approx(1)


# Shares and the weighted mean.


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 10**9), min_size=1, max_size=12),
    st.floats(0.01, 1.0),
    st.sampled_from(["samples", "uniform"]),
)
def test_shares_sum_to_one_and_none_is_over_the_cap(samples: dict[str, int], cap: float, weighting: str) -> None:
    found = shares(samples, AggregationSpec(weighting=weighting, max_weight_share=cap))
    assert list(found) == sorted(samples)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    assert max(found.values()) <= max(cap, 1 / len(samples)) * (1 + 1e-9)
    assert min(found.values()) >= 0
    by_samples = sorted(samples, key=lambda name: samples[name])
    weights = [found[name] for name in by_samples]
    assert all(a <= b + 1e-12 for a, b in pairwise(weights)), "more samples never weigh less"


def test_what_the_cap_takes_goes_to_the_others_in_proportion() -> None:
    found = shares({"a": 97, "b": 1, "c": 2}, AggregationSpec(max_weight_share=0.7))
    assert found == pytest.approx({"a": 0.7, "b": 0.1, "c": 0.2})


def test_a_cap_that_cannot_be_met_means_equal_weights() -> None:
    assert shares({"a": 9, "b": 1}, AggregationSpec(max_weight_share=0.1)) == pytest.approx({"a": 0.5, "b": 0.5})


def test_clients_without_samples_share_what_the_cap_leaves() -> None:
    found = shares({"a": 5, "b": 0, "c": 0}, AggregationSpec(max_weight_share=0.5))
    assert found == pytest.approx({"a": 0.5, "b": 0.25, "c": 0.25})


def test_the_mean_is_summed_in_float64() -> None:
    parts = [1e8, 1.0, -1e8]
    updates = [ClientUpdate(str(i), 1 / 3, {"x": torch.tensor([value])}) for i, value in enumerate(parts)]
    mean = weighted_mean(iter(updates))["x"]
    assert mean.dtype == torch.float32
    assert mean.item() == pytest.approx(1 / 3, abs=1e-7), "float32 sums would have lost the 1"


def test_the_mean_takes_updates_one_by_one() -> None:
    alive = 0

    def stream() -> object:
        nonlocal alive
        for number in range(100):
            alive += 1
            assert alive == 1
            yield ClientUpdate(str(number), 0.01, {"x": torch.ones(2)})
            alive -= 1

    assert torch.allclose(weighted_mean(stream())["x"], torch.ones(2))


def test_large_tensors_are_summed_entry_by_entry_as_small_ones() -> None:
    draws = torch.Generator().manual_seed(1)
    tensors = [torch.randn(3, CHUNK + 7, generator=draws) for _ in range(3)]
    tensors[0][0, 0] = tensors[1][0, 0] = tensors[2][0, 0] = -0.0
    weights = [0.2, 0.5, 0.3]
    updates = [ClientUpdate(str(i), w, {"x": t}) for i, (w, t) in enumerate(zip(weights, tensors, strict=True))]
    found = weighted_mean(updates)["x"]
    literal = tensors[0].double() * 0.2 + tensors[1].double() * 0.5 + tensors[2].double() * 0.3
    assert torch.equal(found, literal.float())
    assert torch.signbit(found[0, 0])


def test_from_five_clients_on_none_weighs_more_than_twice_its_even_share_unless_the_spec_says_so() -> None:
    liar = {"liar": 10**9, **{f"c{k}": 10 for k in range(4)}}
    assert shares(liar, AggregationSpec())["liar"] == pytest.approx(2 / 5)
    assert shares(liar, AggregationSpec(max_weight_share=1.0))["liar"] == pytest.approx(1.0)
    four = {name: liar[name] for name in list(liar)[:4]}
    assert shares(four, AggregationSpec())["liar"] == pytest.approx(1.0), "one of few may have most of the images"
    even = {f"c{k}": 10 + k for k in range(10)}
    assert shares(even, AggregationSpec()) == shares(even, AggregationSpec(max_weight_share=1.0))
