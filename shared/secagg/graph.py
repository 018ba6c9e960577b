"""The graph of clients that share masks and secrets: complete, or ``k`` neighbours on a ring (Bell et al., 2020)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from promptfed.shared.spec.spec_aggregation import SecureAggregationSpec
from promptfed.shared.spec.spec_section import ceil_fraction

COMPLETE_UP_TO = 128  # clients; a complete graph costs each of them at most 9 ms
OPENED = Fraction(1, 1 << 40)  # largest probability that colluders can open a secret, or split the graph
LOST = Fraction(1, 1 << 20)  # largest probability that drop-outs leave a secret that cannot be opened


@dataclass(frozen=True)
class Graph:
    """``least``: minimum clients in every step of an attempt. ``threshold``: number of shares that open a secret.

    ``neighbours`` is None for a complete graph, otherwise an even number.
    """

    count: int
    least: int
    threshold: int
    neighbours: int | None = None

    def beside(self, ring: int) -> list[int]:
        """The ring positions of the neighbours of the client at ``ring``."""
        if self.neighbours is None:
            return [other for other in range(self.count) if other != ring]
        half = self.neighbours // 2
        return [(ring + step) % self.count for step in range(-half, half + 1) if step]


def graph_of(spec: SecureAggregationSpec, count: int, uniform: bool) -> Graph:
    """The graph of ``count`` clients. It is sparse only if weights are ``uniform``: clients know few other weights."""
    least = max(2, ceil_fraction(spec.threshold, count))
    if not uniform or (count <= COMPLETE_UP_TO and spec.neighbours is None):
        return Graph(count, least, least)
    if spec.neighbours is not None:
        threshold = _least_threshold(count, round(spec.colluding_share * count), spec.neighbours)
        fits = spec.neighbours < count - 1 and threshold is not None
        return Graph(count, least, threshold, spec.neighbours) if fits and threshold else Graph(count, least, least)
    chosen = sparse(count, spec.colluding_share, spec.dropping_share)
    return Graph(count, least, least) if chosen is None else Graph(count, least, chosen[1], chosen[0])


@lru_cache(maxsize=64)
def sparse(count: int, colluding: float, dropping: float) -> tuple[int, int] | None:
    """The smallest number of neighbours k and the threshold of shares; None if the complete graph is needed.

    With the given fraction of colluders, the probability that they hold the threshold for any client, or that k/2
    consecutive clients are lost, is below 2⁻⁴⁰. With the given fraction of drop-outs, the probability that fewer shares
    than the threshold remain for any client is below 2⁻²⁰.
    """
    bad, gone = round(colluding * count), round(dropping * count)
    for k in range(2, count - 1, 2):
        if count * (Fraction(bad + gone, count) ** (k // 2)) >= OPENED:
            continue
        threshold = _least_threshold(count, bad, k)
        if threshold is None:
            continue
        lost = sum(_ways(count - 1, count - gone, k, left) for left in range(threshold))
        if count * Fraction(lost, math.comb(count - 1, k)) < LOST:
            return k, threshold
    return None


def _least_threshold(count: int, bad: int, k: int) -> int | None:
    """The smallest threshold that ``bad`` colluders among a client's k neighbours reach with probability below 2⁻⁴⁰."""
    if not 2 <= k < count:
        return None
    total, tail, threshold = math.comb(count - 1, k), 0, None
    for held in range(k, 0, -1):
        tail += _ways(count - 1, bad, k, held)
        if count * Fraction(tail, total) >= OPENED:
            break
        threshold = held
    return None if threshold is None else max(2, threshold)


def _ways(population: int, marked: int, drawn: int, hit: int) -> int:
    """The number of draws of ``drawn`` out of ``population`` with exactly ``hit`` of the ``marked`` ones."""
    return math.comb(marked, hit) * math.comb(population - marked, drawn - hit)


def ring_order(roster_sha256: bytes, hashes: Sequence[bytes]) -> list[int]:
    """The places in ``hashes`` in ring order. Nobody can choose the order: it follows SHA-256(roster | entry)."""
    return sorted(range(len(hashes)), key=lambda place: hashlib.sha256(roster_sha256 + hashes[place]).digest())
