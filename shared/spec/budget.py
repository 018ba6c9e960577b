"""A spec's section ``training.budget``: the length of a task, and how its steps count in the mean (FedNova)."""

from __future__ import annotations

from typing import Annotated

from pydantic import model_validator

from promptfed.shared.spec.spec_section import Section, left_out

MOST_EPOCHS = 10_000


class BudgetSpec(Section):
    """One of the three, in place of ``training.epochs``. Clients may then take different numbers of steps.

    Their changes are weighed by FedNova (Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous
    Federated Optimization", 2020), so that a client with more steps does not count more.
    """

    steps: Annotated[int | None, left_out(ge=1, le=10_000_000, description="optimizer steps of each task")] = None
    seconds: Annotated[
        float | None,
        left_out(
            gt=0,
            le=30 * 86400,
            description="a task ends within so many seconds, after one step or more; the client "
            "sends the number of its steps",
        ),
    ] = None
    epochs: Annotated[int | None, left_out(ge=1, le=MOST_EPOCHS, description="epochs of each client's images")] = None

    @model_validator(mode="after")
    def _is_one(self) -> BudgetSpec:
        given = [name for name in ("steps", "seconds", "epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of steps, seconds and epochs, not {' and '.join(given) or 'none'}")
        return self


def accumulated(steps: int, momentum: float) -> float:
    """‖a‖₁ of ``steps`` steps of SGD: how often the change has each gradient in it, in sum.

    The gradient of step k stays in the momentum ρ: it is in the change 1 + ρ + … + ρ^(τ-k) times (Wang et al.,
    section 4.2). Weight decay is a part of the gradient.
    """
    if momentum == 0:
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
