"""DiPrompT, a reconstruction: a global prompt, a prompt for each candidate domain, and one that identifies domains.

Bai et al., "DiPrompT: Disentangled Prompt Tuning for Multiple Latent Domain Generalization in Federated Learning", CVPR
2024, has no code, and its equations could not be read. Known are these three prompts, two alignments by which a sample
finds its domain without labels, a free number of domains, a moving average of the domain prompts, and an ensemble. This
implementation follows that description and does not claim to reproduce the paper's figures. Notation: ``M`` candidate
domains, G ``(m, d_t)``, D_j, Q the prompts, I(x) an image's normalised feature.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import F, Tensor, torch

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone

GLOBAL = TensorSpec("global_prompt", ("m", "d_t"))
DOMAIN = TensorSpec("domain_prompts", ("M", "m", "d_t"))
QUERY = TensorSpec("query_prompt", ("m", "d_t"))


def _with_one_slot(description: str) -> str:
    if description.count("{}") != 1 or not words_of(description):
        raise ValueError("a candidate domain must hold '{}' exactly once, and words, as in 'a sketch of a {}'")
    return description


def words_of(description: str) -> str:
    """A candidate's words without the place of the class name."""
    return " ".join(description.replace("{}", " ").split())


Candidate = Annotated[str, Field(max_length=200), AfterValidator(_with_one_slot)]


class DiPromptHyper(pf.Hyperparameters):
    """The prompts, and the domains that there may be."""

    m: int = pf.option(4, "vectors of each prompt", ge=1, le=64)
    candidates: list[Candidate] = pf.option(
        ["a photo of a {}", "a painting of a {}", "a sketch of a {}"],
        "descriptions of the M candidate domains, which need be nobody's, with '{}' for the class name",
        min_length=2,
        max_length=64,
    )
    beta: float = pf.option(0.5, "β of the domain prompts' moving average at the coordinator", ge=0, lt=1)
    query: Literal["learned", "fixed"] = pf.option(
        "learned", "fixed: domains are told apart by their descriptions alone"
    )


class EnsembleClassifier:
    """(D5) log of ½·softmax(G) + ½·Σ_j w_j·softmax(D_j)."""

    def __init__(self, context: pf.ClientContext, texts: Tensor, queries: Tensor, names: tuple[str, ...]):
        """texts ``(1 + M, C, d_e)`` under G and the D_j, queries ``(M, d_e)`` of the domains."""
        self._scale, self._texts, self._queries = context.backbone.logit_scale, texts, queries
        self.domain_names = names

    def logits(self, split: pf.Split, indices: Tensor) -> Tensor:
        """``(B, C)``, log p of the images at ``indices (B,)``."""
        features = split.features()
        features = features[pf.sent_to(indices, features.device)]
        each = (self._scale * torch.einsum("bd,jcd->bjc", features, self._texts)).softmax(-1)
        mixed = torch.einsum("bj,bjc->bc", self.shares(split, indices), each[:, 1:])
        return torch.log((each[:, 0] + mixed) / 2)

    def shares(self, split: pf.Split, indices: Tensor) -> Tensor:
        """w ``(B, M)`` of the images at ``indices (B,)``."""
        features = split.features()
        return (self._scale * features[pf.sent_to(indices, features.device)] @ self._queries.T).softmax(-1)


class DiPrompt(pf.Method):
    """All prompts both ways; all clients classify with the ensemble."""

    name = "diprompt"
    summary = "A reconstruction: a global prompt and one for each candidate domain, which images find by a third."
    paper = "Bai et al., DiPrompT: Disentangled Prompt Tuning for Multiple Latent Domains, 2024 (a reconstruction)"
    unprotected = "which prompts train depends on the images"
    metrics = ("loss", "query_loss", "domain_share_*")
    evaluation_metrics = (pf.SHARE + "*",)
    shares = ("domain_share_*",)
    Hyper = DiPromptHyper
    hyper: DiPromptHyper
    defaults = pf.defaults(20, epochs=5, batch_size=16, learning_rate=0.005)

    @property
    def _learned(self) -> bool:
        return self.hyper.query == "learned"

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """G, D and, where it is learned, Q."""
        return (GLOBAL, DOMAIN) + (QUERY,) * self._learned

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``M``, ``m`` and the text tower's width ``d_t``."""
        sizes = {"M": len(self.hyper.candidates), "m": self.hyper.m}
        return sizes | {"d_t": pf.text_width(self.name, self.hyper.m, context)}

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """Every row drawn from N(0, 0.02²)."""
        dims = self.dims(context)
        return {spec.name: draws.normal(*spec.resolve(dims)) * pf.INIT_STD for spec in self.state_tensors()}

    def aggregate(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> Tensors:
        """(D4) the mean of G and Q; D ← β·D + (1 − β)·mean."""
        after, beta = combine(updates), self.hyper.beta
        return after | {DOMAIN.name: beta * state[DOMAIN.name] + (1 - beta) * after[DOMAIN.name]}

    @property
    def prompt_length(self) -> int:
        """As many as ``m``."""
        return self.hyper.m

    def check_texts(self, backbone: Backbone, class_names: tuple[str, ...], template: str) -> None:
        """Class names must fit behind the prompts and into every candidate's description."""
        super().check_texts(backbone, class_names, template)
        backbone.class_prompts(self._words, self.hyper.m)
        for description in self.hyper.candidates:
            pf.template_features(backbone, description, class_names)

    @property
    def _words(self) -> tuple[str, ...]:
        return tuple(words_of(description) for description in self.hyper.candidates)

    def queries(self, backbone: Backbone, query: Tensor | None) -> Tensor:
        """``(M, d_e)`` T([Q, words_j]), or of the words alone."""
        if query is None:
            return torch.cat([pf.template_features(backbone, "{}", [words]) for words in self._words])
        return backbone.encode_prompts(query, backbone.class_prompts(self._words, self.hyper.m))

    def nearest(self, context: pf.ClientContext) -> Tensor:
        """(D1) j₀ ``(N,)``: of each training image the candidate whose text of its own class is nearest."""
        texts = torch.stack(
            [
                pf.template_features(context.backbone, description, context.class_names)
                for description in self.hyper.candidates
            ]
        )
        label_texts = texts[:, context.train.labels.to(texts.device)]  # (M, N, d_e)
        return torch.einsum("nd,jnd->nj", context.train.features(), label_texts).argmax(1)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of Q on (D2), then E epochs of G and D on (D3)."""
        context.expect_images()
        update, metrics = dict(payload), {}
        if self._learned:
            update[QUERY.name], metrics["query_loss"] = self._train_query(context, payload[QUERY.name])
        with torch.no_grad():
            queries = self.queries(context.backbone, update.get(QUERY.name))
        chosen = (context.train.features() @ queries.T).argmax(1)
        trained, metrics["loss"] = self._train_prompts(context, payload, chosen)
        counts = torch.bincount(chosen.cpu(), minlength=len(self.hyper.candidates))
        # Decay and momentum reach prompts that no image has chosen, too: these are sent as they came.
        trained[DOMAIN.name] = torch.where((counts > 0)[:, None, None], trained[DOMAIN.name], payload[DOMAIN.name])
        shares = {f"domain_share_{number}": float(count) / len(chosen) for number, count in enumerate(counts)}
        return pf.TrainResult(update | trained, metrics=metrics | shares)

    def _train_query(self, context: pf.ClientContext, start: Tensor) -> tuple[Tensor, float]:
        backbone, device = context.backbone, context.backbone.device
        query = pf.leaf(start, backbone)
        features, nearest = context.train.features(), self.nearest(context)

        def loss(indices: Tensor) -> Tensor:
            rows = pf.sent_to(indices, device)
            scores = backbone.logit_scale * features[rows] @ self.queries(backbone, query).T
            return F.cross_entropy(scores, nearest[rows])

        # Batches of its own, since G's are drawn for the same task.
        final = pf.train(replace(context, phase=f"{context.phase}/{QUERY.name}"), [query], loss)
        return query.detach().cpu(), final

    def _train_prompts(self, context: pf.ClientContext, payload: Tensors, chosen: Tensor) -> tuple[Tensors, float]:
        backbone, device = context.backbone, context.backbone.device
        common, domains = (pf.leaf(payload[spec.name], backbone) for spec in (GLOBAL, DOMAIN))
        prompts = pf.class_prompts(context, self.hyper.m)
        features, labels = context.train.features(), context.train.labels.to(device)

        def loss(indices: Tensor) -> Tensor:
            rows = pf.sent_to(indices, device)
            texts = backbone.encode_prompts(torch.cat([common.unsqueeze(0), domains]), prompts)
            general = features[rows] @ texts[0].T
            special = torch.einsum("bd,bcd->bc", features[rows], texts[1:][chosen[rows]])
            scale, targets = backbone.logit_scale, labels[rows]
            return F.cross_entropy(scale * general, targets) + F.cross_entropy(scale * special, targets)

        final = pf.train(context, [common, domains], loss)
        return {GLOBAL.name: common.detach().cpu(), DOMAIN.name: domains.detach().cpu()}, final

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """The ensemble."""
        whole = torch.cat([payload[GLOBAL.name].unsqueeze(0), payload[DOMAIN.name]])
        with torch.no_grad():
            texts = context.backbone.encode_prompts(whole, pf.class_prompts(context, self.hyper.m))
            queries = self.queries(context.backbone, payload.get(QUERY.name))
        return EnsembleClassifier(context, texts, queries, self._words)
