"""Carrying out a task: plain computation in one thread, from a payload and committed private state."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from client_service.data import Cancelled, ClientData, SplitName
from client_service.prediction import Predictor, Served
from client_service.private_state import PrivateState, Provenance, Serving
from shared.clip import Backbone
from shared.messages import EvaluationRequest, Peer, Role, SplitResult, Task, TaskConfig, UpdateMetadata
from shared.methods import make_method
from shared.methods.base import Classifier, ClientContext, ClientInfo, Method, MethodError, Split
from shared.methods.training import TaskCancelled
from shared.methods.zero_shot import TemplateClassifier
from shared.spec import TrainingSpec
from shared.tensors import Tensors, canonical_json, decode, encode

EVALUATION_BATCH = 256
SPLIT: SplitName = "test"


@dataclass
class TaskWork:
    """One client's computation. Nothing here talks to the coordinator; every method may take long."""

    name: str
    role: Role
    backbone: Backbone
    data: ClientData
    state: PrivateState
    predictor: Predictor

    def __post_init__(self) -> None:
        self._template: tuple[str, TemplateClassifier] | None = None
        self._zero_shot: tuple[str, dict[str, SplitResult]] | None = None

    def train(self, task: Task, payload: bytes, cancelled: Cancelled) -> dict[str, float]:
        """Train from committed state and leave the update in ``state.pending()``; its metrics.

        Raises:
            MethodError: the method cannot carry out this task.
            TaskCancelled: ``cancelled`` became true; nothing is kept.
        """
        started = time.monotonic()
        method, context = self._context(task.config, task.round, task.phase, cancelled)
        tensors, _ = decode(payload)
        with torch_settings(context.training, self.backbone):
            private, peers = self._prepared(method, context, task.config.peers)
            result = method.train(context, tensors, private)
        update = {name: _as_sent(name, tensor) for name, tensor in result.update.items()}
        metrics = result.metrics | {"train_seconds": round(time.monotonic() - started, 3)}
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        about = UpdateMetadata(task_id=task.task_id, payload_sha256=task.payload.sha256, metrics=finite)
        provenance = Provenance(task.task_id, task.round, task.phase, peers)
        self.state.write_pending(encode(update, about.model_dump()), result.private, provenance)
        return finite

    def evaluate(self, task: Task, payload: bytes, cancelled: Cancelled) -> EvaluationRequest:
        """Accuracy on the client's test images, and the template's; the classifier serves predictions from now on."""
        started = time.monotonic()
        serving = Serving(task.round, task.phase, task.config, payload)
        served = self._serve(serving, cancelled)
        self.state.save_serving(serving)
        splits = self._measure(served.context, served.classifier, cancelled)
        key = _template_key(served.context)
        if self._zero_shot is None or self._zero_shot[0] != key:  # the same in every round
            self._zero_shot = key, self._measure(served.context, served.template, cancelled)
        metrics = {"evaluate_seconds": round(time.monotonic() - started, 3)}
        return EvaluationRequest(splits=splits, zero_shot=self._zero_shot[1], metrics=metrics)

    def restore_serving(self, cancelled: Cancelled) -> None:
        """Serve predictions again from the last evaluation's payload, after a restart."""
        serving = self.state.serving()
        if serving is not None:
            self._serve(serving, cancelled)

    def _serve(self, serving: Serving, cancelled: Cancelled) -> Served:
        method, context = self._context(serving.config, serving.round, serving.phase, cancelled)
        payload, _ = decode(serving.payload)
        with torch_settings(context.training, self.backbone), torch.no_grad():
            private, _ = self._prepared(method, context, serving.config.peers)
            classifier = method.classifier(context, payload, private)
            template = self._template_classifier(context)
        self.predictor.served = Served(method.name, serving.round, context, classifier, template)
        return self.predictor.served

    def _context(
        self, config: TaskConfig, round: int, phase: str, cancelled: Cancelled
    ) -> tuple[Method, ClientContext]:
        method = make_method(config.method)
        space = method.label_space(tuple(config.class_names) if config.class_names else None, self.data.class_names)
        context = ClientContext(
            backbone=self.backbone,
            class_names=space,
            template=config.template,
            training=TrainingSpec.model_validate(config.training),
            client=self.name,
            domain=self.data.domain,
            peers=tuple(ClientInfo(peer.name, peer.role, 0, (), peer.domain) for peer in config.peers),
            round=round,
            rounds=config.rounds,
            phase=phase,
            seed=config.seed,
            train=self.data.split("train", space) if self.role == "trainer" else self.data.no_images(),
            cancelled=cancelled,
        )
        return method, context

    def _prepared(self, method: Method, context: ClientContext, peers: list[Peer]) -> tuple[Tensors, str]:
        """Committed private tensors, prepared for these peers; made again only when the peers change."""
        private, provenance = self.state.committed()
        digest = _digest(peers)
        if self.role == "trainer" and provenance.peers != digest:
            private = method.prepare(context, private)
            self.state.commit_prepared(private, replace(provenance, peers=digest))
        return private, digest

    def _template_classifier(self, context: ClientContext) -> TemplateClassifier:
        key = _template_key(context)
        if self._template is None or self._template[0] != key:
            self._template = key, TemplateClassifier(context)
        return self._template[1]

    def _measure(self, context: ClientContext, classifier: Classifier, cancelled: Cancelled) -> dict[str, SplitResult]:
        test = self.data.split(SPLIT, context.class_names)
        if not len(test):
            return {}
        return {SPLIT: SplitResult(accuracy=accuracy(classifier, test, cancelled), num_samples=len(test))}


def accuracy(classifier: Classifier, split: Split, cancelled: Cancelled = lambda: False) -> float:
    """Fraction of the split's images whose highest logit is their label's."""
    right = 0
    with torch.no_grad():
        for rows in torch.split(torch.arange(len(split)), EVALUATION_BATCH):
            if cancelled():
                raise TaskCancelled
            found = classifier.logits(split, rows).argmax(dim=-1).cpu()
            right += int((found == split.labels[rows]).sum())
    return right / len(split)


@contextmanager
def torch_settings(training: TrainingSpec, backbone: Backbone) -> Iterator[None]:
    """The spec's number of threads; on a GPU deterministic kernels where the spec asks for them."""
    torch.set_num_threads(training.threads)
    if not training.deterministic or backbone.device.type == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _as_sent(name: str, tensor: Tensor) -> Tensor:
    """Float32 whatever the backbone's precision, and finite: the coordinator would refuse it otherwise."""
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor
    if not bool(torch.isfinite(tensor).all()):
        raise MethodError(f"the trained tensor {name!r} holds NaN or infinity: lower training.learning_rate")
    return tensor.float()


def _template_key(context: ClientContext) -> str:
    return canonical_json([context.template, context.class_names])


def _digest(peers: list[Peer]) -> str:
    ordered = sorted((peer.model_dump(mode="json") for peer in peers), key=lambda peer: str(peer["name"]))
    return hashlib.sha256(canonical_json(ordered).encode()).hexdigest()
