"""Bells: how a change wakes the requests that wait for it. All of it happens on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable


class Bells:
    """One-shot events by key. Listen first, then look, then wait: no ring is missed."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, asyncio.Event] = {}
        self.silenced = False

    def listen(self, key: Hashable) -> asyncio.Event:
        """The event that the next ring for ``key`` sets."""
        bell = self._waiting.setdefault(key, asyncio.Event())
        if self.silenced:
            bell.set()
        return bell

    def ring(self, keys: Iterable[Hashable]) -> None:
        """Wake those who listen for one of ``keys``."""
        for key in keys:
            bell = self._waiting.pop(key, None)
            if bell is not None:
                bell.set()

    def ring_all(self) -> None:
        """Wake everybody who listens now."""
        self.ring(list(self._waiting))

    def silence(self) -> None:
        """Wake everybody, now and from now on: nothing more is to be waited for."""
        self.silenced = True
        self.ring_all()


async def wait(bell: asyncio.Event, seconds: float) -> bool:
    """Whether ``bell`` rang within ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await bell.wait()
    except TimeoutError:
        return False
    return True
