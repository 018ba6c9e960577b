"""Answers that come at the same moment, so that the coordinator commits them as one group."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import httpx
import pytest

from promptfed.testing.clients import ScriptedClient, trained, update_body
from promptfed.testing.coordinator import RealCoordinator
from tests.support.waiting import PATIENCE

COMMITTER = "promptfed.coordinator.engine.committer"
GATHER: dict[str, float] = {f"{COMMITTER}.QUIET_SECONDS": 3600.0, f"{COMMITTER}.MOST_SECONDS": 0.5}
"""Constants of a coordinator whose groups wait for more, so that they get all."""


def at_once(calls: Sequence[Callable[[], httpx.Response]], entries: int | None = None) -> list[httpx.Response | None]:
    """The answer to each, or None where there was none; all are sent together.

    A coordinator in this process goes by `GATHER` meanwhile, and not before: what prepares a test is no group. Where it
    is told how many ``entries`` come to be committed, their group is whole with the last of them, however late it is.
    """
    constants = dict(GATHER)
    if entries is not None:
        constants |= {f"{COMMITTER}.MOST": entries, f"{COMMITTER}.MOST_SECONDS": PATIENCE}
    found: list[httpx.Response | None] = [None] * len(calls)
    begin = threading.Barrier(len(calls))

    def send(number: int) -> None:
        begin.wait()
        with contextlib.suppress(httpx.TransportError):
            found[number] = calls[number]()

    threads = [threading.Thread(target=send, args=(number,)) for number in range(len(calls))]
    with contextlib.ExitStack() as stack:
        for name, value in constants.items():
            stack.enter_context(mock.patch(name, value))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


def updates_of(clients: Sequence[ScriptedClient], tasks: Sequence[dict[str, Any]]) -> list[bytes]:
    """The update of each client."""
    return [
        update_body(trained(client.payload(task), client.name, task), task)
        for client, task in zip(clients, tasks, strict=True)
    ]


def commits(coordinator: RealCoordinator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries each group had."""
    sizes: list[int] = []
    together = coordinator.registry.committer._together

    def counted(entries: Any) -> Any:
        sizes.append(len(entries))
        return together(entries)

    monkeypatch.setattr(coordinator.registry.committer, "_together", counted)
    return sizes
