"""The private tensors of each evaluated round, of which the selected one's are committed in the end."""

from __future__ import annotations

from promptfed.client_service.state.private_state import PrivateState

COMMITTED = "committed.safetensors"


def keep_round(state: PrivateState, round: int) -> None:
    """Keep the committed private tensors as those of ``round``."""
    path = state.folder / COMMITTED
    if path.exists():
        state.write_file(f"round-{round}.safetensors", path.read_bytes())


def select_round(state: PrivateState, round: int) -> None:
    """Commit the private tensors that were kept of ``round``, and forget those of other rounds."""
    kept = state.folder / f"round-{round}.safetensors"
    if kept.exists():
        state.write_file(COMMITTED, kept.read_bytes())
    for path in state.folder.glob("round-*.safetensors"):
        if path != kept:
            path.unlink(missing_ok=True)
