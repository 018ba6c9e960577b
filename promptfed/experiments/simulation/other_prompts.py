"""The answers of clients with other clients' prompts and their own head: what prompts hold beside the private head.

If the accuracies stay the same, the prompts hold nothing specific to their client, and a method's gain is its heads'.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from promptfed.client_service.training.evaluation import answers
from promptfed.client_service.training.site import torch_settings
from promptfed.client_service.training.trainer import TaskWork
from promptfed.shared.methods.core.heads import BIAS, CLASSES, WEIGHT
from promptfed.shared.metrics.outcomes import Outcomes

SWAPPED = "prompts of others"  # the name of the variant in an outcome's split
_OWN = (WEIGHT, BIAS, CLASSES)  # the private tensors of a head


def swapped_outcomes(works: Mapping[str, TaskWork]) -> list[Outcomes]:
    """Each trainer's answers on its own test images, with the prompts of every other trainer and its own head.

    Empty for methods that share their prompts and keep nothing private. Call it after the last evaluation.
    """
    trainers = {name: work.served() for name, work in works.items() if work.role == "trainer"}
    parts = {name: served for name, served in trainers.items() if served is not None}
    swapped = []
    for name, (method, context, _, own) in parts.items():
        if not method.personal:
            return []
        test, kept = works[name].data.split("test", context.class_names), {key: own[key] for key in _OWN if key in own}
        for other, (_, _, payload, private) in parts.items():
            if other == name or not len(test):
                continue
            with torch_settings(context), torch.no_grad():
                predicted, confidence = answers(method.classifier(context, payload, {**private, **kept}), test)
            rows = tuple(test.labels.tolist()), tuple(predicted.tolist()), tuple(confidence.tolist())
            images = works[name].data.images_hash("test")
            swapped.append(Outcomes(context.round, name, f"test@{SWAPPED}", context.class_names, *rows, images))
    return swapped
