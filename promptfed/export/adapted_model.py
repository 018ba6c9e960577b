"""A backbone adapted by a federation's global state: a classifier that needs no client.

It classifies as an evaluator of the federation does. Some methods classify with private state of a client (a head, a
context). For them there is no such classifier, and `AdaptedModel.missing` gives the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from promptfed.client_service.serving.prediction import Predictor, Served
from promptfed.client_service.training.data import LocalSplit
from promptfed.console.output import class_names as split_names
from promptfed.sdk.result import FederationResult
from promptfed.shared.api.export_card import Facts, classes_of
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.data import open_source
from promptfed.shared.data.pixels import Scale
from promptfed.shared.errors import BadInput, Failed
from promptfed.shared.messages import Domain
from promptfed.shared.methods import UnknownMethod, make_method
from promptfed.shared.methods.core import interface
from promptfed.shared.methods.core.registry import INSTALL
from promptfed.shared.methods.core.several_labels import (
    BIAS,
    PresenceTemplates,
    ThresholdClassifier,
    is_for_several_labels,
)
from promptfed.shared.methods.core.tower import Merges, checkpoint_of
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.spec.spec import TEMPLATE, BackboneShape, SpecError
from promptfed.shared.spec.training_terms import TrainingTerms
from promptfed.shared.tensors import Tensors, method_part

NOBODY = interface.ClientInfo("nobody", "evaluator", 0, ())


@dataclass(frozen=True)
class AdaptedModel:
    """The learned state of a federation and everything needed to classify with it. A card holds the same data.

    ``terms`` contain a template but no class names. ``state`` is the global state after ``round``. ``domains`` are the
    domains that trainers declared, ``greys`` the scales by which they read grey pictures of more than 8 bits.
    """

    terms: TrainingTerms
    round: int
    domains: tuple[Domain, ...]
    state: Tensors
    greys: tuple[Scale, ...] = ()

    @classmethod
    def of(cls, facts: Facts, state: Tensors) -> AdaptedModel:
        """Build the model from a state and what its coordinator, or the card of an export, says of it."""
        fields = ("method", "training", "backbone", "template", "rounds", "seed")
        terms = TrainingTerms(class_names=None, **{name: getattr(facts, name) for name in fields})
        greys = {client.grey for client in facts.participants if client.role == "trainer" and client.grey}
        return cls(terms, facts.round, tuple(facts.domains), method_part(state), tuple(sorted(greys)))

    def make_method(self) -> interface.Method:
        """The method with its hyperparameters. Raises PromptfedError if this promptfed does not have the method."""
        try:
            return make_method(self.terms.method)
        except SpecError as error:
            text = f"this promptfed does not have the federation's method: {error}"
            if isinstance(error, UnknownMethod):
                text += f": {INSTALL.format('the package that brings it')}"
            raise Failed(text) from None

    def missing(self) -> str | None:
        """The reason why the global state alone cannot classify; None if it can."""
        return interface.why_not_alone(self.make_method(), lambda: self._context(self.terms.backbone.shape))

    def check_alone(self) -> None:
        """Raise PromptfedError if the global state alone cannot classify."""
        reason = self.missing()
        if reason is not None:
            raise BadInput(f"{reason}: ask a client's own service (`/v1/predict`)")

    def _context(self, shape: BackboneShape | None) -> interface.ServerContext:
        assert shape is not None, "a global state is made of the shape"
        terms = self.terms
        return interface.ServerContext(terms.training, shape, None, (), terms.seed, terms.rounds)

    def serve(self, backbone: Backbone, class_names: Sequence[str], temperature: float = 1.0) -> Served:
        """The adapted classifier over ``class_names``, and the zero-shot classifier of the template.

        Raises:
            PromptfedError: there is no classifier, the backbone differs, or a class name is too long for it.
        """
        self.check_alone()
        self._expect(backbone)
        method, names = self.make_method(), tuple(class_names)
        context = self._client_context(backbone, names)
        payload = method.payload(self.state, None, NOBODY, self._context(shape_of(backbone)))
        method.check_classes(names)
        method.check_texts(backbone, names, context.template)
        with torch.no_grad():
            classifier = method.classifier(context, payload, {})
            by_template = PresenceTemplates if is_for_several_labels(method) else TemplateClassifier
            template = by_template(context) if backbone.has_text else None
        classifier = classifier if temperature == 1.0 else Tempered(classifier, temperature)
        return Served(method.name, self.round, context, classifier, template, self.greys)

    def merged(self, backbone: Backbone, class_names: Sequence[str]) -> Tensors:
        """The open_clip model with the state's weight changes merged in, as tensors by open_clip's names.

        Raises:
            PromptfedError: the method changes no weights, the backbone differs, or it is not an open_clip model.
        """
        method = self.make_method()
        if not isinstance(method, Merges):
            text = f"{method.name} changes no weights of the towers: its state is all that there is to take away"
            raise BadInput(f"{text}, leave --merged out")
        self._expect(backbone)
        context = self._client_context(backbone, tuple(class_names) or ("thing",))
        payload = method.payload(self.state, None, NOBODY, self._context(shape_of(backbone)))
        with torch.no_grad():
            return checkpoint_of(backbone, method.merged(context, payload))

    def _expect(self, backbone: Backbone) -> None:
        expected = self.terms.backbone.fingerprint
        if expected != backbone.fingerprint:
            text = f"the backbone here is {backbone.fingerprint}, the federation's was {expected}"
            raise BadInput(f"{text}: install the same version of promptfed and of the weights")

    def _client_context(self, backbone: Backbone, names: tuple[str, ...]) -> interface.ClientContext:
        none = torch.zeros(0, dtype=torch.int64)
        features = torch.zeros(0, backbone.d_e)
        return interface.ClientContext(
            backbone=backbone,
            terms=self.terms,
            class_names=names,
            template=self.terms.template or TEMPLATE,
            client=NOBODY.name,
            domain=None,
            peers=tuple(interface.ClientInfo(domain.name, "trainer", 0, (), domain) for domain in self.domains),
            round=self.round,
            phase="evaluation",
            train=LocalSplit(
                none, lambda: features, lambda rows: features[rows], lambda: features, lambda rows: features[rows]
            ),
        )


class Tempered:
    """A classifier whose logits are divided by a temperature: confidences change, and no answer."""

    def __init__(self, classifier: interface.Classifier, temperature: float):
        self._classifier, self._temperature = classifier, temperature

    def logits(self, split: interface.Split, indices: torch.Tensor) -> torch.Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        return self._classifier.logits(split, indices) / self._temperature


def predictor_of(served: Served) -> Predictor:
    """The predictor that classifies images with ``served``."""
    predictor = Predictor()
    predictor.served = served
    return predictor


def weights_of(served: Served) -> Tensors | None:
    """The weights for plain open_clip code (`Fixed`), and ``zero_shot_weights (C, d_e)``.

    With several labels also ``label_bias (1)``: a class is present where its cosine plus this number exceeds 0.
    """
    inner: interface.Classifier = served.classifier
    bias = {}
    if isinstance(inner, ThresholdClassifier):
        bias[BIAS.name] = torch.tensor([inner.bias / served.context.backbone.logit_scale])
        inner = inner.classifier
    weights = inner.weights() if isinstance(inner, interface.Fixed) else None
    if weights is None:
        return None
    template = served.template.weights() if isinstance(served.template, interface.Fixed) else None
    if template is not None:
        weights = weights | {"zero_shot_weights": template["class_weights"]}
    weights = weights | bias
    return {name: tensor.detach().float().cpu().clone() for name, tensor in weights.items()}


def class_names_of(result: FederationResult) -> tuple[str, ...] | None:
    """The class names of the federation; None if each client has its own."""
    names, _ = classes_of(result.federation)
    return tuple(names) if names else None


def given_class_names(classes: str | None, data: str | None) -> tuple[str, ...] | None:
    """The class names of ``--classes a,b`` or of the data at ``--data URI``; None if neither is given.

    Raises:
        PromptfedError: both are given, a name occurs twice, or the data cannot be used.
    """
    if classes is not None and data is not None:
        raise BadInput("--classes and --data both name classes: give one")
    if data is not None:
        return open_source(data).class_names
    return None if classes is None else tuple(split_names(classes))
