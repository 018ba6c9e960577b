"""FedBABU: the tower alone is trained and shared, under one head that never changes; fine-tuned where it is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from promptfed.shared.methods.core.base import ClientContext, Split, TrainResult
from promptfed.shared.methods.core.heads import LinearHead, head_width
from promptfed.shared.methods.core.trained_tower import TrainedTower
from promptfed.shared.methods.core.visual import ImageClassifier
from promptfed.shared.methods.fedrep import PrivateHeadMethod
from promptfed.shared.methods.weights import Head, TowerHyper
from promptfed.shared.tensors import Tensors


class FedBABUHyper(TowerHyper):
    """What is trained of the tower, and the fine-tuning before an evaluation."""

    finetune: Annotated[
        Literal["all", "head"], Field(description="what is fine-tuned on the client's own training images")
    ] = "all"
    finetune_epochs: Annotated[
        int, Field(ge=1, le=10_000, description="epochs over the client's training images before an evaluation")
    ] = 5
    finetune_learning_rate: Annotated[
        float | None, Field(gt=0, le=1000, description="rate of the fine-tuning; default: training.learning_rate")
    ] = None


class FedBABU(PrivateHeadMethod):
    """The head is the seeded start for ever, so only the tower trains and travels.

    Each client classifies with a copy of tower and head that it fine-tunes on its own training images and does not
    keep; one fine-tuning serves all label spaces. Source: Oh et al., "FedBABU", ICLR 2022.
    """

    name = "fedbabu"
    summary = "A shared image tower trained under a head that never changes, fine-tuned by each client for itself."
    paper = "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, 2022"
    Hyper = FedBABUHyper
    hyper: FedBABUHyper

    def __init__(self, hyper: FedBABUHyper):
        super().__init__(hyper)
        self._last: tuple[Tensor, Split, tuple[TrainedTower, LinearHead]] | None = None

    def start_head(self, context: ClientContext, payload: Tensors, private: Tensors) -> LinearHead:
        """The same for every client with as many classes, and for ever."""
        return LinearHead.start(context, head_width(context.backbone, self.hyper.projected))

    def train(self, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        """E epochs of the tower."""
        start = self.changes(context, payload, private)
        tower = TrainedTower.of(context.backbone, self.hyper, start).trainable()
        loss = self.fit(context, tower, self.start_head(context, payload, private), what="tower")
        return TrainResult(self.sent(start, tower, None, None), {}, {"loss": loss})

    def classifier(self, context: ClientContext, payload: Tensors, private: Tensors) -> ImageClassifier:
        """Classifies with the fine-tuned copy."""
        first = payload[self.shared_kinds[0]]
        if self._last is None or self._last[0] is not first or self._last[1] is not context.train:
            with torch.enable_grad():  # evaluations run without gradients
                self._last = first, context.train, self._finetuned(context, payload)
        return self.classify(*self._last[2], context)

    def _finetuned(self, context: ClientContext, payload: Tensors) -> tuple[TrainedTower, LinearHead]:
        rate = self.hyper.finetune_learning_rate or context.training.learning_rate
        settings = {"epochs": self.hyper.finetune_epochs, "learning_rate": rate, "schedule": "constant"}
        own = replace(context.for_training(), training=context.training.model_copy(update=settings))
        tower, head = self.tower(own, payload, {}), self.start_head(own, payload, {})
        head = head.trainable(own.backbone.device)
        tower = tower.trainable() if self.hyper.finetune == "all" else tower
        self.fit(own, tower, head, what=self.hyper.finetune)
        return tower, head

    def kept(self, start: Tensors, tower: TrainedTower, head: Head) -> Tensors:
        """Nothing."""
        return {}
