"""Accuracy on a client's test sets: its own test split and further ones, of a method's classifiers and the template."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from promptfed.client_service.training.data import TEST, Cancelled, ClientData
from promptfed.shared.canonical import canonical_json
from promptfed.shared.messages import FIGURES, TEMPLATE_ECE, SplitResult
from promptfed.shared.methods.core.interface import (
    SHARE,
    Classifier,
    ClientContext,
    Method,
    MethodError,
    Mixes,
    Retargets,
    Split,
)
from promptfed.shared.methods.core.several_labels import PresenceTemplates
from promptfed.shared.methods.core.training import TaskCancelled
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.metrics.figures import (
    calibration_error,
    largest_share,
    macro_f1,
    mean_auroc,
    mean_average_precision,
)
from promptfed.shared.metrics.outcomes import ZERO_SHOT, Outcomes, Record
from promptfed.shared.tensors import Tensors

EVALUATION_BATCH = 256
VARIANT = "@"  # a further classifier's accuracy on a split is reported as split@variant

Results = dict[str, SplitResult]
ZeroShotResults = dict[tuple[str, str], SplitResult]
"""The template's results, by test set and by what its classifier depends on."""


@dataclass
class Evaluation:
    """Measures a client's test sets. The template's accuracy is the same in every round and measured once."""

    data: ClientData
    client: str = ""
    record: Record | None = None  # who is told every image's answer, in this process
    figures: Container[str] = ()  # that the owner agreed to tell beside accuracies: `FIGURES`, and the template's ECE
    zero_shot: ZeroShotResults = field(default_factory=dict)
    _templates: dict[str, TemplateClassifier | PresenceTemplates] = field(default_factory=dict)

    def template(self, context: ClientContext) -> TemplateClassifier | PresenceTemplates | None:
        """The template's classifier over ``context.class_names``; None where the backbone reads no texts."""
        if not context.backbone.has_text:
            return None
        key = _template_key(context)
        if key not in self._templates:
            made = PresenceTemplates if self.data.several_labels else TemplateClassifier
            self._templates[key] = made(context)
        return self._templates[key]

    def contexts(self, evaluated: ClientContext, template: str | None) -> Iterator[tuple[str, ClientContext]]:
        """Each test set that holds images, with its candidates and its template (the spec's, where it has one)."""
        if self.data.count(TEST):
            yield TEST, evaluated
        for name, test in self.data.tests.items():
            if self.data.count(name):
                names = (
                    evaluated.class_names if set(test.class_names) == set(evaluated.class_names) else test.class_names
                )
                yield name, replace(evaluated, class_names=names, template=template or test.template)

    def run(
        self,
        method: Method,
        evaluated: ClientContext,
        payload: Tensors,
        private: Tensors,
        main: Classifier,
        template: str | None,
        measured: Callable[[str], bool] = lambda name: True,
    ) -> tuple[Results, Results]:
        """Accuracies by split (and ``split@variant``) and the template's; ``main`` is the classifier of ``evaluated``.

        ``measured``: of which test sets.

        The template has none where the backbone reads no texts.
        """
        splits: Results = {}
        zero_shot: Results = {}
        made: dict[tuple[str, ...], dict[str, Classifier]] = {}
        with torch.no_grad():
            for name, context in self.contexts(evaluated, template):
                if not measured(name):
                    continue
                names = context.class_names
                if names not in made:
                    if names == evaluated.class_names:
                        first = main
                    elif isinstance(main, Retargets):
                        first = main.among(context)
                    else:
                        first = method.classifier(context, payload, private)
                    made[names] = {"": first, **method.variants(context, payload, private)}
                for variant, classifier in made[names].items():
                    key = name + VARIANT + variant if variant else name
                    splits |= _there(key, self._measure(name, context, classifier, variant))
                by_template = self.template(context)
                if by_template is not None:
                    zero_shot |= _there(name, self._measure_template(name, context, by_template))
        return splits, zero_shot

    def zero_shot_keys(self, evaluated: ClientContext, template: str | None) -> dict[str, str]:
        """By test set: what the template's accuracy on it depends on, its images, labels, names and the template."""
        return {
            name: canonical_json([self.data.labelled_hash(name), _template_key(context)])
            for name, context in self.contexts(evaluated, template)
        }

    def mixture(self, classifier: Classifier, context: ClientContext) -> dict[str, float]:
        """The mean share of each domain over the client's own test images, where the classifier mixes domains.

        Domains of one name are one: people tell them apart by it.
        """
        if not isinstance(classifier, Mixes) or not self.data.count(TEST):
            return {}
        split = self.data.split(TEST, context.class_names)
        with torch.no_grad():
            means = classifier.shares(split, torch.arange(len(split))).double().mean(dim=0).tolist()
        shares_by_name: dict[str, float] = {}
        for name, share in zip(classifier.domain_names, means, strict=True):
            shares_by_name[SHARE + name] = shares_by_name.get(SHARE + name, 0.0) + share
        return shares_by_name

    def _measure(
        self, name: str, context: ClientContext, classifier: Classifier, variant: str = ""
    ) -> SplitResult | None:
        test = self.data.split(name, context.class_names)
        if test.labels.ndim == 2:
            return _of_several(classifier, test, context.cancelled)
        predicted, confidence, probabilities = answers(classifier, test, context.cancelled)
        if self.record is not None:
            split = name + VARIANT + variant if variant else name
            columns = tuple(test.labels.tolist()), tuple(predicted.tolist()), tuple(confidence.tolist())
            images, area = self.data.images_hash(name), mean_auroc(test.labels, probabilities)
            self.record(Outcomes(context.round, self.client, split, context.class_names, *columns, images, area))
        right = predicted == test.labels
        computed: dict[str, Callable[[], float | None]] = {
            "ece": lambda: calibration_error(confidence, right),
            "macro_f1": lambda: macro_f1(test.labels, predicted),
            "auroc": lambda: mean_auroc(test.labels, probabilities),
            "majority": lambda: largest_share(test.labels),
            "one_answer": lambda: largest_share(predicted),
        }
        told_of = {name: name for name in FIGURES} if variant != ZERO_SHOT else {TEMPLATE_ECE: "ece"}
        figures = {figure: _rounded(computed[figure]()) for name, figure in told_of.items() if name in self.figures}
        return SplitResult(accuracy=int(right.sum()) / len(test), num_samples=len(test), **figures)

    def _measure_template(self, name: str, context: ClientContext, template: Classifier) -> SplitResult | None:
        key = name, _template_key(context)
        if key not in self.zero_shot:
            measured = self._measure(name, context, template, ZERO_SHOT)
            if measured is None:
                return None
            self.zero_shot[key] = measured
        return self.zero_shot[key]


def _there(key: str, result: SplitResult | None) -> Results:
    return {} if result is None else {key: result}


def _of_several(classifier: Classifier, split: Split, cancelled: Cancelled) -> SplitResult | None:
    """The mean average precision of images with several labels; None if no class is both present and absent."""
    figure = mean_average_precision(split.labels.numpy(), presences(classifier, split, cancelled).numpy())
    return None if figure is None else SplitResult(accuracy=figure, num_samples=len(split))


def _rounded(figure: float | None) -> float | None:
    """Rounded to four places, as in tables, so that no more is revealed about a small test set."""
    return None if figure is None else round(figure, 4)


def answers(
    classifier: Classifier, split: Split, cancelled: Cancelled = lambda: False
) -> tuple[Tensor, Tensor, Tensor]:
    """What has each image's highest logit ``(N,)``, its probability ``(N,)``, and all ``(N, C)`` in float32.

    They are on the CPU.

    Raises:
        TaskCancelled: ``cancelled`` became true.
    """
    batches = []
    for logits in logits_of(classifier, split, cancelled):
        shares = torch.softmax(logits.double(), dim=-1)
        batches.append((logits.argmax(dim=-1).cpu(), shares.amax(dim=-1).cpu(), shares.float().cpu()))
    predicted, confidence, probabilities = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return predicted, confidence, probabilities


def probabilities(classifier: Classifier, split: Split) -> Tensor:
    """Each class's probability ``(N, C)`` in float64, on the CPU."""
    parts = [torch.softmax(logits.double(), dim=-1).cpu() for logits in logits_of(classifier, split, lambda: False)]
    return torch.cat(parts)


def presences(classifier: Classifier, split: Split, cancelled: Cancelled = lambda: False) -> Tensor:
    """The probability ``(N, C)`` of each class to be present, where there may be several; float64, on the CPU."""
    return torch.cat([torch.sigmoid(logits.double()).cpu() for logits in logits_of(classifier, split, cancelled)])


def logits_of(classifier: Classifier, split: Split, cancelled: Cancelled) -> Iterator[Tensor]:
    """The logits ``(B, C)`` of the split's images, in order. Raises MethodError if training has diverged."""
    with torch.no_grad():
        for rows in torch.split(torch.arange(len(split)), EVALUATION_BATCH):
            if cancelled():
                raise TaskCancelled
            logits = classifier.logits(split, rows)
            if not (logits < torch.inf).all():
                raise MethodError("the classifier's answers are not finite: lower training.learning_rate")
            yield logits


def _template_key(context: ClientContext) -> str:
    return canonical_json([context.template, context.class_names])
