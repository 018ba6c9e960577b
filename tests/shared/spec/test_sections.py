"""What a section of the spec computes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from promptfed.shared.spec.sections import (
    CAPPED_FROM,
    AggregationSpec,
    ParticipationSpec,
    PrivacySpec,
    ServerOptimizerSpec,
    best,
    without_rise,
)
from promptfed.shared.spec.weighting import shares


@pytest.mark.parametrize(
    ("share", "clients", "cap"),
    [
        (None, 1, 1.0),
        (None, CAPPED_FROM - 1, 1.0),
        (None, CAPPED_FROM, 2 / CAPPED_FROM),
        (None, 100, 0.02),
        (0.4, 2, 0.5),  # no cap is below an equal share
        (0.4, 3, 0.4),
        (0.4, 100, 0.4),
    ],
)
def test_one_client_weighs_at_most_its_cap(share: float | None, clients: int, cap: float) -> None:
    assert AggregationSpec(max_weight_share=share).weight_cap(clients) == pytest.approx(cap, abs=1e-12)


ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
OPTIMIZERS: list[tuple[Any, dict[str, float] | str]] = [
    ({}, {}), ({"optimizer": "none", "momentum": None}, {}), ({"optimizer": "adam"}, ADAM),
    ({"optimizer": "yogi", "beta2": None, "tau": 0.5}, ADAM | {"tau": 0.5}),
    ({"optimizer": "momentum"}, {"learning_rate": 1.0, "momentum": 0.9}),
    ({"optimizer": "momentum", "learning_rate": 0.5, "momentum": 0.0}, {"learning_rate": 0.5, "momentum": 0.0}),
    ({"optimizer": "adagrad"}, {"learning_rate": 0.01, "beta1": 0.0, "tau": 1e-3}),
    (ServerOptimizerSpec(optimizer="adam"), ADAM),
    ({"optimizer": "momentum", "tau": 1.0}, "optimizer momentum has no tau: leave it out (it takes: learning_rate, "),
    ({"optimizer": "adagrad", "beta2": 0.5}, "optimizer adagrad has no beta2: leave it out"),
    ({"momentum": 0.5}, "optimizer none has no momentum: leave it out (it takes: none)"),
    ({"optimizer": "adam", "gamma": 1}, "gamma"), ({"optimizer": ["adam"]}, "'momentum', 'adagrad', 'adam' or 'yogi'"),
    ({"optimizer": "sgd"}, "'momentum', 'adagrad', 'adam' or 'yogi'"), ("adam", "server"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "found"), OPTIMIZERS)
def test_a_server_optimizer_has_its_own_numbers_and_no_others(given: Any, found: dict[str, float] | str) -> None:
    if isinstance(found, str):
        with pytest.raises(ValidationError, match=re.escape(found)):
            AggregationSpec(server=given)
    else:
        made = AggregationSpec(server=given).server.model_dump(exclude_none=True)
        assert {name: number for name, number in made.items() if name != "optimizer"} == found


def test_who_takes_part_is_secret_where_everybody_is_drawn_alone() -> None:
    assert [ParticipationSpec(sampling=kind).is_secret for kind in ("fixed", "poisson")] == [False, True]


@pytest.mark.parametrize(("means", "highest", "after"), [
    ({}, None, 0), ({3: 0.5}, 3, 0), ({1: 0.5, 2: 0.7, 4: 0.7, 6: 0.1}, 2, 2), ({2: 0.1, 1: 0.1}, 1, 1),
])  # fmt: skip
def test_of_equal_rounds_the_first_is_the_best(means: dict[int, float], highest: int | None, after: int) -> None:
    assert (best(means), without_rise(means)) == (highest, after)


@pytest.mark.parametrize(("level", "records", "clients", "evaluations"), [
    ("none", False, False, "plain"), ("sample", True, False, "withheld"), ("client", False, True, "withheld"),
])  # fmt: skip
def test_what_a_level_protects(level: Any, records: bool, clients: bool, evaluations: str) -> None:
    found = PrivacySpec(level=level)
    assert (found.protects_records, found.protects_clients, found.evaluations) == (records, clients, evaluations)
    assert PrivacySpec(level=level, evaluation="noisy").evaluations == "noisy"


@pytest.mark.parametrize(("given", "weighting", "tolerate", "plain"), [
    ({}, "samples", None, True), ({"clip_norm": 1.0}, "samples", None, False),
    ({"rule": "median"}, "uniform", None, False),
    ({"rule": "median", "weighting": "samples"}, "samples", None, False), ({"rule": "krum"}, "uniform", 0.2, False),
    ({"rule": "trimmed_mean", "tolerate": 0.4}, "uniform", 0.4, False),
])  # fmt: skip
def test_robust_rules_weigh_all_alike(given: Any, weighting: str, tolerate: float | None, plain: bool) -> None:
    found = AggregationSpec(**given)
    assert (found.weighting, found.tolerate, found.is_plain_mean) == (weighting, tolerate, plain)


def test_of_an_unknown_rule_nobody_says_what_it_takes() -> None:
    with pytest.raises(ValidationError) as caught:
        AggregationSpec.model_validate({"rule": "best", "tolerate": 0.1})
    assert [error["loc"] for error in caught.value.errors()] == [("rule",)]


@pytest.mark.parametrize(("samples", "found"), [
    ({"b": 1, "a": 3}, [("a", 0.75), ("b", 0.25)]), ({"b": 0, "a": 0}, [("a", 0.5), ("b", 0.5)]), ({}, []),
])  # fmt: skip
def test_weights_are_in_order_of_name(samples: dict[str, int], found: list[tuple[str, float]]) -> None:
    assert list(shares(samples, AggregationSpec()).items()) == found
    assert list(shares(samples, AggregationSpec(rule="median")).items()) == [(name, 0.5) for name, _ in found]
