"""Training of a client without labels: on what the current global classifier is confident of (Sohn et al. 2020)."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.training.data import TRAIN, ClientData
from promptfed.client_service.training.evaluation import answers
from promptfed.shared.data import Source
from promptfed.shared.methods import METHODS
from promptfed.shared.methods.core.interface.base import ClientContext, Method
from promptfed.shared.tensors import Tensors

log = logging.getLogger("promptfed.client")


def check_unlabelled(method: Method, source: Source) -> None:
    """Refuse images without labels if the method cannot train on them.

    Raises:
        ClientError: BAD_INPUT, with the methods that can.
    """
    if source.unlabelled and not method.can_take_unlabelled():
        able = ", ".join(sorted(name for name, kind in METHODS.items() if kind.can_take_unlabelled()))
        text = f"{method.name} does not train without labels: leave unlabelled=true out, or join a federation with one"
        raise ClientError(Exit.BAD_INPUT, f"{text} of {able}")


def with_predictions(
    method: Method, context: ClientContext, data: ClientData, payload: Tensors, private: Tensors
) -> ClientContext:
    """The task with the received classifier's confident predictions in place of labels; other images have -1.

    The classifier sees the images as they are (the weak view), and training sees random crops of them (the strong
    view). λ scales the learning rate: Adam and per-example clipping undo a weight of the loss.
    """
    training, loss = context.training, context.terms.loss
    scaled = training.model_copy(update={"learning_rate": loss.unlabelled_weight * training.learning_rate})
    classifier = method.classifier(context.for_training(), payload, private)
    predicted, confidence = answers(classifier, data.split(TRAIN, context.class_names), context.cancelled)
    labels = torch.where(confidence >= loss.unlabelled_threshold, predicted, -1)
    log.info("%d of %d images are classified with confidence and trained on", int((labels >= 0).sum()), len(labels))
    purpose = f"{context.seed} {context.round} {context.phase} {context.client} unlabelled"
    strong = data.augmented(context.class_names, context.training.views, purpose)
    strong.labels = labels
    return replace(context.with_terms(training=scaled), train=strong, unlabelled=True)
