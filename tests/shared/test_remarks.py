"""Remarks on accuracies that are given: each is made where it applies, and only there."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import pytest

from promptfed.coordinator.resources.results.numbers import _cell
from promptfed.shared.api.report_schemas import (
    ClientEvaluation,
    Reached,
    count_noise,
    falling,
    little,
    movement,
    near_chance,
    noise_of,
    of_one_class,
    remarks_on,
    rising,
    unsure,
)
from promptfed.shared.messages import SplitResult
from promptfed.shared.methods import has_rate, resolve_spec
from promptfed.shared.plain_text import csv_cell, markdown, plain

SPEC = resolve_spec({"name": "x", "method": {"name": "promptfl"}, "rounds": 8, "training": {"learning_rate": 0.05}})


def sites(*accuracies: float, zero_shot: float | None = 0.5, images: int = 100) -> dict[str, Reached]:
    return {f"site-{index}": Reached(value, zero_shot, images) for index, value in enumerate(accuracies)}


RISING = [
    ({0: 0.3, 2: 0.4, 4: 0.5, 6: 0.6, 8: 0.62}, "+2.0 points since round 6 of 8"),
    ({0: 0.3, 4: 0.5, 8: 0.6}, "+10.0 points since round 4 of 8"),
    ({0: 0.3, 2: 0.4, 4: 0.5, 6: 0.6, 8: 0.605}, None),  # by half a point
    ({0: 0.3, 2: 0.7, 6: 0.5, 8: 0.6}, None),  # it was higher before
    ({0: 0.3, 8: 0.6}, None),  # nothing tells when it rose
    ({0: 0.3, 7: 0.5, 8: 0.6}, None),  # one round may be chance
]


@pytest.mark.parametrize(("means", "since"), RISING)
def test_what_still_rises_is_remarked(means: dict[int, float], since: str | None) -> None:
    said = rising(means)
    assert said == ([] if since is None else [f"Still rising: {since}. Try more rounds, as rounds: 16."])


def test_nothing_is_said_of_small_gains_where_there_is_no_room() -> None:
    curve = {8: sites(0.95, zero_shot=0.95)}
    assert remarks_on(SPEC, curve, [0.1, 0.1], [4]) == []
    [said] = remarks_on(SPEC, {8: sites(0.85, zero_shot=0.85)}, [0.1, 0.1], [4])
    assert said.startswith("Nothing moved")


def test_a_federation_that_goes_on_is_not_said_to_rise() -> None:
    curve = {0: sites(0.5), 2: sites(0.6), 4: sites(0.7)}
    assert remarks_on(SPEC, curve, [2.0, 1.0], [4]) == []
    [said] = remarks_on(SPEC, curve | {8: sites(0.8)}, [2.0, 1.0], [4])
    assert said.startswith("Still rising")


FALLING = [
    (sites(0.4, 0.6, 0.7), "One site falls: site-0 is 10.0 points below zero-shot"),
    (sites(0.4, 0.3, 0.6, 0.7, 0.8), "2 sites fall: site-1 is 20.0 points below zero-shot"),
    (sites(0.4, 0.49, 0.6), None),  # two of three fall, one of them by a point
    (sites(0.4, 0.49, 0.6, 0.7, 0.8), "2 sites fall: site-0 is 10.0 points below zero-shot, while most sites gain"),
    (sites(0.4, 0.5, 0.5, 0.6), None),  # a quarter gains
    (sites(0.49, 0.6, 0.7), None),  # by one point
    (sites(0.4, 0.6, 0.7, images=20), None),  # by two images
    (sites(0.4, 0.4, 0.7), None),  # most fall: not a matter of one site
    (sites(0.4), None),
    (sites(0.5, 0.6, 0.7), None),
]


@pytest.mark.parametrize(("reached", "who"), FALLING)
def test_a_site_that_falls_is_named_with_what_to_try(reached: dict[str, Reached], who: str | None) -> None:
    said = falling(reached, 0.05)
    assert said == [] if who is None else said[0].startswith(who)
    assert not said or "such as fedpgp, or a lower rate than 0.05" in said[0]


def test_all_remarks_are_of_the_last_evaluation() -> None:
    assert remarks_on(SPEC, {}, [], [4]) == []
    assert remarks_on(SPEC, {0: sites(0.5, zero_shot=None)}, [], [4]) == []
    [chance] = remarks_on(SPEC, {0: sites(0.26, zero_shot=0.26)}, [], [4])
    assert "guessing among 4 classes" in chance
    [below] = remarks_on(SPEC, {0: sites(0.5), 4: sites(0.6), 8: sites(0.4)}, [], [4])
    assert below.startswith("Below zero-shot by 10.0 points: try a lower training.learning_rate than 0.05")
    [still] = remarks_on(SPEC, {0: sites(0.5), 8: sites(0.501)}, [2.0, 1.99], [4])
    assert still.startswith("Nothing moved in 8 rounds")
    assert remarks_on(SPEC, {0: sites(0.5), 4: sites(0.7), 8: sites(0.7)}, [2.0, 1.0], [4]) == []


def test_nothing_is_said_that_noise_explains() -> None:
    assert noise_of(0.5, sites(0.5).values()) == pytest.approx(0.098)
    few_and_many = {"few": Reached(0.5, 0.5, 4), "many": Reached(0.5, 0.5, 1000)}
    assert noise_of(0.5, few_and_many.values()) == pytest.approx(0.245, abs=0.001), "each site counts the same"
    assert noise_of(1.0, sites(1.0).values()) > 0.02, "a hundred right answers are no certainty"
    noisy = {"a": Reached(0.5, 0.5, 100, noise=count_noise(0.1, SplitResult(accuracy=0.5, num_samples=100)))}
    assert noise_of(0.5, noisy.values()) == pytest.approx(1.96 * (0.0025 + 2 * 0.0199833) ** 0.5, rel=1e-4)
    few = {0: sites(0.5, images=20), 4: sites(0.5, images=20), 8: sites(0.45, images=20)}
    assert remarks_on(SPEC, few, [2.0, 1.0], [4]) == [], "one image of twenty"
    few[8] = sites(0.6, images=20)
    assert not any("rising" in said for said in remarks_on(SPEC, few, [2.0, 1.0], [4]))
    many = {round: sites(*(row.accuracy for row in reached.values()), images=2000) for round, reached in few.items()}
    assert any("Still rising" in said for said in remarks_on(SPEC, many, [2.0, 1.0], [4]))
    many[8] = sites(0.45, images=2000)
    assert remarks_on(SPEC, many, [2.0, 1.0], [4])[0].startswith("Below zero-shot by 5.0 points")


LITTLE = [
    (
        0.52,
        2000,
        "Sites learn little: +2.0 points over zero-shot, at most +4.2; `promptfed tune RUN.yaml --methods auto`",
    ),
    (0.501, 10_000, "Sites learn little: +0.1 points over zero-shot, at most +1.1"),
    (0.54, 300, "Sites learn little: +4.0 points over zero-shot, at most +9.7"),
    (
        0.52,
        100,
        "Too few test images to tell what sites learn: +2.0 points over zero-shot on 100 test images, where 9.8",
    ),
    (
        0.75,
        12,
        "Too few test images to tell what sites learn: +25.0 points over zero-shot on 12 test images, where 28.3",
    ),
    (0.53, 2000, None),  # certain, and worth having
    (0.76, 40, None),
]


@pytest.mark.parametrize(("reached", "images", "says"), LITTLE)
def test_little_is_not_said_of_a_test_set_that_is_too_small(reached: float, images: int, says: str | None) -> None:
    said = remarks_on(SPEC, {0: sites(0.5, images=images), 8: sites(reached, images=images)}, [2.0, 1.0], [4])
    assert len(said) == (says is not None)
    assert says is None or said[0].startswith(says)


def test_little_is_said_where_there_is_room() -> None:
    assert little(0.2, 0.5, 0.1, 9) == little(0.01, 0.95, 0.1, 9) == little(-0.01, 0.5, 0.1, 9) == []
    several = SPEC.model_copy(update={"task": "multi_label"})
    curve = {0: sites(0.26, zero_shot=0.26), 8: sites(0.27, zero_shot=0.26)}
    assert remarks_on(several, curve, [2.0, 1.0], [4]) == [], "a mean average precision has neither chance nor interval"


def test_moving_sites_and_rising_losses_are_not_said_to_stand_still() -> None:
    apart = {0: sites(0.5, 0.5), 8: sites(0.6, 0.4, images=2000)}
    assert not any("Nothing moved" in said for said in remarks_on(SPEC, apart, [2.0, 2.0], [4]))
    assert movement(0.0, [2.0, 1.99], 0.05, 2) != []
    assert movement(0.0, [2.0, 9.0], 0.05, 2) == []


def test_no_other_rate_is_advised_where_there_is_none() -> None:
    probe = resolve_spec({"name": "x", "method": {"name": "fedlp"}, "rounds": 8, "class_names": ["a", "b"]})
    [said] = remarks_on(probe, {8: sites(0.4, images=2000)}, [2.0, 1.0], [4], has_rate(probe))
    assert said.startswith("Below zero-shot by 10.0 points: `promptfed tune RUN.yaml")
    [said] = falling(sites(0.4, 0.6, 0.7), None)
    assert said.endswith("such as fedpgp.")


def test_classes_of_sites_are_told_as_they_are() -> None:
    for classes, words in (([2, 10], "2 to 10 classes in 30.0 %"), ([10, 2], "2 to 10 classes in 30.0 %")):
        [said] = near_chance(0.31, classes, "tiny")
        assert f"guessing among {words}" in said
    [said] = near_chance(0.26, [4, 4], "tiny")
    assert "guessing among 4 classes in 25.0 %" in said
    assert near_chance(0.31, [1, 10], "tiny") == near_chance(0.31, [], "tiny") == []


def test_a_backbone_that_learned_the_pictures_is_not_said_not_to_know_them() -> None:
    assert near_chance(0.26, [4], "tiny", 0.3) != []
    assert near_chance(0.26, [4], "tiny", 0.767) == []
    assert near_chance(0.26, [4], "tiny", 0.437) != []  # from 0.25 on a quarter of the way is 0.4375
    assert near_chance(0.26, [4], "tiny", 0.438) == []
    said = remarks_on(SPEC, {0: sites(0.26, zero_shot=0.26), 8: sites(0.767, zero_shot=0.26)}, [2.0, 1.0], [4])
    assert said == []


# Text of others reads as text, wherever it is shown.

SHOWN = [
    ("größe 雲 é", "größe 雲 é"),
    ("\x1b[8mhidden", r"\x1b[8mhidden"),
    ("a\r\nb\tc\x00\x7f\x9b", r"a\x0d\x0ab\x09c\x00\x7f\x9b"),
    ("\u202egnp.exe \u2066x\u2069 \u200f", r"\u202egnp.exe \u2066x\u2069 \u200f"),
    ("zero\u200bwidth\ufeff\u2028", r"zero\u200bwidth\ufeff\u2028"),
    ("tag\U000e0041 lone\ud800", r"tag\U000e0041 lone\ud800"),
    ("👩\u200d🔬", "👩\u200d🔬"),  # one picture, joined
]


@pytest.mark.parametrize(("given", "shown"), SHOWN)
def test_what_a_terminal_obeys_or_hides_stands_as_its_code(given: str, shown: str) -> None:
    assert plain(given) == shown


def test_lines_that_are_kept() -> None:
    assert plain("a\nb\x1b", keep="\n") == "a\nb\\x1b"


@pytest.mark.parametrize("formula", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1"])
def test_no_cell_is_a_formula(formula: str) -> None:
    assert csv_cell(formula) == "'" + formula
    assert csv_cell("a" + formula) == "a" + formula


def test_markdown_holds_neither_markup_nor_html() -> None:
    shown = markdown("<img src=x onerror=alert(1)> [a](javascript:b) | `c` & *d*\nx")
    assert shown == r"&lt;img src=x onerror=alert(1)&gt; \[a\](javascript:b) \| \`c\` &amp; \*d\* x"


def test_the_metrics_file_has_no_formulas() -> None:
    assert [_cell(value) for value in ("=HYPERLINK(1)", -0.5, 3, None)] == ["'=HYPERLINK(1)", -0.5, 3, None]


def told(
    role: Literal["trainer", "evaluator"], ece: float, template: float | None, **figures: float
) -> ClientEvaluation:
    zero_shot = {} if template is None else {"test": SplitResult(accuracy=0.5, num_samples=90, ece=template)}
    split = SplitResult(accuracy=0.5, num_samples=90, ece=ece, **figures)
    return ClientEvaluation(
        role=role, domain=None, splits={"test": split}, zero_shot=zero_shot, metrics={}, received_at=datetime.now(UTC)
    )


def test_an_error_of_confidence_that_more_than_doubles_is_told() -> None:
    [said] = unsure({"a": told("trainer", 0.12, 0.05), "unseen": told("evaluator", 0.9, 0.01)})
    assert said.startswith("Confidence is no probability: ECE 12.0 %, zero-shot's 5.0 %")
    assert unsure({"a": told("trainer", 0.10, 0.05)}) == [], "twice"
    assert unsure({"a": told("trainer", 0.05, 0.01)}) == [], "small"
    assert unsure({"a": told("trainer", 0.3, None)}) == []


def test_answers_of_one_class_are_told_of_evaluators_too() -> None:
    [said] = of_one_class({"b": told("evaluator", 0.1, None, one_answer=0.97, majority=0.6, auroc=0.75)})
    assert said.startswith("97.0 % of the answers at b are one class (AUROC 75.0 %)")
    assert of_one_class({"b": told("evaluator", 0.1, None, one_answer=0.97, majority=0.9)}) == []
    assert of_one_class({"b": told("evaluator", 0.1, None)}) == [], "under a floor nothing is known"
    told_twice = {name: told("evaluator", 0.1, None, one_answer=0.97, majority=0.6) for name in "ba"}
    assert [text.partition(" at ")[2][:1] for text in of_one_class(told_twice)] == ["a", "b"]
    without = ClientEvaluation.model_construct(role="evaluator", splits={}, zero_shot={}, privacy=None)
    assert of_one_class({"c": without}) == []


def test_a_site_without_a_template_or_a_gain_neither_gains_nor_falls() -> None:
    assert (Reached(0.5, None, 10).gain, Reached(0.75, 0.5, 10).gain) == (0.0, 0.25)
    [said] = falling(sites(0.4, 0.5, 0.6, 0.7, 0.8), None)
    assert said.startswith("One site falls: site-0 is 10.0 points below")
    for noise, count in ((0.036, 1), (0.037, 0)):  # 1.96 √2 of it is 0.1
        noisy = sites(0.4, 0.6, 0.7) | {"site-0": Reached(0.4, 0.5, 100, noise)}
        assert len(falling(noisy, None)) == count
    assert "try more rounds" in movement(0.0, [1.0, 1.0], None, 3)[0]
    assert "try a higher training.learning_rate than 0.05, or more rounds" in movement(0.0, [1.0, 1.0], 0.05, 3)[0]
    further = ClientEvaluation.model_construct(zero_shot={"test": SplitResult(accuracy=0.25, num_samples=4)})
    assert [further.template_accuracy(name) for name in ("test", "test@other", "none")] == [0.25, 0.25, None]
