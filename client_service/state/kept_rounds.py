"""Private tensors of evaluated rounds: ``round-N.safetensors`` are those of round N, for a selection."""

from __future__ import annotations

from promptfed.client_service.state.private_state import PrivateState, TensorOrigin


def keep_round(state: PrivateState, round: int) -> None:
    """Keep the committed private tensors as those of ``round``; before the first training these are none."""
    state.commit_prepared(*state.committed(), f"round-{round}.safetensors")


def select_round(state: PrivateState, round: int) -> None:
    """Commit the private tensors that were kept of ``round``, and forget those of other rounds.

    A client that was away then takes those of the last round before; one that joined later has none.
    """
    kept = {int(path.stem.removeprefix("round-")): path for path in state.folder.glob("round-*.safetensors")}
    last = max((number for number in kept if number <= round), default=None)
    state.commit_prepared(*({}, TensorOrigin()) if last is None else state.committed(kept[last].name))
    for number, path in kept.items():
        if number != last:
            path.unlink(missing_ok=True)
