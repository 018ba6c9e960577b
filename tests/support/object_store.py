"""An object store of the tests' own: moto's HTTP server, in a thread of this process."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Mapping
from itertools import count
from typing import Any

REGION = "us-east-1"


# moto keeps what is stored for the whole process: a second server must not come upon the first one's buckets.
NUMBERS = count()


class NoObjectStore(Exception):
    """There can be none here; the text says why."""


class ObjectStoreServer:
    """A real HTTP server that speaks S3, and forgets everything at its end."""

    def __init__(self) -> None:
        try:
            from moto.server import ThreadedMotoServer
        except ImportError:
            raise NoObjectStore("pip install 'moto[s3]' flask flask-cors") from None
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._make = ThreadedMotoServer
        self._server: Any = None
        self._port = 0
        self.start()

    def start(self) -> None:
        """Answer, on the port of before if there was one; what was stored before is still there."""
        self._server = self._make(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()
        self._port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        """Answer no more."""
        self._server.stop()

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a coordinator finds it and is let in by."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": REGION, "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
        }  # fmt: skip

    def bucket(self) -> str:
        """The URL of a prefix of a fresh bucket."""
        name = f"promptfed-{next(NUMBERS)}"
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")).close()
        return f"s3://{name}/some/prefix"
