"""Several coordinators on one database and one object store, and a caller who asks any of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from promptfed.testing.clients import bearer
from tests.support.ports import free_port
from tests.support.resending import Resending
from tests.support.waiting import PATIENCE

TOKEN = "0123456789abcdef" * 4
OPERATOR = bearer(TOKEN)
AGAIN = (502, 503)


def shared_options(folder: Path, database_url: str, store: str) -> dict[str, Any]:
    """The settings that all have; each has a folder, a port and an address of its own beside."""
    folder.mkdir(parents=True, exist_ok=True)
    token, key = folder / "operator.token", folder / "signing.key"
    if not token.exists():
        token.write_text(TOKEN)
        made = Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        key.write_bytes(made)
    return {"database_url": database_url, "store": store, "operator_token_file": token, "signing_key_file": key}


def own_options() -> dict[str, Any]:
    """A free port, and the address that it makes."""
    port = free_port()
    return {"port": port, "advertise_url": f"http://127.0.0.1:{port}"}


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Settings as a command line."""
    return list(
        itertools.chain.from_iterable((f"--{name.replace('_', '-')}", str(value)) for name, value in options.items())
    )


class AnyOf(Resending):
    """Sends a request to one of several addresses, and to the next where that does not answer or waits.

    Every answer goes to ``told``; ``patience`` is how long one server may take for its answer.
    """

    def __init__(
        self, urls: Sequence[str], told: Callable[[httpx.Response], None] | None = None, patience: float = 3.0
    ):
        self.urls = list(urls)
        self._told = told
        self._http = httpx.Client(timeout=httpx.Timeout(patience, connect=2.0))
        self._turns = itertools.cycle(range(len(self.urls)))
        self._working: str | None = None

    def request(self, verb: str, url: str, **options: Any) -> httpx.Response:
        end = time.monotonic() + PATIENCE
        while True:
            base = self._working or self.urls[next(self._turns)]
            try:
                response = self._http.request(verb, base + url, **options)
            except httpx.TransportError:
                response = None
            if response is not None and response.status_code not in AGAIN:
                self._working = base
                if self._told is not None:
                    self._told(response)
                return response
            self._working = None
            assert time.monotonic() < end, f"no answer to {verb} {url}"
            self.resent += 1
            time.sleep(0.05)

    def close(self) -> None:
        """Hang up."""
        self._http.close()
