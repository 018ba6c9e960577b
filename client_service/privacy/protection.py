"""One federation's differential privacy at this client: the cost of each task, paid before its update is sent."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from promptfed.client_service.exits import ClientError, Exit, Failure
from promptfed.client_service.privacy.ledger import BudgetExhausted, Ledger, keep_head
from promptfed.client_service.privacy.policy import Policy, SiteFacts, facts_of
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import Pending, PrivateState
from promptfed.shared.data.source import Source, Split
from promptfed.shared.messages import EnrolledProtection, EnrolmentInfo, PrivacyEvent, SpendReport, Task
from promptfed.shared.methods.core.costs import training_loops
from promptfed.shared.methods.core.interface import Method
from promptfed.shared.methods.core.objectives import Protection
from promptfed.shared.methods.core.training import TaskCancelled
from promptfed.shared.privacy.accounting import (
    Event,
    PrivacyError,
    calibrate,
    check_delta,
    default_delta,
    epsilon_of,
    replace_one_epsilon,
    training_event,
)
from promptfed.shared.privacy.noise import Noise
from promptfed.shared.service.fault_points import point
from promptfed.shared.spec.sections import PrivacySpec
from promptfed.shared.tensors.torch_tensors import decode

FILE = "protection.json"  # what was planned when this client enrolled
Groups = Sequence[Sequence[int]] | None
log = logging.getLogger("promptfed.client")


class _KeptPlan(BaseModel):
    """The part of a plan that later starts of this client use."""

    epsilon_asked: float | None
    steps: int
    q: float
    noise_multiplier: float


@dataclass(frozen=True)
class PrivacyPlan:
    """What the whole federation may cost: ``epsilon`` alone, ``in_all`` with what the ledger holds of others."""

    units: int
    noise_multiplier: float
    delta: float
    steps: int
    q: float
    epsilon: float
    in_all: float
    most: float
    unit: str = "record"
    replaced: float | None = None  # ``epsilon`` of replace-one neighbours

    def enrolled(self) -> EnrolledProtection:
        """The plan as the coordinator gets it at enrolment."""
        return EnrolledProtection(
            units=self.units, noise_multiplier=self.noise_multiplier, epsilon_planned=self.epsilon, delta=self.delta
        )

    def lines(self) -> list[tuple[str, str]]:
        """The plan as lines for the owner of the data."""
        noise = f"z = {self.noise_multiplier:g} times the clip in each of {self.steps} steps at most"
        spent = f"{self.in_all:.3g} of {self.most:g} with what this data set has spent before"
        other = "" if self.replaced is None else f" (ε = {self.replaced:.3g} for replace-one neighbours)"
        return [
            ("privacy", f"differentially private training; one of the {self.units} {self.unit}s is protected, {noise}"),
            ("budget", f"ε = {self.epsilon:.3g} at δ = {self.delta:g} for all rounds{other}; {spent}"),
            ("", "the coordinator is told these numbers, when this client enrols and with each update"),
        ]


@dataclass
class SiteProtection:
    """What every training task of one federation passes. Made by `plan`."""

    privacy: PrivacySpec
    plan: PrivacyPlan
    ledger: Ledger
    noise: Noise
    coordinator: str
    federation_id: str
    groups: Groups = None  # of each group the images that stand for it
    federation: str = ""  # its name
    state: PrivateState | None = None  # which keeps the ledger's head

    def open(self) -> None:
        """Begin the ledger once the data's owner has agreed, and keep what was planned for later starts."""
        self.ledger.open(self.plan.delta, self.privacy.unit)
        if self.state is not None:
            self.state.write_as(FILE, vars(self.plan) | {"epsilon_asked": self.privacy.epsilon})

    def begin(self, task: Task, client: str, images: int) -> Protection:
        """The protection of one attempt at ``task``, which the ledger can afford.

        Raises:
            Failure: data-changed, or privacy-budget-exhausted.
        """
        plan, training = self.plan, task.config.training
        units = images if self.groups is None else len(self.groups)
        if units != plan.units:
            text = f"{units} {self.privacy.unit}s instead of the {plan.units} that were enrolled"
            raise Failure("data-changed", f"{text}: enrol anew with another --state-dir and --name")
        stream = self.noise.stream(task.round, task.phase, client)
        protection = Protection(
            float(self.privacy.clip or 0),
            plan.noise_multiplier,
            units,
            training.batch_size,
            training.epochs,
            stream,
            self.groups,
        )
        try:
            self.ledger.expect([protection.event], plan.most)
        except BudgetExhausted as error:
            raise Failure("privacy-budget-exhausted", str(error)) from None
        point("task-affordable")
        return protection

    def report(self, event: Event) -> SpendReport:
        """The report of the cost that goes with the update."""
        try:
            epsilon = self.ledger.expect([event], self.plan.most)
        except BudgetExhausted as error:
            raise Failure("privacy-budget-exhausted", str(error)) from None
        return SpendReport(
            events=[PrivacyEvent(**event.as_json())],
            epsilon=epsilon,
            epsilon_replace_one=self.ledger.epsilon("train", [event], replace_one=True),
            delta=self.plan.delta,
            noise=self.noise.kind,
        )

    def pay(self, pending: Pending, release: str) -> bool:
        """Write the spend of an update that is about to leave; False where it was written before.

        Raises:
            Failure: privacy-budget-exhausted, or privacy-missing where the update does not say what it cost.
            ClientError: LEDGER.
        """
        return self.pay_for(release, reported(pending.update.read()), pending.round, pending.phase, pending.task_id)

    def pay_for(self, release: str, spent: SpendReport | None, round: int, phase: str, task_id: str | None) -> bool:
        """Write the cost of a release that is not an update of its own."""
        if spent is None:
            raise Failure("privacy-missing", "the update that waits was not trained under protection")
        about = {
            "federation_id": self.federation_id,
            "federation": self.federation,
            "coordinator": self.coordinator,
            "round": round,
            "phase": phase,
            "task_id": task_id,
            "noise": spent.noise,
        }
        try:
            new = self.ledger.spend(release, [event.event() for event in spent.events], self.plan.most, about, "train")
        except BudgetExhausted as error:
            raise Failure("privacy-budget-exhausted", str(error)) from None
        if self.state is not None:
            keep_head(self.ledger, self.state)
        return new


def groups_of(privacy: PrivacySpec, train: Split) -> tuple[tuple[int, ...], ...] | None:
    """The images that stand for each group, its first ``per_group`` in order of digest; None where units are
    records. Groups are in the order in which they appear.

    Raises:
        ClientError: LEDGER where the data name no groups.
    """
    if privacy.unit != "group":
        return None
    if train.groups is None:
        text = "the federation protects groups, such as patients, and the data name none"
        raise ClientError(Exit.LEDGER, f"{text}: add group=COLUMN to a csv: URI, or group=REGEX to a folder: one")
    members: dict[str, list[int]] = {}
    for row, group in enumerate(train.groups):
        members.setdefault(group, []).append(row)
    return tuple(
        tuple(sorted(rows, key=lambda row: (train.digest(row), row))[: privacy.per_group]) for rows in members.values()
    )


def units_of(info: EnrolmentInfo, train: Split) -> int | None:
    """How many groups there are to protect; None where units are records, or the data name no groups."""
    grouped = info.privacy is not None and info.privacy.unit == "group" and train.groups is not None
    return len(set(train.groups or ())) if grouped else None


def own_ledger(settings: Settings, policy: Policy | None) -> Ledger:
    """The ledger of the data set that the policy names, else the settings."""
    dataset = (policy and policy.dataset) or settings.dataset
    if settings.ledger is None and policy is not None and policy.ledger is not None:
        return Ledger(Path(policy.ledger).expanduser(), dataset)
    return Ledger(settings.model_copy(update={"dataset": dataset}).ledger_file, dataset)


def site_facts(info: EnrolmentInfo, settings: Settings, source: Source) -> SiteFacts:
    """What the federation asks of a site with the images of ``source``."""
    images = len(source.train if settings.role == "trainer" else source.test)
    return facts_of(info, settings.coordinator, settings.role, images, units_of(info, source.train))


def site_plan(
    info: EnrolmentInfo,
    method: Method,
    train: Split,
    settings: Settings,
    policy: Policy | None,
    ledger: Ledger,
    state: PrivateState | None = None,
) -> tuple[PrivacyPlan, Groups]:
    """What a federation that protects records will cost here, and the groups that it protects.

    Raises:
        ClientError: LEDGER where it does not fit into the budget of the ``ledger``, or cannot be planned.
    """
    groups = groups_of(info.privacy, train) if info.privacy is not None else None
    units = len(train) if groups is None else len(groups)
    rules = policy.privacy if policy is not None else None
    most = rules.max_epsilon if rules is not None else settings.max_epsilon
    planned = plan(info, method, units, ledger, state, most, rules.delta if rules is not None else None)
    expect_room(planned, ledger.dataset, rules is not None and rules.partial)
    return planned, groups


def reported(update: bytes) -> SpendReport | None:
    """What an update says of its cost."""
    _, metadata = decode(update)
    fields: Any = metadata
    privacy = fields.get("privacy") if isinstance(fields, dict) else None
    return None if privacy is None else SpendReport.model_validate(privacy)


def plan(
    info: EnrolmentInfo,
    method: Method,
    units: int,
    ledger: Ledger,
    state: PrivateState | None,
    most: float,
    delta: float | None = None,
) -> PrivacyPlan:
    """What the federation of ``info`` will cost a client with ``units`` records, as it was planned at enrolment.

    Raises:
        ClientError: LEDGER where it cannot fit, or the ledger's δ is not one that the federation allows.
    """
    privacy = info.privacy
    assert privacy is not None
    training = info.training
    try:
        _check_unit(ledger, privacy)
        chosen = ledger.delta() or delta or privacy.delta or default_delta(max(1, units))
        check_delta(chosen, units)
        _check_allowed(privacy, chosen)
        if not type(method).can_protect():
            raise PrivacyError(f"{method.name} cannot be trained under protection: {method.unprotected}")
        loops = training_loops(method, info.rounds or 0)
        shape = training_event(units, training.batch_size, training.epochs, 1.0, loops)
        z = privacy.noise_multiplier or _planned_noise(state, privacy, shape) or _noise(privacy, chosen, shape)
        events = [Event("gaussian", shape.q, z, shape.count)]
        others = [
            spent
            for spend in ledger.spends()
            if spend.split == "train" and spend.federation_id != info.federation_id
            for spent in spend.events
        ]
        alone = epsilon_of(events, chosen)
        in_all = epsilon_of([*others, *events], chosen) if others else alone
    except PrivacyError as error:
        raise ClientError(Exit.LEDGER, f"this federation cannot be protected here: {error}") from None
    replaced = replace_one_epsilon(events, chosen)
    return PrivacyPlan(units, z, chosen, shape.count, shape.q, alone, in_all, most, privacy.unit, replaced)


def _check_unit(ledger: Ledger, privacy: PrivacySpec) -> None:
    kept = ledger.kept_unit()
    if kept is not None and kept != privacy.unit:
        text = f"the ledger of {ledger.dataset!r} is of {kept}s, and the federation protects {privacy.unit}s"
        raise PrivacyError(
            f"{text}: their budgets are not added up, take a --dataset of its own, or another federation"
        )


def expect_room(plan: PrivacyPlan, dataset: str, partial: bool = False) -> None:
    """Raise ClientError (LEDGER) if the whole schedule does not fit, unless ``partial`` allows to end early."""
    if plan.in_all > plan.most and not partial:
        text = f"all rounds would make ε = {plan.in_all:.4g} of the {plan.most:g} that the data set {dataset!r} has"
        raise ClientError(Exit.LEDGER, f"{text}: raise --max-epsilon, or ask for fewer rounds or more noise")


def _planned_noise(state: PrivateState | None, privacy: PrivacySpec, shape: Event) -> float | None:
    """The noise that an earlier start of this client calibrated for the very same schedule and ε."""
    kept = state.read_as(FILE, _KeptPlan) if state is not None else None
    if kept is None or (kept.epsilon_asked, kept.steps, kept.q) != (privacy.epsilon, shape.count, shape.q):
        return None
    return kept.noise_multiplier


def _noise(privacy: PrivacySpec, delta: float, shape: Event) -> float:
    assert privacy.epsilon is not None
    return calibrate(privacy.epsilon, delta, shape.q, shape.count)


def _check_allowed(privacy: PrivacySpec, delta: float) -> None:
    if privacy.delta is not None and delta > privacy.delta:
        raise PrivacyError(f"the ledger's δ = {delta:g} is larger than the federation allows ({privacy.delta:g})")


@contextmanager
def unexplained(hidden: bool, work: Literal["training", "evaluation"] = "training") -> Iterator[None]:
    """If ``hidden``, replace every failure inside by the same one. The cause is written to this client's own log only.

    Raises:
        Failure: training-failed (or evaluation-failed), with the same text whatever the cause.
    """
    try:
        yield
    except (TaskCancelled, ClientError):
        raise
    except Exception:
        if not hidden:
            raise
        log.exception("protected %s failed", work)
        raise Failure(f"{work}-failed", f"protected {work} failed; this client's own log says why") from None
