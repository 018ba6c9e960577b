"""What a simulated federation came to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from promptfed.shared.tensors import Tensors


@dataclass(frozen=True)
class Accuracy:
    """One client's accuracy on one of its test sets after a round, with the template's beside it (fractions)."""

    round: int
    client: str
    role: str
    domain: str | None
    split: str
    accuracy: float
    zero_shot: float | None
    num_samples: int


@dataclass(frozen=True)
class Simulated:
    """A finished federation.

    ``spec`` is the resolved spec as it ran, ``federation``, ``clients`` and ``reports`` (by round, from 0) are what the
    coordinator answers at ``GET /v1/federations/{id}``, ``.../clients`` and ``.../rounds``. Bytes are those of payloads
    (down) and updates (up).
    ``client_seconds`` is the sum over all tasks of what clients spent computing, ``wall_seconds`` the time from the
    start of the first round to the end of the federation, ``setup_seconds`` what came before it (data, features,
    enrolment).
    """

    spec: dict[str, Any]
    federation: dict[str, Any]
    clients: list[dict[str, Any]]
    reports: list[dict[str, Any]]
    state: Tensors
    state_hash: str
    backbone_fingerprint: str
    bytes_up: int
    bytes_down: int
    client_seconds: float
    wall_seconds: float
    setup_seconds: float

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return int(self.federation["round"])

    def accuracies(self, round: int | None = None) -> list[Accuracy]:
        """What the clients measured after ``round``, or in all evaluated rounds; in order of round, client, split."""
        return [one for report in self.reports if round in (None, report["round"]) for one in accuracies_of(report)]

    def final(self) -> list[Accuracy]:
        """What the clients measured after the last round."""
        return self.accuracies(self.rounds)


def accuracies_of(report: dict[str, Any]) -> Iterator[Accuracy]:
    """What the clients measured after the round of ``report``, in order of client and split."""
    found = report["evaluation"]["clients"] if report["evaluation"] else {}
    for client, one in sorted(found.items()):
        for split, result in sorted(one["splits"].items()):
            plain = split.partition("@")[0]  # a further classifier's split is reported as split@variant
            zero_shot = one["zero_shot"].get(plain)
            yield Accuracy(
                round=report["round"],
                client=client,
                role=one["role"],
                domain=one["domain"],
                split=split,
                accuracy=result["accuracy"],
                zero_shot=zero_shot["accuracy"] if zero_shot else None,
                num_samples=result["num_samples"],
            )


def seconds_of_clients(reports: list[dict[str, Any]]) -> float:
    """What all clients spent on tasks, in seconds, by their own clocks."""
    trained = sum(
        update["metrics"].get("train_seconds", 0.0)
        for report in reports
        for phase in report["phases"]
        for update in phase["updates"]
    )
    evaluated = sum(
        client["metrics"].get("evaluate_seconds", 0.0)
        for report in reports
        if report["evaluation"]
        for client in report["evaluation"]["clients"].values()
    )
    return float(trained + evaluated)
