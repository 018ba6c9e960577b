"""Heartbeats: white space that waiting polls are sent, so that their clients notice when this coordinator is gone.

One timer serves all of them. In each of its turns it writes to a part of the polls, so that ten thousand of them do not
hold up other requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from starlette.types import Message, Send

from promptfed.coordinator.engine.registry import Registry
from promptfed.shared.service.addresses import HEARTBEAT_SECONDS

TURNS = 20  # in which all polls have had a heartbeat
BEAT: Message = {"type": "http.response.body", "body": b" ", "more_body": True}


class Heartbeats:
    """Sends a heartbeat to every waiting poll that asked for them, as long as the registry's leases are fresh."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._polls: list[set[Send]] = [set() for _ in range(TURNS)]
        self._turn = 0
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def sent_by(self, send: Send) -> Iterator[None]:
        """A block in which heartbeats are sent by ``send``, the first of them a whole period from now."""
        polls = self._polls[self._turn]
        polls.add(send)
        if self._timer is None:
            self._wait()
        try:
            yield
        finally:
            polls.discard(send)

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS / TURNS, self._beat)

    def _beat(self) -> None:
        self._turn = (self._turn + 1) % TURNS
        self._timer = None
        if self._registry.away:
            # Others may have taken the federations over: the polls end, and their clients look elsewhere.
            self._registry.wakeups.wake_all()
            return
        if any(self._polls):
            self._wait()
        for send in list(self._polls[self._turn]):
            _send_now(send)


def _send_now(send: Send) -> None:
    """Send a heartbeat, unless that would wait: whoever does not read holds up nobody else."""
    sending = cast(Coroutine[Any, Any, None], send(BEAT))
    with suppress(StopIteration):
        sending.send(None)
    sending.close()
