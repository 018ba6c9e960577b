"""Pydantic's errors in words."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from promptfed.shared.service.reasons import NAME_PATTERN, first_error


class Inner(BaseModel):
    size: int = 1


class Model(BaseModel, extra="forbid"):
    name: Annotated[str, Field(pattern=NAME_PATTERN)] = "a"
    code: Annotated[str, Field(pattern="^x$")] = "x"
    text: Annotated[str, Field(min_length=1)] = "a"
    pair: Annotated[str, Field(min_length=2)] = "ab"
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    inner: Inner = Inner()
    even: int = 0

    @field_validator("even")
    @classmethod
    def _check(cls, even: int) -> int:
        if even % 2:
            raise ValueError("must be even")
        return even


NAME = "name: use letters, digits and . _ - without spaces, at most 64, and begin with a letter or digit"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "a b"}, NAME),
        ({"code": "y"}, "code: must match pattern '^x$'"),
        ({"text": ""}, "text: must not be empty"),
        ({"pair": "a"}, "pair: must have at least 2 characters"),
        ({"other": 1}, "other: is not known here; check its spelling"),
        ({"inner": 3}, "inner: must be a mapping, such as {key: value}"),
        ({"inner": {"size": "x"}}, "inner.size: must be a valid integer"),
        ({"share": 0}, "share: must be greater than 0"),
        ({"even": 1}, "even: must be even"),
        ([], "(body): must be a mapping, such as {key: value}"),
    ],
)
def test_an_error_says_where_and_what(given: object, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Model.model_validate(given)
    assert first_error(caught.value) == words


def test_what_is_missing_is_named() -> None:
    class Needy(BaseModel):
        name: str

    with pytest.raises(ValidationError) as caught:
        Needy.model_validate({})
    assert first_error(caught.value) == "name: is missing"
