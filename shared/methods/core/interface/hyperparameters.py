"""Hyperparameters of methods, and a method's defaults for a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

LabelSpace = Annotated[
    Literal["federation", "client"],
    Field(
        description="class names over which training and the accuracy on a client's own test images take their "
        "softmax: the federation's where the spec names them, or the client's own"
    ),
]


class Hyperparameters(BaseModel):
    """Base of every method's hyperparameters: documented, bounded, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    label_space: LabelSpace = "federation"


def option(default: Any, description: str, **bounds: Any) -> Any:
    """A hyperparameter: its default, its documentation, and pydantic's bounds, such as ``ge`` and ``le``."""
    return Field(default=default, description=description, **bounds)


def defaults(
    rounds: int | None = None, sections: Mapping[str, Any] | None = None, **training: float | str
) -> dict[str, Any]:
    """A spec's ``rounds``, ``training`` and other ``sections``, such as aggregation; omitted ones are left out."""
    given = {"rounds": rounds, "training": training} | dict(sections or {})
    return {name: value for name, value in given.items() if value}
