"""The long poll for a client's next task."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request
from pydantic import BaseModel, Field

from promptfed.coordinator import problems
from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Client, Federation, OpenTask
from promptfed.coordinator.engine.registry import Registry, wait
from promptfed.coordinator.http.deps import NO_NUL, CallingClient
from promptfed.coordinator.resources.tasks.served import message
from promptfed.shared.messages import ENDED, Task

HELD_SECONDS = 15.0  # that an answer waits for a task at most: many proxies end a silent connection after 20


class Poll(BaseModel):
    """What a client asks by with a poll."""

    wait: Annotated[float, Field(ge=0, le=60, description="seconds; longer than 15 is 15")] = 0
    carrying: Annotated[
        str | None, Field(max_length=100, pattern=NO_NUL, description="the task that the client carries out")
    ] = None
    progress: Annotated[float | None, Field(ge=0, le=1, description="the part of its steps that is done")] = None
    inline: Annotated[bool, Field(description="a payload of at most 64 KB comes within the task")] = False


async def next_task(
    request: Request, caller: CallingClient, wait_seconds: float, carrying: str | None = None, inline: bool = False
) -> Task | None:
    """The task; None if there is none within ``wait_seconds``. Raises as ``get_task`` describes.

    ``inline``: with its payload, if that is small and in memory.
    """
    registry: Registry = request.app.state.registry
    key = (caller.federation.id, caller.client.name)
    until = clock.monotonic() + min(wait_seconds, HELD_SECONDS)
    with registry.waits.begun(key, request.receive if wait_seconds > 0 else None) as waiting:
        while True:
            wakeup = registry.wakeups.listen(key)
            if registry.away:
                raise problems.StoreAway
            served = _open_task(registry, caller.federation.id, caller.client)
            if carrying is not None:
                served = _other_task(registry, caller, carrying, served)
            left = until - clock.monotonic()
            if served is not None:
                # Where something on the way has hung up, no payload counts as served.
                return message(registry, *served, inline and not waiting.over)
            if left <= 0 or registry.wakeups.closed or waiting.over:
                return None
            await wait(wakeup, left)


def _open_task(registry: Registry, id: str, client: Client) -> tuple[Federation, OpenTask] | None:
    federation, name = registry.get(id), client.name
    if federation.clients[name].secret_digest != client.secret_digest:
        raise problems.Unauthorized("the operator has reset this client's name: enrol again")
    if not federation.run.members[name].active:
        raise problems.Withdrawn("the operator has withdrawn this client from the federation")
    if federation.run.state in ENDED:
        raise problems.Ended(f"{federation.name} is {federation.run.state}: there will be no more tasks")
    task = federation.tasks.get(name)
    if federation.run.state != "running" or task is None or task.payload_sha256 is None or federation.deadline is None:
        return None
    return federation, task


def _other_task(
    registry: Registry, caller: CallingClient, carrying: str, served: tuple[Federation, OpenTask] | None
) -> tuple[Federation, OpenTask] | None:
    """The task that is served instead of ``carrying``; None while that is open, also in a paused federation."""
    open_now = registry.get(caller.federation.id).tasks.get(caller.client.name)
    if open_now is not None and open_now.id == carrying:
        return None
    if served is None:
        raise problems.PhaseClosed(f"task {carrying} is no longer open: stop it")
    return served
