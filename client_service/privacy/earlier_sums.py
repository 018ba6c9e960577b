"""The payloads of a client's earlier secure sums, which another sum's payload must not be near.

Two sums of nearly the same payload, over sets that differ by one member, differ by about that member's change. So a
client keeps of each payload a sketch that only it can draw, in a file that is never deleted. It refuses one that is
nearer to an earlier one than a part of its own change to that, where the two sums' members are not the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, TypeAdapter

from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.canonical import canonical_json
from promptfed.shared.secagg import SecureError
from promptfed.shared.secagg.masks import words
from promptfed.shared.tensors.torch_tensors import decode, encode

SUMS = "secure-sums.safetensors"
WIDTH = 512  # numbers of a sketch
CHUNK = 1 << 18  # numbers of a payload that are drawn for together
MOST = 1000  # phases that are kept, the last ones: 4 MB
FULL = 9  # members up to which the whole ``min_move`` is asked for

Array = NDArray[Any]


def sketched(identity: bytes, payload: Mapping[str, Array]) -> NDArray[np.float64]:
    """``(WIDTH,)``: each number of ``payload`` is added at a random place with a random sign, drawn by ``identity``.

    Distances of sketches are those of payloads within some 3 % (count sketch: Charikar et al., 2002). Who does not know
    the private key cannot make a payload whose sketch is far off.
    """
    sketch, chunk = np.zeros(WIDTH), 0
    for _, tensor in sorted(payload.items()):
        flat = np.asarray(tensor).astype(np.float64).reshape(-1)
        for start in range(0, len(flat), CHUNK):
            part = flat[start : start + CHUNK]
            drawn = words(hashlib.sha256(b"promptfed/sketch/1\0%d\0" % chunk + identity).digest(), len(part))
            signs = 1.0 - 2.0 * ((drawn >> np.uint64(9)) & np.uint64(1)).astype(np.float64)
            places = (drawn & np.uint64(WIDTH - 1)).astype(np.int64)
            sketch += np.bincount(places, weights=signs * part, minlength=WIDTH)
            chunk += 1
    return sketch


def shapes_of(payload: Mapping[str, Array]) -> str:
    """A digest of names and shapes: payloads of other tensors have no distance."""
    return hashlib.sha256(canonical_json({name: list(one.shape) for name, one in payload.items()}).encode()).hexdigest()


class EarlierSum(BaseModel):
    """A phase whose masked change was sent: a digest of the payload's shapes, and the length of the own change.

    ``members``: by attempt, a digest of those that were to count and their number; "" until this client has signed.
    """

    round: int
    shapes: str
    change: float
    members: dict[int, tuple[str, int]] = {}

    def can_be_of(self, members: Collection[str], final: bool) -> bool:
        """Whether both sums are of the same members, or, unless these are ``final``, may be once some drop out."""
        member_sets = set(self.members.values())
        return member_sets == {_named(members)} or (
            not final and len(member_sets) == 1 and 0 < min(member_sets)[1] < len(members)
        )


def _named(members: Collection[str]) -> tuple[str, int]:
    return hashlib.sha256("\n".join(sorted(members)).encode()).hexdigest(), len(members)


_READER = TypeAdapter(dict[str, EarlierSum])


@dataclass(frozen=True)
class EarlierSums:
    """The earlier sums in a client's folder. ``min_move``: the least distance, as a part of the client's own change."""

    state: PrivateState
    min_move: float

    def expect_apart(
        self, where: str, sketch: NDArray[np.float64], shapes: str, members: Collection[str], final: bool = False
    ) -> None:
        """Refuse to be summed with ``members`` (identity keys) at ``where`` if a payload of an earlier sum is near.

        The second attempt at a phase has the same payload, and is no other sum. Of n > 9 members 3/√n of the distance
        is enough: that far a mean of independent changes moves, and more members' changes hide one.

        Raises:
            SecureError: payload-repeated.
        """
        sketches, sums = self._read()
        distance = self.min_move * min(1.0, (FULL / max(1, len(members))) ** 0.5)
        for name, earlier in sums.items():
            if name == where or earlier.shapes != shapes or earlier.can_be_of(members, final):
                continue
            if float(np.linalg.norm(sketch - sketches[name])) < distance * earlier.change:
                text = f"the payload is nearly that of {name}, which other members were summed for: the two sums would"
                raise SecureError("payload-repeated", f"{text} tell a member's change; sum the same ones, or move on")

    def note(
        self, where: str, attempt: int, sketch: NDArray[np.float64], about: EarlierSum, members: Collection[str] = ()
    ) -> None:
        """Keep what is about to be summed; on the disk when this returns. ``members``: once they are known."""
        sketches, sums = self._read()
        before = sums[where].members if where in sums else {}
        named = _named(members) if members else before.get(attempt, ("", 0))
        sums[where] = about.model_copy(update={"members": before | {attempt: named}})
        sketches[where] = sketch
        sums = {name: sums[name] for name in sorted(sums, key=lambda name: sums[name].round)[-MOST:]}
        tensors = {name: torch.from_numpy(sketches[name]) for name in sums}
        self.state.write_file(SUMS, encode(tensors, _READER.dump_python(sums, mode="json")))

    def _read(self) -> tuple[dict[str, NDArray[np.float64]], dict[str, EarlierSum]]:
        content = self.state.read_file(SUMS)
        if content is None:
            return {}, {}
        try:
            tensors, about = decode(content)
            return {name: tensor.numpy() for name, tensor in tensors.items()}, _READER.validate_python(about)
        except ValueError:
            raise self.state.damaged(SUMS) from None
