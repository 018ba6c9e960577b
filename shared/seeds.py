"""Random draws: each comes from a generator seeded by what it is for, so that none depends on what ran before."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose: the first bits of SHA-256(seed | purpose | ...).

    ``derive_seed(spec.seed, round, client, "train")`` is the same in every process and on every machine.
    """
    text = "|".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose; draws are made on the CPU and moved, so that devices agree."""
    import torch

    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def sampling_order(draw: int | str, round: int, names: list[str]) -> list[str]:
    """Names ordered by SHA-256(draw | round | name): the order in which a round asks eligible clients.

    ``draw`` is the spec's seed, or a secret: who knows the seed can choose a name that is asked first in many rounds.
    """
    return sorted(names, key=lambda name: hashlib.sha256(f"{draw}|{round}|{name}".encode()).digest())


def initial_draws(seed: int) -> torch.Generator:
    """The generator of round 0: what clients start from in common is drawn from it, wherever it is drawn."""
    return generator(seed, "initial-state")
