"""The facts of an export's card, from the database and the stored state."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.resources.clients.views import client_view
from promptfed.coordinator.resources.federations.views import federation_view
from promptfed.coordinator.resources.results.rounds import round_report, rounds
from promptfed.coordinator.resources.results.states import state_of
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import ClientRow, StateRow
from promptfed.shared.api import export_card
from promptfed.shared.api.api_schemas import ClientView, FederationView
from promptfed.shared.api.report_schemas import CentralPrivacy, EvaluationReport, RoundReport, SpentPrivacy
from promptfed.shared.canonical import canonical_json
from promptfed.shared.cards.card_text import described
from promptfed.shared.methods import METHODS
from promptfed.shared.spec.spec import TEMPLATE
from promptfed.shared.tensors import Arrays, decode_place, encode, method_part, state_hash


@dataclass(frozen=True)
class Exported:
    """The method's part of a state, its bytes (the stored ones where it has no other), and its entry in a card."""

    state: Arrays
    body: bytes | Path
    file: export_card.CardFile


@dataclass(frozen=True)
class Known:
    """The coordinator's data on a result: its state, and ``final``, the last round's."""

    view: FederationView
    facts: export_card.Facts
    state: Exported
    final: Callable[[], Exported]


def known_of(registry: Registry, federation: Federation, round: int) -> Known:
    """The coordinator's data on the result after ``round``. Raises NoState."""
    registry.last_seen.flush_if_possible()
    with registry.database.read() as session:
        stored = state_of(session, federation, round)
        last = state_of(session, federation, None)
        view = federation_view(session, federation)
        clients = [client_view(row) for row in session.scalars(queries.clients(federation.id).order_by(ClientRow.name))]
        begun = (number for number in rounds(session, federation.id) if number <= round)
        tally = Tally(round_report(session, federation, number) for number in begun)
    exported = _exported(registry, stored)
    facts = _facts(view, clients, tally, state_hash(exported.state), round)
    return Known(view, facts, exported, lambda: _exported(registry, last))


def _exported(registry: Registry, stored: StateRow) -> Exported:
    place = registry.blobs.place(stored.sha256)
    whole, _ = decode_place(place)
    state = method_part(whole)
    if len(state) < len(whole):
        body = encode(state)
        return Exported(state, body, described(body, state))
    known = {
        "bytes": len(place) if isinstance(place, bytes) else place.stat().st_size,
        "sha256": stored.sha256.removeprefix("sha256:"),
    }
    return Exported(state, place, described(b"", state).model_copy(update=known))


class Tally:
    """What the rounds of a federation add up to. Reports are added one by one: together they can fill the memory."""

    def __init__(self, reports: Iterable[RoundReport] = ()):
        self.up = self.down = self.rounds_counted = self.states = self.unreadable = 0
        self.counted: Counter[str] = Counter()
        self.measured: tuple[int, EvaluationReport] | None = None
        self.spent: dict[str, SpentPrivacy] = {}
        self.central: CentralPrivacy | None = None
        self.smallest_sum: int | None = None
        for report in reports:
            self.add(report)

    def add(self, report: RoundReport) -> None:
        """Add the next round's report."""
        self.up += report.bytes_up
        self.down += report.bytes_down
        self.rounds_counted += any(phase.counted for phase in report.phases)
        self.states += any(phase.state_hash for phase in report.phases)
        self.unreadable += sum(len(stage.unreadable) for stage in report.stages)
        for phase in report.phases:
            self.counted.update(update.client for update in phase.counted)
            self.spent |= {update.client: update.privacy for update in phase.updates if update.privacy is not None}
            self.central = phase.privacy or self.central
            if phase.secure is not None:
                self.spent |= phase.secure.privacy or {}
                sizes = [size for size in (self.smallest_sum, phase.secure.sum_clients) if size is not None]
                self.smallest_sum = min(sizes, default=None)
        if report.evaluation is not None and report.evaluation.clients:
            self.measured = report.round, report.evaluation

    def sums(self, view: FederationView) -> export_card.SumsSummary | None:
        """What the secure sums were; None where changes came in the clear."""
        rules = view.spec.secure_aggregation
        return (
            None
            if rules is None
            else export_card.SumsSummary(smallest_sum=self.smallest_sum, threshold=rules.threshold)
        )

    def privacy(self, view: FederationView) -> export_card.PrivacySummary | None:
        """What protected training has cost the clients; None where nothing was protected."""
        rules = view.spec.privacy
        if rules.level == "none":
            return None
        if rules.level == "client":
            return self._of_clients(view)
        spent = self.spent.values()
        epsilons = _of_all([client.epsilon for client in spent])
        replaced = _of_all([client.epsilon_replace_one for client in spent])
        return export_card.PrivacySummary(
            level=rules.level,
            unit=rules.unit,
            clip=rules.clip,
            epsilon_max=max(epsilons, default=None),
            epsilon_median=median(epsilons) if epsilons else None,
            epsilon_replace_one=max(replaced, default=None),
            ledger_epsilon_max=max((client.ledger_epsilon for client in spent), default=None),
            clients=len(spent),
            delta=max((client.delta for client in spent), default=None),
            noise_multiplier=min((client.noise_multiplier for client in spent), default=None),
            noise="seeded" if any(client.noise == "seeded" for client in spent) else "secret",
            rounds_counted=self.rounds_counted,
            evaluation=view.spec.evaluations,
        )

    def _of_clients(self, view: FederationView) -> export_card.PrivacySummary:
        """What noise at the coordinator has cost, by the last state."""
        rules, last = view.spec.privacy, self.central
        return export_card.PrivacySummary(
            level=rules.level,
            unit="client",
            clip=rules.clip,
            epsilon_max=last.epsilon if last is not None else None,
            epsilon_median=last.epsilon if last is not None else None,
            epsilon_replace_one=last.epsilon_replace_one if last is not None else None,
            epsilon_if_secret=last.epsilon_if_secret if last is not None else None,
            clients=view.privacy.clients if view.privacy is not None else 0,
            delta=rules.delta,
            noise_multiplier=rules.noise_multiplier,
            noise=last.noise if last is not None else "central",
            rounds_counted=self.states,
            evaluation=view.spec.evaluations,
        )


def _of_all(figures: list[float | None]) -> list[float]:
    """The figures of all clients; none where one is not known."""
    present = [figure for figure in figures if figure is not None]
    return present if len(present) == len(figures) else []


def _facts(view: FederationView, clients: list[ClientView], tally: Tally, state: str, round: int) -> export_card.Facts:
    """The facts about the result after ``round``, whose hash is ``state``; ``clients``: all that have enrolled."""
    spec, secret, method = view.spec, view.spec.participation.is_secret, METHODS[view.spec.method["name"]]
    backbone, chosen = view.backbone, view.selection
    sent = canonical_json(view.model_dump(mode="json")["spec"])
    return export_card.Facts(
        federation=export_card.FederationName(name=view.name, id=view.id, state=view.state),
        method=spec.method,
        summary=method.summary,
        paper=method.paper,
        backbone=spec.backbone.model_copy(update={"fingerprint": backbone.fingerprint, "shape": backbone.shape}),
        template=spec.template or TEMPLATE,
        round=round,
        rounds=spec.rounds,
        training=spec.training,
        seed=spec.seed,
        domains=[client.domain for client in clients if client.role == "trainer" and client.domain],
        participants=[
            export_card.Participant(
                name=client.name,
                role=client.role,
                domain=client.domain.name if client.domain else None,
                num_samples=client.num_samples,
                num_classes=client.num_classes,
                updates_counted=None if secret else tally.counted[client.name],
                grey=client.grey,
            )
            for client in sorted(clients, key=lambda client: client.name)
        ],
        origin=spec.origin,
        licence=spec.licence,
        stopped=view.ended_early,
        selection=chosen if chosen is not None and chosen.round == round else None,
        accuracy=_accuracies(tally, spec.task),
        unreadable=tally.unreadable,
        privacy=tally.privacy(view),
        secure_aggregation=tally.sums(view),
        bytes=None if secret else export_card.Traffic(up=tally.up, down=tally.down),
        hashes=export_card.Hashes(
            state=state, backbone=backbone.fingerprint, spec=f"sha256:{hashlib.sha256(sent.encode()).hexdigest()}"
        ),
    )


def _accuracies(tally: Tally, task: str) -> export_card.Accuracies | None:
    if tally.measured is None:
        return None
    round, report = tally.measured
    rows = [
        export_card.MeasuredAccuracy(
            client=name,
            role=measured.role,
            split=split,
            adapted=result.accuracy,
            zero_shot=measured.template_accuracy(split),
            num_samples=result.num_samples,
            interval=measured.interval(split, task),
            **result.figures(),
        )
        for name, measured in sorted(report.clients.items())
        for split, result in sorted(measured.splits.items())
    ]
    means: dict[str, dict[str, float]] = {
        role: {"adapted" if name == "accuracy" else name: value for name, value in splits.get("test", {}).items()}
        for role, splits in report.by_split.items()
    }
    return export_card.Accuracies(round=round, clients=rows, mean=means)
