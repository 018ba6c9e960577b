"""Identity keys: this client's own, and those of the other members of its secure sums, remembered from first use.

The coordinator relays the keys, so it could invent clients. Remembered keys show later changes only. Keys that are
false from the beginning are ruled out by fingerprints that owners compare over another channel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.secagg import keys

KEY, PEERS = "signing.key", "peers.json"


def identity_of(state: PrivateState) -> bytes:
    """The private Ed25519 key of this folder's client, made and written down when it is asked for first.

    Raises:
        ClientError: STATE where it is damaged.
    """
    known = state.read_note(KEY)
    if known is None:
        known = keys.new_identity().hex()
        state.write_note(KEY, known)
    try:
        return bytes.fromhex(known)
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
    return keys.fingerprint(keys.public_identity(private))


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
    known = state.read_as(PEERS, dict[str, int]) or {}
    here = sorted(keys.fingerprint(bytes.fromhex(key)) for key in others)
    new = [peer for peer in here if peer not in known]
    if new:
        state.write_as(PEERS, known | dict.fromkeys(new, round))
    return Met(round, len(here), len(new), sum(peer in listed for peer in here))
