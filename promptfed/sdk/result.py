"""The result of a federation or a simulation, for commands, library, trackers, exports and benches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from promptfed.sdk.client import parse
from promptfed.shared.api.api_schemas import FederationView
from promptfed.shared.api.export_card import Facts
from promptfed.shared.api.report_schemas import ClientEvaluation, RoundReport
from promptfed.shared.metrics.estimates import gain_margin, mean_interval
from promptfed.shared.metrics.outcomes import Outcomes

if TYPE_CHECKING:
    from promptfed.shared.tensors import Tensors


@dataclass(frozen=True)
class Accuracy:
    """One client's accuracy on one of its test sets after a round, and the template's accuracy (both fractions).

    ``low`` and ``high``: the 95 % interval of ``accuracy``; None of average precision, and of noisy counts.

    ``ece`` (calibration error, 15 bins), ``macro_f1`` and ``auroc`` (means over the classes), and the share of the most
    frequent class among labels (``majority``) and answers (``one_answer``) are None if the client's owner did not agree
    to send them.
    """

    round: int
    client: str
    role: str
    domain: str | None
    split: str
    accuracy: float
    zero_shot: float | None
    num_samples: int
    ece: float | None = None
    macro_f1: float | None = None
    auroc: float | None = None
    majority: float | None = None
    one_answer: float | None = None
    low: float | None = None
    high: float | None = None


def interval_of(members: Sequence[Accuracy]) -> tuple[float, float] | None:
    """The 95 % interval of the clients' mean accuracy; None where one of them has none."""
    if not members or any(row.low is None for row in members):
        return None
    return mean_interval([(row.accuracy, row.num_samples) for row in members])


def margin_of(members: Sequence[Accuracy]) -> float | None:
    """Half of the 95 % interval of the clients' mean gain over zero-shot; None where one of them has none."""
    pairs = [(row.zero_shot, row.accuracy, row.num_samples) for row in members if row.zero_shot is not None]
    if not members or len(pairs) < len(members) or interval_of(members) is None:
        return None
    return gain_margin(pairs)


@dataclass(frozen=True)
class FederationReports:
    """How a federation stands, and what its rounds measured.

    ``status`` is the answer of ``GET /v1/federations/{id}`` and ``reports`` (by round, from 0) those of
    ``GET .../rounds``. Both are kept unparsed, since reports can have megabytes.
    """

    status: dict[str, Any]
    reports: list[dict[str, Any]]

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved spec."""
        spec: dict[str, Any] = self.status["spec"]
        return spec

    @cached_property
    def federation(self) -> FederationView:
        """The status as a model. Raises PromptfedError if this promptfed does not understand it."""
        return parse(FederationView, self.status)

    @cached_property
    def round_reports(self) -> list[RoundReport]:
        """The reports as models."""
        return [parse(RoundReport, report) for report in self.reports]

    @property
    def bytes_up(self) -> int:
        """Bytes of all updates."""
        return sum(report["bytes_up"] for report in self.reports)

    @property
    def bytes_down(self) -> int:
        """Bytes of all payloads."""
        return sum(report["bytes_down"] for report in self.reports)

    @property
    def client_seconds(self) -> float:
        """Seconds that all clients spent on tasks, by their own clocks."""
        updates = (update for report in self.round_reports for phase in report.phases for update in phase.updates)
        stages = (report.evaluation for report in self.round_reports if report.evaluation is not None)
        trained = sum(update.metrics.get("train_seconds", 0.0) for update in updates)
        measured = (client for stage in stages for client in stage.clients.values())
        return trained + sum(client.metrics.get("evaluate_seconds", 0.0) for client in measured)

    @property
    def result_round(self) -> float:
        """The round whose state is the result: a finished federation's selected one; infinite: the last one."""
        chosen = self.status.get("selection") if self.status["state"] == "finished" else None
        return math.inf if chosen is None else int(chosen["round"])

    @property
    def evaluated_round(self) -> int | None:
        """The last round up to the result's that clients measured; None before the first evaluation."""
        measured = (report["round"] for report in reversed(self.reports) if _measured(report))
        return next((round for round in measured if round <= self.result_round), None)

    @property
    def result_hash(self) -> str | None:
        """The hash of the result's state; None before the start."""
        hashes = (one.get("state_hash") for one in reversed(self.reports) if one["round"] <= self.result_round)
        return next((hash for hash in hashes if hash), None)

    def accuracies(self, round: int | None = None) -> list[Accuracy]:
        """Clients' accuracies after ``round``, or after all evaluated rounds, by round, client and split."""
        reports = (report for report in self.reports if round in (None, report["round"]))
        return [accuracy for report in reports for accuracy in _accuracies(report, self.spec.get("task"))]

    def final(self) -> list[Accuracy]:
        """Clients' accuracies in the result's evaluation: the selected round's, or the last one."""
        return [] if self.evaluated_round is None else self.accuracies(self.evaluated_round)


@dataclass(frozen=True)
class FederationResult(FederationReports):
    """A federation after ``round``, with its state.

    ``body`` is the global state as safetensors, ``state_hash`` its hash and ``card`` the answer of ``GET .../card``.
    ``final_body``: the last round's state, where ``round`` is an earlier one that was selected.

    Only simulations set the rest. ``wall_seconds`` is the time from the start of the first round to the end and
    ``setup_seconds`` the time before it (data, features, enrolment). ``outcomes`` holds all clients' last answers on
    their test sets for each image.
    """

    card: Mapping[str, Any] = field(default_factory=dict)
    round: int = 0
    body: bytes = b""
    state_hash: str = ""
    final_body: bytes = b""
    wall_seconds: float = 0.0
    setup_seconds: float = 0.0
    outcomes: tuple[Outcomes, ...] = ()

    @property
    def result_round(self) -> float:
        """The round after which the state was taken."""
        return self.round

    @cached_property
    def facts(self) -> Facts:
        """What the coordinator knows of the result: who took part, accuracies, the cost of privacy."""
        return parse(Facts, self.card)

    @cached_property
    def state(self) -> Tensors:
        """The global state by name."""
        from promptfed.shared.tensors.torch_tensors import decode

        return decode(self.body)[0]


def _measured(report: Mapping[str, Any]) -> dict[str, Any]:
    measured: dict[str, Any] = report["evaluation"]["clients"] if report["evaluation"] else {}
    return measured


def _accuracies(report: Mapping[str, Any], task: str | None) -> Iterator[Accuracy]:
    for client, raw in sorted(_measured(report).items()):
        evaluation = parse(ClientEvaluation, raw)
        for split, result in sorted(evaluation.splits.items()):
            low, high = evaluation.interval(split, task) or (None, None)
            yield Accuracy(
                round=report["round"],
                client=client,
                role=evaluation.role,
                domain=evaluation.domain,
                split=split,
                accuracy=result.accuracy,
                zero_shot=evaluation.template_accuracy(split),
                num_samples=result.num_samples,
                low=low,
                high=high,
                **result.figures(),
            )
