"""A federation of scripted clients that chooses among four learning rates before round 1."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from promptfed.testing.clients import ScriptedClient, bearer, spec
from promptfed.testing.coordinator import OperatorCalls
from tests.support.waiting import PATIENCE

NAMES = ("a", "b")
RATES = (0.01, 0.02, 0.03, 0.04)
ACCURACIES = {0.01: 0.30, 0.02: 0.50, 0.03: 0.70, 0.04: 0.60}
"""What the scripted clients report of each candidate, by its rate; the second client two points more."""


def tuned(**changes: Any) -> dict[str, Any]:
    """A federation that compares four learning rates: the spec's own is the first."""
    others = [{"method": {"name": "promptfl", "m": 4}, "training": {"learning_rate": rate}} for rate in RATES[1:]]
    section = {"candidates": others, "rounds": 3, "held_out": 0.25}
    return spec(training={"learning_rate": RATES[0]}, tuning=section, **changes)


class Site:
    """A scripted client that takes part in the trials, then in the rounds."""

    def __init__(self, api: OperatorCalls, federation: str, name: str):
        self.api, self.name = api, name
        self.own = ScriptedClient(api.http, federation, name, 0.9)
        self.sent: dict[str, bytes] = {}  # by task, as a client keeps what it has made

    def go_on(self) -> bool:
        """Answer what there is to answer; whether the federation has ended."""
        try:
            answer = self.api.http.post(f"{self.own.path}/trial", headers=self.own.headers)
            if answer.status_code == 410:
                return True
            offer = answer.json() if answer.status_code == 200 else {}
            if offer.get("chosen") is not None:
                return self._client(self.own.federation, 0.9).work()
            if offer.get("federation") is not None:
                self._try(offer)
        except httpx.HTTPError:
            time.sleep(0.05)  # it is being started again
        return False

    def _client(self, federation: str, accuracy: float) -> ScriptedClient:
        return ScriptedClient(self.api.http, federation, self.name, accuracy, self.sent)

    def _try(self, offer: dict[str, Any]) -> None:
        path = f"/v1/federations/{offer['federation']}"
        if offer["token"] is not None:
            info = self.api.http.get(f"{path}/enrolment", headers=bearer(offer["token"])).json()
            assert info["held_out"] == 0.25
            assert "tuning" not in info
            answer = self._client(offer["federation"], 0).enrol(offer["token"])
            assert answer.status_code == 201, answer.text
        more = 0.02 * NAMES.index(self.name)
        self._client(offer["federation"], ACCURACIES[RATES[offer["candidate"]]] + more).work()


def play(api: OperatorCalls, federation: str, until: Callable[[], bool] = lambda: False) -> None:
    """Let the clients go on until the federation has ended, or ``until`` says so."""
    sites, end = [Site(api, federation, name) for name in NAMES], time.monotonic() + PATIENCE
    while sum(site.go_on() for site in sites) < len(sites) and not until():
        assert time.monotonic() < end, "the federation does not end"
        time.sleep(0.005)


def outcome(api: OperatorCalls, federation: str) -> tuple[Any, ...]:
    view = api.get(federation)
    trials = [(one["rung"], one["candidate"], one["accuracy"]) for one in view["trials"]]
    return view["state"], view["spec"]["tuning"]["chosen"], trials, view["state_hash"]
