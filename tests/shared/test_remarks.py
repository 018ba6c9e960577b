"""Remarks on accuracies that are given: each is made where it applies, and only there."""

from __future__ import annotations

import pytest

from promptfed.shared.api.remarks import Reached, falling, remarks_on, rising
from promptfed.shared.methods import resolve_spec

SPEC = resolve_spec({"name": "x", "method": {"name": "promptfl"}, "rounds": 8, "training": {"learning_rate": 0.05}})


def sites(*accuracies: float, zero_shot: float | None = 0.5, images: int = 100) -> dict[str, Reached]:
    return {f"site-{index}": Reached(value, zero_shot, images) for index, value in enumerate(accuracies)}


@pytest.mark.parametrize(
    ("means", "since"),
    [
        ({0: 0.3, 2: 0.4, 4: 0.5, 6: 0.6, 8: 0.62}, "+2.0 points since round 6 of 8"),
        ({0: 0.3, 4: 0.5, 8: 0.6}, "+10.0 points since round 4 of 8"),
        ({0: 0.3, 2: 0.4, 4: 0.5, 6: 0.6, 8: 0.605}, None),  # by half a point
        ({0: 0.3, 2: 0.7, 6: 0.5, 8: 0.6}, None),  # it was higher before
        ({0: 0.3, 8: 0.6}, None),  # nothing tells when it rose
        ({0: 0.3, 7: 0.5, 8: 0.6}, None),  # one round may be chance
    ],
)
def test_what_still_rises_is_remarked(means: dict[int, float], since: str | None) -> None:
    said = rising(means)
    assert said == ([] if since is None else [f"Still rising: {since}. Try more rounds, as rounds: 16."])


def test_a_federation_that_goes_on_is_not_said_to_rise() -> None:
    curve = {0: sites(0.5), 2: sites(0.6), 4: sites(0.7)}
    assert remarks_on(SPEC, curve, [2.0, 1.0], 4) == []
    [said] = remarks_on(SPEC, curve | {8: sites(0.8)}, [2.0, 1.0], 4)
    assert said.startswith("Still rising")


@pytest.mark.parametrize(
    ("reached", "who"),
    [
        (sites(0.4, 0.6, 0.7), "One site falls: site-0 is 10.0 points below zero-shot"),
        (sites(0.4, 0.3, 0.6, 0.7, 0.8), "2 sites fall: site-1 is 20.0 points below zero-shot"),
        (sites(0.49, 0.6, 0.7), None),  # by one point
        (sites(0.4, 0.6, 0.7, images=20), None),  # by two images
        (sites(0.4, 0.4, 0.7), None),  # most fall: not a matter of one site
        (sites(0.4), None),
        (sites(0.5, 0.6, 0.7), None),
    ],
)
def test_a_site_that_falls_is_named_with_what_to_try(reached: dict[str, Reached], who: str | None) -> None:
    said = falling(reached, 0.05)
    assert said == [] if who is None else said[0].startswith(who)
    assert not said or "such as fedpgp, or a lower rate than 0.05" in said[0]


def test_all_remarks_are_of_the_last_evaluation() -> None:
    assert remarks_on(SPEC, {}, [], 4) == []
    assert remarks_on(SPEC, {0: sites(0.5, zero_shot=None)}, [], 4) == []
    [chance] = remarks_on(SPEC, {0: sites(0.26, zero_shot=0.26)}, [], 4)
    assert "guessing among 4 classes" in chance
    [below] = remarks_on(SPEC, {0: sites(0.5), 4: sites(0.6), 8: sites(0.4)}, [], 4)
    assert below.startswith("Below zero-shot by 10.0 points: try a lower training.learning_rate than 0.05")
    [still] = remarks_on(SPEC, {0: sites(0.5), 8: sites(0.501)}, [2.0, 1.99], 4)
    assert still.startswith("Nothing moved in 8 rounds")
    assert remarks_on(SPEC, {0: sites(0.5), 4: sites(0.7), 8: sites(0.7)}, [2.0, 1.0], 4) == []
