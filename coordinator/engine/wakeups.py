"""Wakeups: how a change wakes the requests that wait for it. All of it happens on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable


class Wakeups:
    """One-shot events by key. Listen first, then look, then wait: no wakeup is missed."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, asyncio.Event] = {}
        self.closed = False

    def listen(self, key: Hashable) -> asyncio.Event:
        """The event that the next wakeup for ``key`` sets."""
        wakeup = self._waiting.setdefault(key, asyncio.Event())
        if self.closed:
            wakeup.set()
        return wakeup

    def wake(self, keys: Iterable[Hashable]) -> None:
        """Wake those who listen for one of ``keys``."""
        for key in keys:
            wakeup = self._waiting.pop(key, None)
            if wakeup is not None:
                wakeup.set()

    def wake_all(self) -> None:
        """Wake everybody who listens now."""
        self.wake(list(self._waiting))

    def close(self) -> None:
        """Wake everybody, now and from now on: nothing more is to be waited for."""
        self.closed = True
        self.wake_all()


async def wait(wakeup: asyncio.Event, seconds: float) -> bool:
    """Whether ``wakeup`` came within ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await wakeup.wait()
    except TimeoutError:
        return False
    return True
