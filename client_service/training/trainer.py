"""Carrying out a task: plain computation in one thread, from a payload and committed private state."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from promptfed.client_service.exits import Failure
from promptfed.client_service.privacy import noisy_counts
from promptfed.client_service.privacy.agreement import Agreement
from promptfed.client_service.privacy.policy import STATES, Policy, SiteFacts, facts_of_task, refusals
from promptfed.client_service.privacy.protection import SiteProtection, unexplained
from promptfed.client_service.privacy.secure import Trained
from promptfed.client_service.serving.prediction import Predictor, Served
from promptfed.client_service.state.private_state import PrivateState, Serving, TensorOrigin, keep_round, select_round
from promptfed.client_service.training.data import TEST, TRAIN, Cancelled, ClientData, LocalSplit
from promptfed.client_service.training.evaluation import Evaluation
from promptfed.client_service.training.kernels import torch_settings
from promptfed.client_service.training.payloads import check_payload, known_sizes, phase_of
from promptfed.client_service.training.updates import made_body, sent
from promptfed.shared.canonical import canonical_json
from promptfed.shared.clip import Backbone, BackboneError, shape_of
from promptfed.shared.messages import EvaluationRequest, Peer, Role, Task, TaskConfig
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientContext, ClientInfo, Method, MethodError, Phase
from promptfed.shared.methods.core.objectives import Protection
from promptfed.shared.metrics.outcomes import Record
from promptfed.shared.privacy.noise import Noise, SecretNoise
from promptfed.shared.service.fault_points import point
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import TensorError, Tensors
from promptfed.shared.tensors.torch_tensors import decode_place, state_hash

log = logging.getLogger("promptfed.client")
ServedParts = tuple[Method, ClientContext, Tensors, Tensors]  # method, context, payload, private state


@dataclass(frozen=True)
class SitePrivacy:
    """How this site's updates are protected, and what of its accuracies leaves: noisy ``counts``, if any.

    ``floor``: the disclosure floor; ``states``: how many states are answered on one test set while it is over 1.
    """

    protection: SiteProtection | None = None
    noise: Noise = field(default_factory=SecretNoise)
    leaving: noisy_counts.Leaving = "plain"
    counts: noisy_counts.NoisyCounts | None = None
    floor: int = 1
    states: int = STATES


@dataclass(frozen=True)
class SiteRules:
    """The site's policy, with the ``facts`` that it was held against when the site enrolled; empty without a policy."""

    policy: Policy | None = None
    facts: SiteFacts | None = None


@dataclass
class TaskWork:
    """One client's computation. Nothing here talks to the coordinator; every method may take long.

    Without ``predictor`` no payload is kept for predictions.
    """

    name: str
    role: Role
    backbone: Backbone
    data: ClientData
    state: PrivateState
    predictor: Predictor | None
    agreement: Agreement
    record: Record | None = None
    privacy: SitePrivacy = field(default_factory=lambda: SitePrivacy())
    rules: SiteRules = field(default_factory=lambda: SiteRules())

    def __post_init__(self) -> None:
        self.evaluation = Evaluation(self.data, self.name, self.record, self.agreement.figures)
        self._kept_back: set[str] = set()
        self.progress: float | None = None  # the part of the present task's steps that is done

    @property
    def protection(self) -> SiteProtection | None:
        """The protection of every training task, if the site's records are protected."""
        return self.privacy.protection

    def train(self, task: Task, payload: bytes | Path, cancelled: Cancelled) -> dict[str, float]:
        """Train from committed state and leave the update in ``state.pending()``; its metrics. Raises as `trained`."""

        def cancelled_between_steps() -> bool:
            point("training-step")
            return cancelled()

        trained = self.trained(task, payload, cancelled_between_steps)
        body = made_body(task, self.name, trained, payload)
        self.state.write_pending(body, trained.private, trained.provenance)
        point("pending-written")
        return dict(trained.metrics)

    def trained(self, task: Task, payload: bytes | Path, cancelled: Cancelled) -> Trained:
        """Train from committed state, without writing anything to disk.

        Raises:
            MethodError: the method cannot carry out this task.
            TaskCancelled: ``cancelled`` became true; nothing is kept.
        """
        started, self.progress = time.monotonic(), None
        with unexplained(self.hides_failures):
            method, context = self._context(task.config, task.round, task.phase, cancelled)
        tensors, _ = decode_place(payload)
        phase = phase_of(method, task.round, task.config.rounds, task.phase)
        self._check(tensors, method, phase, task.config)
        trained: list[int] = []
        protection = self._protection(task, context)
        context = replace(context, count_trained=trained.append, protection=protection)
        with unexplained(self.hides_failures), torch_settings(context):
            private, peers = self._prepared(method, context, task.config.peers)
            result = method.train(context, tensors, private)
            update = sent(phase, result)
        if protection is not None and not protection.used:
            raise Failure("training-failed", f"{method.name} trained without the protection that it promises")
        seconds = round(time.monotonic() - started, 3)
        measured = {**result.metrics, "train_seconds": seconds, "trained_parameters": sum(trained)}
        if protection is not None:
            measured = {"steps": protection.event.count, "trained_parameters": sum(trained)}
        leaving = self._leaving(measured, method, task.config.privacy is not None and protection is None)
        finite = {name: float(value) for name, value in leaving.items() if math.isfinite(value)}
        spent = None if protection is None or self.protection is None else self.protection.report(protection.event)
        provenance = TensorOrigin(task.task_id, task.round, task.phase, peers, "sample" if protection else "none")
        return Trained(update, result.private, provenance, finite, spent)

    @property
    def hides_failures(self) -> bool:
        """Whether failures of tasks are reported without their cause, which no noise covers: under any protection."""
        return self.agreement.consent.terms.privacy is not None

    def _protection(self, task: Task, context: ClientContext) -> Protection | None:
        """The attempt's differential privacy, which the budget can afford; None where none was agreed to.

        Raises:
            Failure: the budget is exhausted, the data have changed, or private tensors were trained without noise.
        """
        site = self.protection
        privacy = task.config.privacy
        if (site is not None) != (privacy is not None and privacy.protects_records):
            raise Failure("terms-changed", "the task's privacy is not what this client enrolled for")
        if site is None:
            return None
        private, provenance = self.state.committed()
        if private and provenance.privacy != "sample":
            text = "this client's private tensors were trained without noise, and the next update would tell of them"
            raise Failure("private-state-unprotected", f"{text}: start them anew with --reset-private")
        return site.begin(task, self.name, len(context.train))

    def _check(self, tensors: Tensors, method: Method, phase: Phase | None, config: TaskConfig) -> None:
        names = tuple(config.class_names) if config.class_names else None
        check_payload(tensors, method, phase, known_sizes(method, shape_of(self.backbone), names))

    def _leaving(self, measured: dict[str, float], method: Method, covered: bool) -> dict[str, float]:
        """The numbers of a training task that leave; none but the size where noise for whole clients covers it."""
        if self.agreement.consent.terms.secure_aggregation is not None:
            return measured  # none goes with the change: they are for the owner's own log
        if covered or (self.rules.policy is not None and not self.rules.policy.metrics.training):
            measured = {"trained_parameters": measured["trained_parameters"]}
        return self._agreed_metrics(noisy_counts.without_shares(measured, method, self.privacy.floor))

    def _agreed_metrics(self, measured: dict[str, float]) -> dict[str, float]:
        """The numbers that the method declares and the owner has agreed to; others are not sent."""
        agreed = self.agreement.metrics(measured)
        for name in measured.keys() - agreed.keys() - self._kept_back:
            self._kept_back.add(name)
            log.warning("the number %r is not sent: the method does not declare it among its metrics", name)
        return agreed

    def evaluate(self, task: Task, payload: bytes | Path, cancelled: Cancelled) -> EvaluationRequest:
        """Accuracy on every test set, and the template's; the classifier serves predictions from now on."""
        started = time.monotonic()
        selection = task.config.selection
        if selection is not None and self.role == "trainer":
            keep_round(self.state, task.round) if task.selected is None else select_round(self.state, task.selected)
        serving = Serving(task.round if task.selected is None else task.selected, task.phase, task.config, payload)
        served, parts = self._serve(serving, cancelled)
        if self.predictor is not None:
            self.state.save_serving(serving)
        if self.withholds:
            return EvaluationRequest(splits={}, withheld=True)
        answer = self.privacy.counts.kept(task) if self.privacy.counts is not None else None
        if answer is not None:
            return answer
        floor, patients = self.privacy.floor, self.data.patients
        tests = {
            name
            for name in (TEST, *self.data.tests)
            if selection is None or (name == selection.split) is (task.selected is None)
        }
        if floor > 1:
            tests = self._admitted(serving, tests, None if task.selected is not None else task.round)
            if not tests:
                return EvaluationRequest(splits={}, withheld=True)
        with torch_settings(served.context):
            splits, zero_shot = self.evaluation.run(*parts, served.classifier, task.config.template, tests.__contains__)
            splits, zero_shot = (noisy_counts.large_enough(results, floor, patients) for results in (splits, zero_shot))
            metrics = {}
            if self.privacy.counts is None and TEST in splits and floor <= 1:
                metrics = self.evaluation.mixture(served.classifier, served.context)
        if self.privacy.counts is not None:
            keys = self.evaluation.zero_shot_keys(served.context, task.config.template)
            return self.privacy.counts.drawn(task, splits, zero_shot, keys)
        if floor <= 1:  # seconds tell of the number of images
            metrics["evaluate_seconds"] = round(time.monotonic() - started, 3)
        splits, zero_shot = (noisy_counts.floored(results, floor, patients) for results in (splits, zero_shot))
        return EvaluationRequest(splits=splits, zero_shot=zero_shot, metrics=metrics)

    def _admitted(self, serving: Serving, tests: set[str], round: int | None) -> set[str]:
        """The test sets of ``tests`` that may answer this state: all that its classifiers depend on."""
        tensors, _ = decode_place(serving.payload)
        private, _ = self.state.committed()
        state = canonical_json([state_hash(tensors), state_hash(private), serving.config.model_dump(mode="json")])
        images = {name: self.data.images_hash(name) for name in sorted(tests) if self.data.count(name)}
        most, every = self.privacy.states, self.agreement.consent.terms.evaluate_every
        answered = noisy_counts.AnsweredStates(self.state, most, self.agreement.last_round, every)
        admitted = answered.admitted(images, hashlib.sha256(state.encode()).hexdigest(), round)
        if kept := images.keys() - admitted:
            text = "nothing of %s is told of round %d: %d states are answered, the last round's among them (%s)"
            log.info(text, ", ".join(sorted(kept)), serving.round, most, "metrics.states of the policy")
        return admitted

    @property
    def withholds(self) -> bool:
        """Whether accuracies stay here: they depend on records, and no noise covers them."""
        if self.privacy.leaving == "withheld":
            return True
        if self.privacy.counts is None:
            return False
        # Private tensors of an unprotected training depend on records that no noise covers.
        private, provenance = self.state.committed()
        return bool(private) and provenance.privacy != "sample"

    def expect_policy(self, task: Task | None = None) -> None:
        """Raise Failure where the site's policy does not allow ``task``, by its own configuration, or no longer.

        None: an answer is about to leave, whose task it has allowed; what has changed since is the day.
        """
        if self.rules.policy is None or self.rules.facts is None:
            return
        images = self.data.count(TRAIN if self.role == "trainer" else TEST)
        now = replace(self.rules.facts, today=datetime.now(UTC).date(), images=images)
        if task is not None:
            now = facts_of_task(task, now)
        for offence in refusals(self.rules.policy, now):
            raise offence

    def restore_serving(self, cancelled: Cancelled) -> None:
        """Serve predictions again from the last evaluation's payload, after a restart."""
        serving = self.state.serving() if self.predictor is not None else None
        if serving is None:
            return
        try:
            self._serve(serving, cancelled)
        except (MethodError, BackboneError, TensorError, SpecError) as error:
            log.warning("predictions wait for the next evaluation: the kept prompts cannot be used (%s)", error)

    def _serve(self, serving: Serving, cancelled: Cancelled) -> tuple[Served, ServedParts]:
        method, context = self._context(serving.config, serving.round, serving.phase, cancelled)
        payload, _ = decode_place(serving.payload)
        self._check(payload, method, None, serving.config)
        with torch_settings(context), torch.no_grad():
            private, _ = self._prepared(method, context, serving.config.peers)
            classifier = method.classifier(context, payload, private)
            template = self.evaluation.template(context)
        served = Served(method.name, serving.round, context, classifier, template, self.data.greys)
        if self.predictor is not None:
            self.predictor.served = served
        return served, (method, context, payload, private)

    def _context(
        self, config: TaskConfig, round: int, phase: str, cancelled: Cancelled
    ) -> tuple[Method, ClientContext]:
        method = make_method(config.method)
        space = method.label_space(tuple(config.class_names) if config.class_names else None, self.data.class_names)
        context = ClientContext(
            backbone=self.backbone,
            terms=config.training_terms(),
            class_names=space,
            template=config.template or self.data.template,
            client=self.name,
            domain=self.data.domain,
            peers=tuple(ClientInfo(peer.name, peer.role, 0, (), peer.domain) for peer in config.peers),
            round=round,
            phase=phase,
            train=self._train_split(config, space, f"{config.seed} {round} {phase} {self.name}"),
            cancelled=cancelled,
            progress=partial(setattr, self, "progress"),
            label_space=space,
        )
        return method, context

    def _train_split(self, config: TaskConfig, space: tuple[str, ...], purpose: str) -> LocalSplit:
        training = config.training
        if self.role != "trainer":
            return self.data.no_images()
        if training.augmentation == "none":
            return self.data.split(TRAIN, space)
        return self.data.augmented(space, training.views, purpose)

    def _prepared(self, method: Method, context: ClientContext, peers: list[Peer]) -> tuple[Tensors, str]:
        """Committed private tensors, prepared for these peers; made again only when the peers change."""
        private, provenance = self.state.committed()
        digest = _digest(peers)
        if self.role == "trainer" and provenance.peers != digest:
            private = method.prepare(context, private)
            self.state.commit_prepared(private, replace(provenance, peers=digest))
        return private, digest


def _digest(peers: list[Peer]) -> str:
    ordered = sorted((peer.model_dump(mode="json") for peer in peers), key=lambda peer: str(peer["name"]))
    return hashlib.sha256(canonical_json(ordered).encode()).hexdigest()
