"""HTTP clients that send a request again, as the real clients do, and the operator's calls through one of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import httpx

from promptfed.testing.coordinator import OperatorCalls
from tests.support.open_phases import kind


class Resending(ABC):
    """What the fakes use of an `httpx.Client`; ``resent`` counts the requests that were sent again."""

    resent = 0

    @abstractmethod
    def request(self, verb: str, url: str, **options: Any) -> httpx.Response:
        """The answer to the request, however often it has to be sent."""

    def get(self, url: str, **options: Any) -> httpx.Response:
        return self.request("GET", url, **options)

    def put(self, url: str, **options: Any) -> httpx.Response:
        return self.request("PUT", url, **options)

    def post(self, url: str, **options: Any) -> httpx.Response:
        return self.request("POST", url, **options)


class ResendingRefused(Resending):
    """Sends a request again where it is refused with ``status``; each refusal must be just as it is described.

    ``retry_after``: the header that it must have, if any.
    """

    def __init__(self, http: httpx.Client, status: int, problem: str, seconds: float, retry_after: str | None = None):
        self._http, self._status, self._problem = http, status, problem
        self._seconds, self._retry_after = seconds, retry_after

    def request(self, verb: str, url: str, **options: Any) -> httpx.Response:
        end = time.monotonic() + self._seconds
        while True:
            response = self._http.request(verb, url, **options)
            if response.status_code != self._status:
                return response
            assert kind(response) == self._problem
            assert self._retry_after in (None, response.headers.get("Retry-After"))
            assert time.monotonic() < end, "it does not come back"
            self.resent += 1
            time.sleep(0.02)


class ResendingUnanswered(Resending):
    """Sends a request again until it is answered."""

    def __init__(self, http: httpx.Client):
        self._http = http

    def request(self, verb: str, url: str, **options: Any) -> httpx.Response:
        for _ in range(200):
            try:
                return self._http.request(verb, url, **options)
            except httpx.TransportError:
                self.resent += 1
        raise AssertionError(f"no answer to {verb} {url}")


class ResendingApi(OperatorCalls):
    """The operator of a coordinator that is reached through ``resending``."""

    def __init__(self, resending: Resending, operator: dict[str, str]):
        self.http = resending
        self.operator = operator

    @property
    def resent(self) -> int:
        """How many requests were sent again."""
        return self.http.resent
