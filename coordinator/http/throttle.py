"""Wrong tokens are limited by the caller's address."""

from __future__ import annotations

import ipaddress
import logging
import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache

from promptfed.coordinator.domain import clock
from promptfed.coordinator.problems import TooManyFailures

log = logging.getLogger("promptfed.coordinator")
MOST_ADDRESSES = 10_000
MOST_TOKENS = 100_000
GUESSES = 100  # times the failures: so many different wrong tokens no broken script and no lost federation sends


@dataclass
class _Bucket:
    """The failures that an address has left, as of ``at`` (monotonic seconds)."""

    left: float
    at: float


class AuthThrottle:
    """Failures by address: ``per_minute`` at once, and per minute. Used on the event loop only.

    All tables are bounded; the least recently used entries go first.
    """

    def __init__(self, per_minute: int):
        self._most = float(per_minute)
        self._failures: OrderedDict[str, _Bucket] = OrderedDict()
        self._guesses: OrderedDict[str, _Bucket] = OrderedDict()
        self._wrong: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._trusted: OrderedDict[tuple[str, str], None] = OrderedDict()

    def check_wrong(self, address: str, token_digest: str) -> None:
        """Count a wrong token, once. Raises TooManyFailures if the address has failed too often."""
        key = _network(address)
        if (key, token_digest) not in self._wrong:
            _take(self._guesses, key, self._most * GUESSES)
        _remember(self._wrong, (key, token_digest))
        self._expect_left(self._failures, address, self._most)

    def check_right(self, address: str, token_digest: str) -> None:
        """Raises TooManyFailures for a valid token that is new to an address which guesses tokens."""
        if (_network(address), token_digest) not in self._trusted:
            self._expect_left(self._guesses, address, self._most * GUESSES)

    def failed(self, address: str) -> None:
        """Count a call that was refused for its token."""
        key = _network(address)
        if _take(self._failures, key, self._most) < 1:
            log.warning("wrong tokens from %s: more of them are refused for now", key)

    def succeeded(self, address: str, token_digest: str) -> None:
        """Remember a valid token: this address may always use it again."""
        _remember(self._trusted, (_network(address), token_digest))

    def _expect_left(self, buckets: OrderedDict[str, _Bucket], address: str, most: float) -> None:
        bucket = buckets.get(_network(address))
        left = _filled(bucket, most) if bucket is not None else most
        if left < 1:
            seconds = math.ceil((1 - left) * 60 / most)
            raise TooManyFailures(f"too many wrong tokens came from {address}: try again in {seconds} s", seconds)


def _take(buckets: OrderedDict[str, _Bucket], key: str, most: float) -> float:
    """Take one failure out of an address's bucket, unless it is empty; returns how many are left."""
    bucket = buckets.setdefault(key, _Bucket(most, clock.monotonic()))
    buckets.move_to_end(key)
    bucket.left, bucket.at = max(0.0, _filled(bucket, most) - 1), clock.monotonic()
    while len(buckets) > MOST_ADDRESSES:
        buckets.popitem(last=False)
    return bucket.left


def _filled(bucket: _Bucket, most: float) -> float:
    return min(most, bucket.left + (clock.monotonic() - bucket.at) * most / 60)


def _remember(pairs: OrderedDict[tuple[str, str], None], pair: tuple[str, str]) -> None:
    pairs[pair] = None
    pairs.move_to_end(pair)
    while len(pairs) > MOST_TOKENS:
        pairs.popitem(last=False)


@lru_cache(maxsize=1024)
def _network(address: str) -> str:
    """The address, or the /64 network of an IPv6 address, all of which one caller may have."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address  # a Unix socket, or a call within the process
    if isinstance(ip, ipaddress.IPv4Address):
        return address
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, 64), strict=False))
