"""A limit on failed authentication, by the caller's address.

Tokens are 256 random bits, which nobody guesses; but a client may have made a poor secret, and a broken script should
not fill the log. An address that has failed too often is told to wait, whatever token it sends next, so that a right
guess is not answered either. Tokens that this address has used before are let through: whoever shares it with a
broken script, behind a proxy or on one machine, goes on.
"""

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


@dataclass
class _Bucket:
    """How many failures are left to an address, as of ``at`` (monotonic seconds)."""

    left: float
    at: float


class AuthThrottle:
    """Failures of each address, ``per_minute`` of them at once and in each minute. For one thread, the event loop's.

    Both tables are bounded; the least recently used entries go first.
    """

    def __init__(self, per_minute: int):
        self._most = float(per_minute)
        self._rate = per_minute / 60
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._trusted: OrderedDict[tuple[str, str], None] = OrderedDict()

    def check(self, address: str, token_digest: str) -> None:
        """Refuse to look at a token. Raises TooManyFailures."""
        key = _network(address)
        bucket = self._buckets.get(key)
        if bucket is None or (key, token_digest) in self._trusted:
            return
        left = self._filled(bucket)
        if left < 1:
            seconds = math.ceil((1 - left) / self._rate)
            raise TooManyFailures(f"too many wrong tokens came from {address}: try again in {seconds} s", seconds)

    def failed(self, address: str) -> None:
        """A token was wrong or has expired: one failure less is left to the address."""
        key = _network(address)
        bucket = self._buckets.setdefault(key, _Bucket(self._most, clock.monotonic()))
        self._buckets.move_to_end(key)
        bucket.left, bucket.at = self._filled(bucket) - 1, clock.monotonic()
        if bucket.left < 1:
            log.warning("wrong tokens from %s: it is refused for now", key)
        while len(self._buckets) > MOST_ADDRESSES:
            self._buckets.popitem(last=False)

    def succeeded(self, address: str, token_digest: str) -> None:
        """A token was right: this address is not kept from using it again."""
        pair = (_network(address), token_digest)
        self._trusted[pair] = None
        self._trusted.move_to_end(pair)
        while len(self._trusted) > MOST_TOKENS:
            self._trusted.popitem(last=False)

    def _filled(self, bucket: _Bucket) -> float:
        return min(self._most, bucket.left + (clock.monotonic() - bucket.at) * self._rate)


@lru_cache(maxsize=1024)
def _network(address: str) -> str:
    """An IPv6 caller has a whole /64 of addresses."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address  # a Unix socket, or a call within the process
    if isinstance(ip, ipaddress.IPv4Address):
        return address
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, 64), strict=False))
