"""Common parts of the CoOp family: a context of m vectors before the class name, its start and its classifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from promptfed.shared.methods.core.interface import (
    Classifier,
    ClientContext,
    Hyperparameters,
    Method,
    MethodError,
    NeedsBackbone,
    ServerContext,
    Split,
)
from promptfed.shared.methods.core.objectives import Objective
from promptfed.shared.methods.core.text_features import spoken
from promptfed.shared.methods.core.training import ClassificationLoss, leaf, train
from promptfed.shared.seeds import Draws
from promptfed.shared.spec.section import option
from promptfed.shared.spec.spec import TEMPLATE, FederationSpec
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import Tensor, no_grad, torch
from promptfed.shared.tensors.transfer import sent_to

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone, ClassPrompts

INIT_STD = 0.02
CONTEXT = TensorSpec("context", ("m", "d_t"))
LEAST_TEXT = 3  # least positions of a class besides its context: start token, name, end token

Penalty = Callable[["Tensor", "Tensor"], "Tensor"]
"""A term of the loss, of the trained context ``(m, d_t)`` and its text features ``(C, d_e)``."""

TEMPLATE_WORDS = 4  # vectors for the last words of a template before its class name


class ContextHyper(Hyperparameters):
    """Hyperparameters of a learned context (CoOp, Zhou et al. 2022, section 3.2)."""

    m: int = option(16, "learned vectors", ge=1, le=64)
    context_init: str | None = option(
        None, "words whose token embeddings start the context; default: N(0, 0.02²)", max_length=200
    )


class WordsHyper(Hyperparameters):
    """Hyperparameters of a learned context that is the template's words, changed, unless ``m`` is given."""

    m: int | None = option(
        None,
        "learned vectors: they start as N(0, 0.02²); left out: changes of the template's last "
        f"{TEMPLATE_WORDS} words before {{}}, which start at zero, so that round 0 is zero-shot",
        ge=1,
        le=64,
    )
    context_init: str | None = option(None, "words whose token embeddings start the context, with m", max_length=200)


def cosine_logits(scale: float, features: Tensor, indices: Tensor, text: Tensor) -> Tensor:
    """Logits ``(B, C)`` τ⁻¹·I(x)·T(y) of normalised ``features (N, d_e)`` at ``indices (B,)`` and ``text (C, d_e)``."""
    logits: Tensor = scale * features[sent_to(indices, features.device)] @ text.T
    return logits


class FeatureClassifier:
    """Classifies image features ``(B, d_e)``, by default normalised ones, by a function to ``(B, C)`` logits."""

    def __init__(self, of: Callable[[Tensor], Tensor], read: Callable[[Split], Tensor] | None = None):
        self._of, self._read = of, read

    @no_grad
    def logits(self, split: Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        features = split.features() if self._read is None else self._read(split)
        return self._of(features[sent_to(indices, features.device)])


class TextFeatureClassifier:
    """Logits τ⁻¹·I(x)·t of image features with one vector ``t`` for each class, ``text (C, d_e)``."""

    def __init__(self, scale: float, text: Tensor):
        self._scale, self._text = scale, text

    def logits(self, split: Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        return cosine_logits(self._scale, split.features(), indices, self._text)

    def weights(self) -> Tensors:
        """The class vectors ``(C, d_e)``."""
        return {"class_weights": self._text}


class Prompted:
    """Text features ``(..., C, d_e)`` of a task's candidates under contexts ``(..., m, d_t)`` before their names.

    ``of_template``: the vectors are changes of the embeddings of the template's last words before ``{}``. There zero is
    zero-shot, and of more vectors than words the last ones count. A template without words there has `TEMPLATE`'s.
    """

    def __init__(self, context: ClientContext, m: int, of_template: bool = False):
        self._backbone, names = context.backbone, context.class_names
        self._words: Tensor | None = None
        if not of_template:
            self._prompts = class_prompts(context, m)
            return
        for template in (context.template, TEMPLATE):
            texts, words = [template.replace("{}", spoken(name)) for name in names], template.partition("{}")[0]
            self._prompts = self._backbone.template_prompts(names, texts, words, m)
            if self._prompts.context_length:
                break
        self._words = self._backbone.words_of(self._prompts)

    def __call__(self, vectors: Tensor) -> Tensor:
        """Normalised text features; gradients flow to ``vectors``."""
        if self._words is not None:
            vectors = self._words + vectors[..., -len(self._words) :, :].to(self._words.device)
        return self._backbone.encode_prompts(vectors, self._prompts)


class TextPromptClassifier(TextFeatureClassifier):
    """Cosine logits of image features and the text features of one context: τ⁻¹·I(x)·T(ctx, y)."""

    def __init__(self, context: ClientContext, vectors: Tensor, prompted: Prompted | None = None):
        """vectors: the context ``(m, d_t)`` before the candidates' names; by default it is no change of words."""
        with torch.no_grad():
            text = (prompted or Prompted(context, len(vectors)))(vectors.to(context.backbone.device))
        super().__init__(context.backbone.logit_scale, text)


class ContextMethod(Method):
    """Base of methods that learn one context ``(m, d_t)``, which precedes every class name."""

    Hyper: ClassVar[type[Hyperparameters]] = ContextHyper
    hyper: ContextHyper | WordsHyper
    shared: ClassVar[TensorSpec] = CONTEXT  # the context in the global state

    @property
    def of_template(self) -> bool:
        """Whether the context is a change of the template's words."""
        return self.hyper.m is None

    @property
    def length(self) -> int:
        """m, the number of context vectors."""
        return self.hyper.m or TEMPLATE_WORDS

    @property
    def shared_length(self) -> int:
        """The number of context vectors in the global state."""
        return self.length

    def check(self, spec: FederationSpec) -> None:
        """Refuse an empty ``context_init``, and one without a number of vectors."""
        words = self.hyper.context_init
        if words is not None and not words.strip():
            raise MethodError("context_init is empty: give words, or leave it out")
        if words is not None and self.of_template:
            raise MethodError("context_init takes m, the number of vectors, of which the last are its words: give both")

    @property
    def prompt_length(self) -> int:
        """As many as ``m``."""
        return self.length

    def prompted(self, context: ClientContext) -> Prompted:
        """What makes text features of contexts ``(m, d_t)``."""
        return Prompted(context, self.length, self.of_template)

    def classified(self, context: ClientContext, vectors: Tensor) -> TextPromptClassifier:
        """Classifies with the context ``(m, d_t)``."""
        return TextPromptClassifier(context, vectors, self.prompted(context))

    def dims(self, context: ServerContext) -> dict[str, int]:
        """``m`` and the text tower's width ``d_t``."""
        return {"m": self.length, "d_t": text_width(self.name, self.length, context)}

    def initial_state(self, context: ServerContext, draws: Draws) -> Tensors:
        """Zero changes of the template, or a context from N(0, 0.02²); NeedsBackbone if it starts from words."""
        if self.hyper.context_init is not None:
            raise NeedsBackbone(
                f"the context starts from the words {self.hyper.context_init!r}, which takes a backbone: create the "
                "federation with `promptfed federation create`, or PUT the tensors to its initial-state"
            )
        shape = self.shared_length, self.dims(context)["d_t"]
        if self.of_template:
            return {self.shared.name: draws.xp.zeros(shape, dtype=draws.xp.float32)}
        return {self.shared.name: draws.normal(*shape) * INIT_STD}

    def initial_state_with(self, backbone: Backbone, context: ServerContext, draws: Draws) -> Tensors:
        """The initial state, made with a backbone."""
        return {self.shared.name: self.start(backbone, draws)}

    def start(self, backbone: Backbone, draws: Draws) -> Tensor:
        """The state's context ``(m, d_t)``: its last vectors are embeddings of the given words, the others random.

        Zeros where it is a change of the template's words.
        """
        if self.of_template:
            return torch.zeros(self.shared_length, backbone.d_t)
        if self.hyper.context_init is None:
            random: Tensor = draws.normal(self.shared_length, backbone.d_t) * INIT_STD
            return random
        words = backbone.embed_words(self.hyper.context_init).detach().float().cpu()
        m = self.shared_length
        if len(words) > m:
            raise MethodError(f"context_init has {len(words)} tokens, more than m = {m}: raise m or use fewer words")
        return torch.cat([draws.normal(m - len(words), words.shape[1]) * INIT_STD, words])


class SharedContextMethod(ContextMethod):
    """A context that clients train in turn and the coordinator averages."""

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The context."""
        return (self.shared,)

    def classifier(self, context: ClientContext, payload: Tensors, private: Tensors) -> Classifier:
        """Classifies with the global context."""
        return self.classified(context, payload[self.shared.name])


def text_width(method: str, m: int, context: ServerContext) -> int:
    """``d_t`` of a text tower with room for ``m`` context vectors. Raises MethodError if there is none."""
    shape = context.shape
    if shape.d_t is None:
        raise MethodError(f"{method} needs a text tower that prompts can enter; this backbone has none")
    if shape.context_length is not None and m + LEAST_TEXT > shape.context_length:
        raise MethodError(
            f"a context of m = {m} vectors leaves no room for a class name in the backbone's {shape.context_length} "
            f"text positions: use at most m = {shape.context_length - LEAST_TEXT}"
        )
    return shape.d_t


def class_prompts(context: ClientContext, m: int) -> ClassPrompts:
    """The tokenised names of the task's label space after ``m`` context vectors."""
    return context.backbone.class_prompts(context.class_names, m)


class BatchCrossEntropy:
    """CE(τ⁻¹·I(x)·T(y)), or the spec's loss, over batches of a client's training images, on cached image features."""

    def __init__(self, context: ClientContext):
        self._scale = context.backbone.logit_scale
        self._features = context.train.features()
        self._labels = context.train.labels.to(context.backbone.device)
        self._loss = ClassificationLoss(context)

    def __call__(self, indices: Tensor, text: Tensor) -> Tensor:
        """The mean loss of the images at ``indices (B,)`` under normalised text features ``(C, d_e)``."""
        logits = cosine_logits(self._scale, self._features, indices, text)
        return self._loss(logits, self._labels[sent_to(indices, self._labels.device)])

    def each(self, indices: Tensor, texts: Tensor) -> Tensor:
        """Losses ``(b,)`` of the images at ``indices (b,)``, each under its own text features ``texts (b, C, d_e)``."""
        some = sent_to(indices, self._labels.device)
        logits = self._scale * torch.einsum("bd,bcd->bc", self._features[some.to(self._features.device)], texts)
        return self._loss.each(logits, self._labels[some])


def train_context(
    context: ClientContext, start: Tensor, penalty: Penalty | None = None, prompted: Prompted | None = None
) -> tuple[Tensor, float]:
    """Train a context from ``start (m, d_t)`` on CE(τ⁻¹·I(x)·T(ctx, y)) + penalty(ctx, T).

    ``prompted`` makes T of it; by default it is no change of words. Returns the trained context ``(m, d_t)`` on the CPU
    and the mean loss of the last epoch.
    """
    learned, cross_entropy = leaf(start, context.backbone), BatchCrossEntropy(context)
    encoded = prompted or Prompted(context, len(start))

    def loss(indices: Tensor) -> Tensor:
        text = encoded(learned)
        value = cross_entropy(indices, text)
        return value if penalty is None else value + penalty(learned, text)

    def units(copies: Sequence[Tensor], indices: Tensor) -> Tensor:
        return cross_entropy.each(indices, encoded(copies[0]))

    def common(parameters: Sequence[Tensor]) -> Tensor:
        assert penalty is not None
        return penalty(parameters[0], encoded(parameters[0]))

    final = train(context, [learned], loss, objective=Objective(units, None if penalty is None else common))
    return learned.detach().cpu(), final
