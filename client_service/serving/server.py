"""A server within the process, which leaves signals to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn
from fastapi import FastAPI

from promptfed.client_service.exits import ClientError, Exit
from promptfed.shared.service.addresses import bind, url_of
from promptfed.shared.service.http_connection import LimitedHttpProtocol
from promptfed.shared.service.reasons import why

STOP_SECONDS = 1


class _Server(uvicorn.Server):
    """A server that leaves signals to the process around it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def running_api(app: FastAPI, host: str, port: int, option: str = "--api-port") -> AsyncIterator[str]:
    """Serve ``app`` on ``host`` and ``port`` (0: any free one) while the block runs; its address.

    ``option`` is the command's option for the port, for the error text.

    Raises:
        ClientError: USAGE where the address cannot be bound.
    """
    try:
        listening = bind(host, port)
    except OSError as error:
        text = f"cannot listen on {host} port {port} ({option}): {why(error)}"
        raise ClientError(Exit.USAGE, text) from None
    config = uvicorn.Config(
        app,
        http=LimitedHttpProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    server = _Server(config)
    listening.listen(config.backlog)  # whoever is told the address at once is let in, once the server runs
    serving = asyncio.create_task(server.serve([listening]))
    try:
        yield url_of(listening, host)
    finally:
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await asyncio.wait({serving}, timeout=STOP_SECONDS + 0.5)
        listening.close()
