"""A client's signing key, and the members of secure sums that it has met."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.secagg.keys import fingerprint, new_identity, public_identity

KEY, PEERS = "signing.key", "peers.json"


def identity_of(state: PrivateState) -> bytes:
    """The private Ed25519 key of this folder's client, made and written down when it is asked for first.

    Raises:
        ClientError: STATE where it is damaged.
    """
    key = state.read_note(KEY)
    if key is None:
        key = new_identity().hex()
        state.write_note(KEY, key)
    try:
        return bytes.fromhex(key)
    except ValueError:
        raise state.damaged(KEY) from None


def own_fingerprint(folder: Path) -> str:
    """``ed25519:…`` of the client whose state is in ``folder``, also while that client runs.

    Raises:
        ClientError: STATE where the folder cannot be used.
    """
    try:
        private = bytes.fromhex((folder / KEY).read_text())  # without the lock, which a client at work has
    except (OSError, ValueError):
        state = PrivateState(folder)
        try:
            private = identity_of(state)
        finally:
            state.close()
    return fingerprint(public_identity(private))


@dataclass(frozen=True)
class Met:
    """How many of the other members of a secure sum this client knows.

    ``new``: never met before. ``listed``: among the fingerprints of its owner's policy.
    """

    round: int
    members: int
    new: int
    listed: int

    def as_dict(self) -> dict[str, int]:
        """As JSON."""
        return asdict(self)


def meet(state: PrivateState, others: Iterable[str], round: int, listed: frozenset[str]) -> Met:
    """Note the identity keys (hex) of a sum's ``others``, each with the first round in which it was met."""
    first_met = state.read_as(PEERS, dict[str, int]) or {}
    here = sorted(fingerprint(bytes.fromhex(key)) for key in others)
    new = [peer for peer in here if peer not in first_met]
    if new:
        state.write_as(PEERS, first_met | dict.fromkeys(new, round))
    return Met(round, len(here), len(new), sum(peer in listed for peer in here))
