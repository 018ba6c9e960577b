"""What came of a federation after one of its rounds, as its coordinator tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from promptfed.sdk.client import CommandError, Coordinator
from promptfed.sdk.exit_codes import Exit
from promptfed.sdk.progress import pages


@dataclass(frozen=True)
class Taken:
    """A federation after ``round``.

    ``federation``, ``clients`` and ``reports`` (of the rounds up to ``round``) are what ``GET /v1/federations/{id}``,
    ``.../clients`` and ``.../rounds`` answer; ``body`` is the global state as safetensors, and ``state_hash`` its name.
    """

    federation: dict[str, Any]
    clients: list[dict[str, Any]]
    reports: list[dict[str, Any]]
    round: int
    body: bytes
    state_hash: str

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved spec."""
        found: dict[str, Any] = self.federation["spec"]
        return found

    def evaluation(self) -> tuple[int, dict[str, Any]] | None:
        """The last evaluation up to ``round``: after which round, and what each client measured."""
        for report in reversed(self.reports):
            if report["evaluation"] and report["evaluation"]["clients"]:
                return report["round"], report["evaluation"]["clients"]
        return None


def take(api: Coordinator, federation: str, round: int | None = None) -> Taken:
    """Everything about ``federation`` after ``round``, or after its last finished one.

    Raises:
        CommandError: the coordinator refuses, or what came over the network is not the state that it names.
    """
    path = f"/v1/federations/{federation}"
    found = api.get(path)
    reports = list(pages(api, f"{path}/rounds", "rounds"))
    if round is None:
        round = max((report["round"] for report in reports if report["state_hash"]), default=0)
    answer = api.call(
        "GET", f"{path}/prompts", params={"round": str(round)}, headers={"Accept": "application/octet-stream"}
    )
    named = answer.headers["etag"].strip('"')
    _check(answer.body, named)
    return Taken(
        federation=found,
        clients=list(pages(api, f"{path}/clients", "clients")),
        reports=[report for report in reports if report["round"] <= round],
        round=round,
        body=answer.body,
        state_hash=named,
    )


def _check(body: bytes, named: str) -> None:
    from promptfed.shared.tensors import TensorError, decode, state_hash

    try:
        found = state_hash(decode(body)[0])
    except TensorError as error:
        raise CommandError(f"the coordinator's state cannot be read: {error}", Exit.FAILED) from None
    if found != named:
        raise CommandError(f"the state has the hash {found}, not {named}: it was damaged on its way", Exit.FAILED)
