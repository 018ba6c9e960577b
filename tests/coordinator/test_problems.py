"""Refusals: the kinds that clients read."""

from __future__ import annotations

import pytest

from promptfed.coordinator import problems


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (problems.NameTaken, "name-taken"),
        (problems.NoState, "no-state"),
        (problems.TooManyClassNames, "too-many-class-names"),
        (problems.BodyTooLarge, "too-large"),
        (problems.Ended, "federation-ended"),
        (problems.ObjectsAway, "store-away"),
    ],
)
def test_the_kind_is_the_class_s_name_unless_the_protocol_has_another(
    refusal: type[problems.Refusal], kind: str
) -> None:
    assert refusal.kind == kind


def test_a_refusal_says_when_to_try_again() -> None:
    for refusal in (problems.StoreAway(), problems.ObjectsAway("away"), problems.TooManyUploads("too many")):
        assert (refusal.status, refusal.headers) == (503, {"Retry-After": "2"})
