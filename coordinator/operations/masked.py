"""What a federation with secure sums cannot be asked: all that needs a single update."""

from __future__ import annotations

from promptfed.coordinator import problems
from promptfed.coordinator.domain.federation import Federation


class UpdatesMasked(problems.Refusal, status=409, title="Only the sum of the updates is known"):
    """Something that needs a single update, of a federation with secure sums."""


def is_summed(federation: Federation) -> bool:
    """Whether the open stage's masked vectors are there: none of them can be taken out of the sum any more."""
    stage = federation.run.stage
    return stage is not None and stage.kind in ("confirm", "unmask")


def expect_discardable(federation: Federation) -> None:
    """Raise UpdatesMasked where an accepted update could not be dropped."""
    if is_summed(federation):
        text = f"the masked vectors of round {federation.run.round} are there, and none can be taken out of their sum"
        raise UpdatesMasked(f"{text}: withdraw without discard, or wait for the next round")
