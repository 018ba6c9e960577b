"""Private tensors of earlier rounds: of each evaluated one, for a selection, and before each, to go back with.

``round-N.safetensors`` are those that were evaluated in round N. ``before-N.safetensors`` are those with which round N
began: nothing where N is the first round that this client trained in, which is kept whatever ``keep_rounds`` says.
"""

from __future__ import annotations

from promptfed.client_service.state.private_state import PrivateState, TensorOrigin

BEFORE = "before-*.safetensors"


def keep_round(state: PrivateState, round: int) -> None:
    """Keep the committed private tensors as those of ``round``; before the first training these are none."""
    state.commit_prepared(*state.committed(), f"round-{round}.safetensors", residual={})


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


def keep_before(state: PrivateState, round: int, keep: int) -> None:
    """Before an update of ``round`` is committed: keep what the round began with, for ``keep`` rounds."""
    kept = _numbers(state)
    if kept and not keep:
        return
    private, origin = state.committed()
    trained = origin.task_id is not None
    if trained and origin.round >= round:
        return  # An earlier phase of this very round is committed.
    # What was only prepared for the first training is prepared again.
    begun = (private, origin) if trained else ({}, TensorOrigin())
    state.commit_prepared(*begun, _before(round))
    for number in kept[1:]:
        if number <= round - keep:
            (state.folder / _before(number)).unlink(missing_ok=True)


def go_back(state: PrivateState, round: int) -> bool:
    """Commit the private tensors with which ``round`` began, and forget later ones; repeating it changes nothing.

    Returns whether they are there. If they are gone, or were never kept, they start anew.
    """
    if state.pending() is not None:
        state.discard()
    _, origin = state.committed()
    later = [number for number in _numbers(state) if number >= round]
    found = True
    # After a selection the committed ones may be of a far earlier round.
    if later or (origin.task_id is not None and origin.round >= round):
        private, before = state.committed(_before(later[0])) if later else ({}, origin)
        found = before.task_id is None or before.round < round
        if found:
            state.commit_prepared(private, before, residual=state.residual(_before(later[0])) if later else {})
        else:
            state.reset_private()
    for number in later:
        (state.folder / _before(number)).unlink(missing_ok=True)
    for path in state.folder.glob("round-*.safetensors"):
        if int(path.stem.removeprefix("round-")) >= round:
            path.unlink(missing_ok=True)
    return found


def _before(round: int) -> str:
    return BEFORE.replace("*", str(round))


def _numbers(state: PrivateState) -> list[int]:
    """The rounds before which private tensors were kept, in order."""
    return sorted(int(path.stem.removeprefix("before-")) for path in state.folder.glob(BEFORE))
