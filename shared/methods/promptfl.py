"""PromptFL and what differs from it by a line: CoOp alone, proximal, fine-tuned, personal, and FedKgCoOp.

PromptFolio is a fixed mixture of the text features of a shared and a private context. Source: Pan et al., "Federated
Learning from Vision-Language Foundation Models: Theoretical Analysis and Method" (PromptFolio), NeurIPS 2024.

Prompt+AMP: each client gets a mixture of all contexts, weighted by nearness to its own (FedAMP for prompts). Source:
Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data" (FedAMP), AAAI 2021. Notation:
w_i the last context of client i as one vector, u_i the mixture that it is sent, ``a`` contexts in all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from statistics import median
from typing import Any

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.client_rows import ROWS, ClientRowsMethod, row_of
from promptfed.shared.seeds import Draws, initial_draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.arrays import double, namespace, single
from promptfed.shared.tensors.lazy import Tensor, torch

LOCAL = "local_context"
MOST_VECTORS = 64  # rows of the common draw; a private context starts with its first rows

PairLoss = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""The loss of one task, of indices ``(B,)``, the shared context ``(m, d_t)`` and the private one ``(m_l, d_t)``."""

MESSAGE = TensorSpec("message", ("m", "d_t"))


class PromptFL(pf.SharedContextMethod):
    """Cross-entropy of cosine logits; the context is all that is trained and all that travels.

    Source: Guo et al., "PromptFL", 2023; the context is CoOp's (Zhou et al., 2022).
    """

    name = "promptfl"
    summary = "One shared context before the class names, averaged over clients by their numbers of samples."
    protects = True
    paper = "Guo et al., PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models, 2023"
    several_labels = True
    Hyper = pf.WordsHyper
    hyper: pf.ContextHyper | pf.WordsHyper
    defaults = pf.defaults(10, epochs=5)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the global context ``(m, d_t)``; sends the trained one."""
        start = payload["context"]
        learned, loss = pf.train_context(context, start, self.penalty(context, start), self.prompted(context))
        return pf.TrainResult(update={"context": learned}, metrics={"loss": loss})

    def penalty(self, context: pf.ClientContext, start: Tensor) -> pf.Penalty | None:
        """What is added to the loss of a task that starts from ``start (m, d_t)``: nothing in PromptFL."""
        return None


class PrivateContextMethod(pf.SharedContextMethod):
    """A shared context that is averaged, and a private one ``local_context (m_l, d_t)`` that never leaves its client.

    The private context starts from a common draw N(0, 0.02²), seeded by the federation's seed and the method's name, or
    at zero where contexts are changes of the template's words. Trainers that have not trained yet classify with that
    start. Evaluators have no private context and classify with the shared one alone; trainers are also measured in this
    way (``global``).
    """

    personal = True
    shared = TensorSpec("global_context", ("m", "d_t"))

    def local_length(self, context: pf.ClientContext) -> int:
        """``m_l``, vectors of the private context: as many as ``m``."""
        return self.length

    def local_context(self, context: pf.ClientContext, private: Tensors) -> Tensor:
        """The client's private context ``(m_l, d_t)``: the trained one, or the common start."""
        if LOCAL in private:
            return private[LOCAL]
        if self.of_template:
            return torch.zeros(self.local_length(context), context.backbone.d_t)
        drawn = torch.randn(MOST_VECTORS, context.backbone.d_t, generator=pf.generator(context.seed, self.name))
        return drawn[: self.local_length(context)] * pf.INIT_STD

    @abstractmethod
    def pair_loss(self, context: pf.ClientContext) -> PairLoss:
        """The loss of one task."""

    @abstractmethod
    def personal_classifier(self, context: pf.ClientContext, shared: Tensor, local: Tensor) -> pf.Classifier:
        """Classifies with both contexts."""

    def global_classifier(self, context: pf.ClientContext, shared: Tensor) -> pf.Classifier:
        """Classifies with the shared context ``(m, d_t)`` alone."""
        return self.classified(context, shared)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs over both contexts; sends the shared one, keeps the other."""
        backbone, batch_loss = context.backbone, self.pair_loss(context)
        shared = pf.leaf(payload[self.shared.name], backbone)
        local = pf.leaf(self.local_context(context, private), backbone)
        final = pf.train(
            context,
            [shared, local],
            lambda indices: batch_loss(indices, shared, local),
            reads_images=self.needs.patch_tokens,
        )
        return pf.TrainResult({self.shared.name: shared}, {LOCAL: local}, {"loss": final})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """Classifies with both contexts; with the shared one alone if there are no training images."""
        shared = payload[self.shared.name]
        if private or len(context.train):
            return self.personal_classifier(context, shared, self.local_context(context, private))
        return self.global_classifier(context, shared)

    def variants(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> dict[str, pf.Classifier]:
        """``global``: the evaluators' classifier on a trainer's data."""
        if not private and not len(context.train):
            return {}
        return {"global": self.global_classifier(context, payload[self.shared.name])}


class PromptFLProxHyper(pf.WordsHyper):
    """PromptFL's hyperparameters and the weight of the proximal term."""

    mu: float = pf.option(1.0, "weight μ of (μ/2)·‖ctx − global‖²; FedProx's own grid ends at 1", ge=0, le=1e6)


class PromptFLProx(PromptFL):
    """CE + (μ/2)·‖ctx − global‖² (Li et al., "Federated Optimization in Heterogeneous Networks", 2020, Eq. 2)."""

    name = "promptfl_prox"
    summary = "PromptFL with a proximal term that holds each client's context near the global one."
    paper = "Li et al., Federated Optimization in Heterogeneous Networks (FedProx), 2020; PromptFL as above"
    several_labels = True
    protects = True
    Hyper = PromptFLProxHyper
    hyper: PromptFLProxHyper

    def penalty(self, context: pf.ClientContext, start: Tensor) -> pf.Penalty:
        """(μ/2)·‖ctx − global‖² of contexts ``(m, d_t)``."""
        fixed = start.to(context.backbone.device)
        return lambda learned, text: self.hyper.mu / 2 * (learned - fixed).square().sum()


class PromptFLFTHyper(pf.WordsHyper):
    """PromptFL's hyperparameters and the length of the fine-tuning."""

    finetune_epochs: int = pf.option(
        5, "epochs over the client's training images before an evaluation", ge=1, le=10_000
    )
    finetune_learning_rate: float | None = pf.option(
        None, "rate of the fine-tuning; default: training.learning_rate", gt=0, le=1000
    )


class TunedClassifier(pf.TextPromptClassifier):
    """Classifies with a context ``(m, d_t)`` that was tuned for it."""

    def __init__(self, context: pf.ClientContext, learned: Tensor, method: PromptFLFT):
        super().__init__(context, learned, method.prompted(context))
        self._learned, self._method = learned, method

    def among(self, context: pf.ClientContext) -> TunedClassifier:
        """The same context before other class names."""
        return TunedClassifier(context, self._learned, self._method)


class PromptFLFT(PromptFL):
    """Trains and aggregates as PromptFL; classifies with a context fine-tuned locally, which is not kept.

    Source: the baseline PromptFL+FT of Guo et al., "pFedPrompt", 2023, after Cheng et al., "Fine-tuning is Fine in
    Federated Learning", 2021. Neither gives the number of epochs.
    """

    name = "promptfl_ft"
    summary = "PromptFL whose global context each client fine-tunes on its own images before it is evaluated."
    paper = "Cheng et al., Fine-tuning is Fine in Federated Learning, 2021; PromptFL as above"
    personal = True
    protects = True
    fine_tunes = True
    Hyper = PromptFLFTHyper
    hyper: PromptFLFTHyper

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TextPromptClassifier:
        """Classifies with the fine-tuned context; where there is nothing to train on, with the global one."""
        learned = payload["context"]
        if len(context.train):
            learned = self._fine_tuned(context, learned)
        return TunedClassifier(context, learned, self)

    def _fine_tuned(self, context: pf.ClientContext, start: Tensor) -> Tensor:
        """The context ``(m, d_t)`` after the fine-tuning from the global one, ``start (m, d_t)``."""
        rate = self.hyper.finetune_learning_rate or context.training.learning_rate
        with torch.enable_grad():  # evaluations run without gradients
            tuning = context.for_tuning(self.hyper.finetune_epochs, rate)
            learned, _ = pf.train_context(tuning, start, prompted=self.prompted(tuning))
        return learned


class PromptFLPerHyper(pf.WordsHyper):
    """A learned context and where it is divided."""

    shared_tokens: int | None = pf.option(
        None, "m_s, first vectors of the context, which are shared; default: ⌊m/2⌋", ge=1, le=63
    )


class PromptFLPer(PrivateContextMethod):
    """PromptFL's training over [shared; private]; the mean is of the shared part, the other never leaves its client.

    Source: Arivazhagan et al., "Federated Learning with Personalization Layers" (FedPer), 2019, with prompt vectors in
    the place of layers, as the baseline Prompt+PER of Guo et al., "pFedPrompt", 2023. How that one divides the context
    is not printed.
    """

    name = "promptfl_per"
    summary = "PromptFL whose last context vectors are each client's own; the first ones are shared."
    paper = "Arivazhagan et al., Federated Learning with Personalization Layers (FedPer), 2019; PromptFL as above"
    several_labels = True
    protects = True
    Hyper = PromptFLPerHyper
    hyper: PromptFLPerHyper
    defaults = PromptFL.defaults
    shared = TensorSpec("context", ("m_s", "d_t"))

    @property
    def shared_length(self) -> int:
        """``m_s``."""
        shared = self.hyper.shared_tokens
        return self.length // 2 if shared is None else shared

    def check(self, spec: pf.FederationSpec) -> None:
        """Both parts must have a vector."""
        super().check(spec)
        m, m_s = self.length, self.shared_length
        if not 0 < m_s < m:
            text = f"of m = {m} context vectors {m_s} would be shared: give 0 < shared_tokens < m"
            raise pf.MethodError(f"{text}, or take promptfl (all are shared) or coop (none is)")

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``m_s`` and the text tower's width ``d_t``."""
        return {"m_s": self.shared_length, "d_t": pf.text_width(self.name, self.length, context)}

    def local_length(self, context: pf.ClientContext) -> int:
        """The private vectors, which stand next to the class name."""
        return self.length - self.shared_length

    def pair_loss(self, context: pf.ClientContext) -> PairLoss:
        """CE(τ⁻¹·I(x)·T([shared; private], y)): PromptFL's loss of the whole context."""
        prompted, cross_entropy = self.prompted(context), pf.BatchCrossEntropy(context)

        def loss(indices: Tensor, shared: Tensor, local: Tensor) -> Tensor:
            return cross_entropy(indices, prompted(torch.cat([shared, local])))

        return loss

    def personal_classifier(self, context: pf.ClientContext, shared: Tensor, local: Tensor) -> pf.TextPromptClassifier:
        """Classifies with the whole context."""
        return self.classified(context, torch.cat([shared.cpu(), local.cpu()]))

    def global_classifier(self, context: pf.ClientContext, shared: Tensor) -> pf.TextPromptClassifier:
        """Classifies with the shared part alone; of a template the private words are as they were."""
        if self.of_template:
            return self.personal_classifier(context, shared, self.local_context(context, {}))
        return pf.TextPromptClassifier(context, shared)


class CoOp(pf.ContextMethod):
    """The local baseline: cross-entropy of cosine logits over a private context, without any exchange."""

    name = "coop"
    summary = "Each client trains a context of its own and never shares it."
    paper = "Zhou et al., Learning to Prompt for Vision-Language Models (CoOp), 2022"
    several_labels = True
    personal = True
    unprotected = "it sends nothing up; withhold evaluations"
    Hyper = pf.WordsHyper
    hyper: pf.WordsHyper
    defaults = PromptFL.defaults

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """Empty: the coordinator holds nothing."""
        return ()

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """The empty state: clients draw the common start themselves."""
        return {}

    def current(self, context: pf.ClientContext, private: Tensors) -> Tensor:
        """The client's context ``(m, d_t)``: the trained one, or the common start."""
        if "context" in private:
            return private["context"]
        return self.start(context.backbone, initial_draws(context.seed))

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the client's own context; sends no tensor."""
        learned, loss = pf.train_context(context, self.current(context, private), prompted=self.prompted(context))
        return pf.TrainResult(update={}, private={"context": learned}, metrics={"loss": loss})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TextPromptClassifier:
        """Classifies with the client's context; evaluators, which do not train, use the common start."""
        return self.classified(context, self.current(context, private))


class FedKgCoOpHyper(pf.WordsHyper):
    """PromptFL's hyperparameters and the weight of the knowledge-guided term."""

    w: float = pf.option(8.0, "weight of 1 − mean cosine to the template's text features; KgCoOp's λ", ge=0, le=1e6)


class FedKgCoOp(PromptFL):
    """CE + w·(1 − mean over classes of cos(T(ctx, y), T(template, y))).

    Source: Yao et al., "Visual-Language Prompt Tuning with Knowledge-guided Context Optimization" (KgCoOp), CVPR 2023,
    Eq. 4-5, whose squared distance of normalised features is twice this term.
    """

    name = "fedkgcoop"
    summary = "PromptFL with a term that holds the prompted text features near the template's."
    paper = "Yao et al., Visual-Language Prompt Tuning with Knowledge-guided Context Optimization (KgCoOp), 2023"
    several_labels = True
    protects = True
    Hyper = FedKgCoOpHyper
    hyper: FedKgCoOpHyper

    def penalty(self, context: pf.ClientContext, start: Tensor) -> pf.Penalty:
        """w·(1 − mean cosine) of text features ``(C, d_e)``."""
        templates = pf.template_features(context.backbone, context.template, context.class_names)
        return lambda learned, text: self.hyper.w * (1 - (text * templates).sum(dim=-1).mean())


class PromptFolioHyper(pf.WordsHyper):
    """A learned context and how much the private one counts."""

    theta: float = pf.option(
        0.4, "share θ of the private context's text features; 0: all shared, 1: all private", ge=0, le=1
    )


def mixed(text: Tensor, theta: float) -> Tensor:
    """h = (1 − θ)·z^G + θ·z^L ``(C, d_e)`` of normalised ``text (2, C, d_e)``; not normalised again."""
    return (1 - theta) * text[0] + theta * text[1]


class PromptFolio(PrivateContextMethod):
    """CE of τ⁻¹·⟨I(x), (1 − θ)·z^G + θ·z^L⟩, trained over both contexts; the shared one is averaged."""

    name = "promptfolio"
    summary = "A fixed mixture of the text features of a shared context and of each client's private one."
    paper = "Pan et al., Federated Learning from Vision-Language Foundation Models (PromptFolio), 2024"
    several_labels = True
    protects = True
    Hyper = PromptFolioHyper
    hyper: PromptFolioHyper
    defaults = pf.defaults(10, epochs=5, batch_size=16, learning_rate=0.002)

    def pair_loss(self, context: pf.ClientContext) -> PairLoss:
        """CE of τ⁻¹·⟨I(x), h⟩; both contexts are encoded in one pass."""
        prompted, cross_entropy = self.prompted(context), pf.BatchCrossEntropy(context)

        def loss(indices: Tensor, shared: Tensor, local: Tensor) -> Tensor:
            return cross_entropy(indices, mixed(prompted(torch.stack([shared, local])), self.hyper.theta))

        return loss

    def personal_classifier(self, context: pf.ClientContext, shared: Tensor, local: Tensor) -> pf.TextFeatureClassifier:
        """Logits (1 − θ)·logit^G + θ·logit^L."""
        with torch.no_grad():
            text = self.prompted(context)(torch.stack([shared, local]))
        return pf.TextFeatureClassifier(context.backbone.logit_scale, mixed(text, self.hyper.theta))


class PromptFLAMPHyper(pf.WordsHyper):
    """A learned context, and how much others' count."""

    sigma: float | None = pf.option(
        None, "σ of the weights e^(−‖w_i − w_j‖²/σ)/a; default: the median of the squared distances", gt=0, le=1e6
    )
    proximal: float = pf.option(1.0, "weight λ of (λ/2)·‖w − u‖²; stands for the paper's λ/α", ge=0, le=1e6)


def mixing_weights(rows: Any, sigma: float | None) -> Any:
    """ξ ``(a, a)`` float64 of contexts ``(a, ...)``, each row summing to 1 (Eq. 6.1)."""
    count, xp = len(rows), namespace(rows)
    flat, others = double(rows).reshape(count, -1), 1 - xp.eye(count, dtype=xp.float64)
    if count == 1:
        return xp.ones((1, 1), dtype=xp.float64)
    squares = xp.stack([((flat - context) * (flat - context)).sum(1) for context in flat])
    scale = sigma or median(squares[i, j].item() for i in range(count) for j in range(i))
    weights = others * (xp.exp(-squares / scale) / count if scale > 0 else 1 / count)
    return weights + xp.diag(1 - weights.sum(1))


class PromptFLAMP(ClientRowsMethod):
    """CE + (λ/2)·‖w − u‖² from the client's own last context; nothing is averaged, everybody gets a mixture.

    Who has no row yet gets the mean of the rows, and before round 2 the common start; so do evaluators.
    """

    name = "promptfl_amp"
    summary = "Each client trains a context of its own, held near a mixture of all that are like it."
    paper = "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data (FedAMP), 2021; PromptFL as above"
    personal = True
    protects = True
    Hyper = PromptFLAMPHyper
    hyper: PromptFLAMPHyper
    defaults = PromptFL.defaults
    disclosures = (
        pf.Disclosed("operator", "this client's last context by itself, kept until its updates are deleted"),
        pf.Disclosed(
            "sites", "mixtures in which this client's last context has a part; with two sites the other can work it out"
        ),
    )

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """One exchange a round: the mixture down, the client's own context up."""
        return (pf.Phase("train", down=(MESSAGE,), up=(pf.CONTEXT,)),)

    def payload(
        self, state: Tensors, phase: pf.Phase | None, client: pf.ClientInfo, context: pf.ServerContext
    ) -> Tensors:
        """u_i, the mixture for this client."""
        usable = self.usable(state, context)
        if not usable:
            return {MESSAGE.name: state[pf.CONTEXT.name]}
        rows = state[ROWS.name][usable]
        at = row_of(client.name, context) if any(other.name == client.name for other in context.clients) else None
        if at not in usable:
            return {MESSAGE.name: single(double(rows).mean(0))}
        weights = mixing_weights(rows, self.hyper.sigma)[usable.index(at)]
        return {MESSAGE.name: single(namespace(rows).einsum("a,amd->md", weights, double(rows)))}

    def payload_tensors(self, phase: pf.Phase | None) -> tuple[TensorSpec, ...]:
        """The mixture, to be evaluated with as to train from."""
        return (MESSAGE,)

    def aggregate(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> Tensors:
        """The rows of those counted become their contexts."""
        return self.with_answers(state, updates, context)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the client's last context, held near the mixture; sends the context."""
        mixture, weight = payload[MESSAGE.name].to(context.backbone.device), self.hyper.proximal

        def held(learned: Tensor, text: Tensor) -> Tensor:
            return weight / 2 * (learned - mixture).square().sum()

        start, prompted = self._own(payload, private), self.prompted(context)
        learned, loss = pf.train_context(context, start, held if weight else None, prompted)
        return pf.TrainResult({pf.CONTEXT.name: learned}, {pf.CONTEXT.name: learned}, {"loss": loss})

    def _own(self, payload: Tensors, private: Tensors) -> Tensor:
        return private.get(pf.CONTEXT.name, payload[MESSAGE.name])

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TextPromptClassifier:
        """With the client's own context; with what it was sent where it has trained none."""
        return self.classified(context, self._own(payload, private))
