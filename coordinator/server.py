"""The coordinator as a process: one server on one socket, which ends in a few seconds when it is asked to."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from types import FrameType
from typing import Literal

import uvicorn
from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError

from promptfed.coordinator.app import create_app, lifespan
from promptfed.coordinator.engine import log_lines
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.engine.token_expiry import has_expired
from promptfed.coordinator.http.connections import ACCEPTED_AT_ONCE, QUEUE, LimitedConnection
from promptfed.coordinator.problems import Refusal
from promptfed.coordinator.resources.federations import operations as federations
from promptfed.coordinator.settings import Settings, unread
from promptfed.coordinator.store import tokens
from promptfed.coordinator.store.backend import CannotOpen, DatabaseAway
from promptfed.coordinator.store.opening import Store, open_store
from promptfed.shared.errors import BadInput
from promptfed.shared.files import write_whole
from promptfed.shared.machine import share_heaps
from promptfed.shared.messages import ENDED
from promptfed.shared.service.addresses import bind, url_of
from promptfed.shared.service.open_files import HOW_TO_RAISE, most_connections, raise_open_files
from promptfed.shared.service.reasons import named, why
from promptfed.shared.service.yaml_text import read_mapping

log = logging.getLogger("promptfed.coordinator")

GRACE_SECONDS = 2  # for answers under way, once waiting requests have been woken
CANNOT_START = 2
DATABASE_AWAY = 3
INTERRUPTED = 130
NOT_TAKEN_UP = (CannotOpen, BadInput, DatabaseAway, SQLAlchemyError, OSError)


class Server(uvicorn.Server):
    """Wakes every long poll and stream when it is told to end, and calls ``ready`` once it answers."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, ready: Callable[[], None]):
        super().__init__(config)
        self._app = app
        self._ready = ready
        self._serving: asyncio.AbstractEventLoop | None = None
        self._open = AsyncExitStack()
        self.failure: Exception | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take up the federations, listen, and call ``ready`` once connections are accepted.

        Where they cannot be taken up, ``failure`` says why, and the server ends.
        """
        self._serving = asyncio.get_running_loop()
        try:
            # Not by the server's own events, which would make a page of log of one line.
            await self._open.enter_async_context(lifespan(self._app))
        except NOT_TAKEN_UP as error:
            self.failure = error
            self.should_exit = True
            return
        if (failed := getattr(self._app.state, "failed", None)) is not None:
            failed.add_done_callback(self._end)
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(QUEUE)  # asyncio has one number for this and for how many it accepts at once
        self._ready()

    def _end(self, turns: asyncio.Task[None]) -> None:
        """The coordinator cannot wait for further turns."""
        error = turns.exception() if not turns.cancelled() else None
        if error is not None:
            self.failure = error if isinstance(error, Exception) else None
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End connections, then let go of the federations."""
        try:
            await super().shutdown(sockets)
        finally:
            await self._open.aclose()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGTERM or Ctrl-C. Unlike the base, the signal is not raised again: this end is an orderly one."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        if self._serving is not None:
            # This is a signal handler: the event loop may be anywhere.
            self._serving.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        registry = getattr(self._app.state, "registry", None)
        if registry is not None:
            registry.stop_waiting()


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit code: 0, or with one line on stderr 2 where it cannot start, 3 where the
    database did not answer in time.
    """
    log_lines.configure(settings.log_level, settings.log_format)
    for line in unread():
        log.warning("%s", line)
    raise_open_files()
    share_heaps()
    try:
        with _ended_by_sigterm():
            _check(settings)
            listening = _bind(settings)
            store = open_store(settings) if settings.advertise_url is None else None
    except (CannotOpen, BadInput, OSError) as error:
        cause = named(error) if isinstance(error, OSError) else error
        print(f"coordinator: {cause}", file=sys.stderr)
        return CANNOT_START
    except DatabaseAway as error:
        print(f"coordinator: {error}; given up after {settings.database_wait_seconds:g} s", file=sys.stderr)
        return DATABASE_AWAY
    except KeyboardInterrupt:
        return INTERRUPTED
    base_url = url_of(listening, settings.host, "https" if settings.tls_cert else "http")

    def ready() -> None:
        if store is None:
            log.info(
                "listening on %s, data in %s: waiting until no other coordinator works", base_url, settings.data_dir
            )
        else:
            place = store.database.backend.place
            log.info("listening on %s, data in %s, database at %s", base_url, settings.data_dir, place)
            token = settings.data_dir / tokens.OPERATOR_FILE
            log.info("the operator's page is %s/; its token lies in %s", base_url, token)
            _warn_of_file_limit(app.state.registry)
        if settings.port_file is not None:
            write_whole(settings.port_file, f"{base_url}\n".encode(), synced=False)

    app = create_app(settings)
    app.state.store = store
    server = Server(_config(settings, app), app, ready)
    # A full collection would go through all that importing has brought (half a second in which nothing else runs),
    # again and again while a long report is made.
    gc.freeze()
    server.run(sockets=[listening])
    if server.failure is not None:
        print(f"coordinator: {_why(server.failure, store)}", file=sys.stderr)
        return DATABASE_AWAY if isinstance(server.failure, DatabaseAway) else CANNOT_START
    if not server.started:
        return CANNOT_START
    if getattr(app.state, "registry", None) is not None and app.state.registry.computing:
        # The interpreter would wait for the computing thread. Nothing is lost: it starts again from what is committed.
        logging.shutdown()
        os._exit(0)
    return 0


def _warn_of_file_limit(registry: Registry) -> None:
    """Warn if more clients have enrolled, or may enrol with tokens, than there may be connections."""
    running = [federation for federation in registry.federations.values() if federation.run.state not in ENDED]
    open_tokens = [token for federation in running for token in federation.tokens.values() if not token.closed]
    left = sum(token.uses - token.used for token in open_tokens if not has_expired(token))
    enrolled, most = sum(len(federation.clients) for federation in running), most_connections()
    if enrolled + left > most:
        text = "open files are enough for %d clients; %d have enrolled and %d may with the tokens that are out: %s"
        log.warning(text, most, enrolled, left, HOW_TO_RAISE)


def _why(error: Exception, store: Store | None) -> str:
    """One line on why the federations could not be taken up."""
    if store is None:
        return str(error)
    database = store.database
    if database.is_full(error):
        return f"the disk of {database.backend.place} is full: make room, and start it again"
    if isinstance(error, SQLAlchemyError):
        return database.cannot_be_read(error)
    return str(error)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Until the server handles signals itself: the first process of a container would go on waiting."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _config(settings: Settings, app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop=event_loop(),
        http=LimitedConnection,
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=settings.forwarded_allow_ips is not None,
        forwarded_allow_ips=settings.forwarded_allow_ips or "",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=75,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        # Asked for, not demanded: operators come by tokens; that clients have one is seen where they are known.
        ssl_ca_certs=str(settings.tls_client_ca) if settings.tls_client_ca is not None else None,
        ssl_cert_reqs=ssl.CERT_NONE if settings.tls_client_ca is None else ssl.CERT_OPTIONAL,
    )


def event_loop() -> Literal["uvloop", "asyncio"]:
    """The faster one where there is one for this platform; the parser of requests is the same with both."""
    if importlib.util.find_spec("uvloop") is not None:
        return "uvloop"
    log.warning("uvloop is not installed: asyncio's own event loop serves, and takes fewer updates a second")
    return "asyncio"


def _check(settings: Settings) -> None:
    """Say in one line what would otherwise end the start with a traceback."""
    if settings.bootstrap is not None:
        try:
            federations.resolve(read_mapping(settings.bootstrap))
        except Refusal as refusal:
            raise BadInput(f"{settings.bootstrap}: {refusal.detail}") from None
    if settings.enrolment_token_file is not None and not os.access(settings.enrolment_token_file.parent, os.W_OK):
        text = f"cannot write the enrolment token into {settings.enrolment_token_file.parent}: make the folder writable"
        raise BadInput(f"{text}, or mount the volume from which clients read it there")
    if settings.tls_cert is not None:
        try:
            # An empty password: nobody is there to be asked for one.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key, lambda: "")
        except OSError as error:
            files = f"--tls-cert {settings.tls_cert} and --tls-key {settings.tls_key}"
            raise OSError(f"{files} cannot be used: {why(error)}") from None
    if settings.tls_client_ca is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(settings.tls_client_ca))
        except OSError as error:
            text = f"--tls-client-ca {settings.tls_client_ca} cannot be used: {why(error)}"
            raise OSError(text) from None


def _bind(settings: Settings) -> socket.socket:
    try:
        return bind(settings.host, settings.port)
    except OSError as error:
        raise OSError(f"cannot listen on {settings.host}:{settings.port}: {why(error)}") from None
