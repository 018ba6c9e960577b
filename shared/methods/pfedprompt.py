"""pFedPrompt, a reconstruction: PromptFL, and a memory of the client's own training features beside its logits.

Guo et al., "pFedPrompt: Learning Personalized Prompt for Vision-Language Models in Federated Learning", WWW 2023, could
not be read, and has no code. Others describe it as a shared prompt with a non-parametric attention of each client over
stored features of its own images. This is that, and no more is claimed. Notation: F ``(N, d_e)`` the memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.lazy import F, Tensor, torch


class PFedPromptHyper(pf.ContextHyper):
    """PromptFL's hyperparameters, and what is made of the memory."""

    memory: Literal["features", "labels"] = pf.option(
        "labels", "add a kernel density of the memory's labels (Tip-Adapter's), or attend to its features"
    )
    weight: float = pf.option(1.0, "w, of what the memory adds to the logits", ge=0, le=1e3)
    kappa: float | None = pf.option(None, "κ, sharpness of the attention; default: the logit scale", gt=0, le=1e4)
    beta: float = pf.option(5.5, "β, sharpness of the labels' kernel", gt=0, le=1e3)
    query: Literal["pooled", "patches"] = pf.option(
        "pooled", "what attends to the memory: the image, or each of its patches"
    )
    per_class: int = pf.option(16, "most images of a class in the memory", ge=1, le=10_000)
    train_with_memory: bool = pf.option(
        False, "whether the memory stands in the training loss too, without the image itself"
    )


@dataclass(frozen=True)
class Memory:
    """Features ``(N, d_e)`` of training images, their rows among these ``(N,)`` and their labels ``(N,)``."""

    features: Tensor
    rows: Tensor
    labels: Tensor

    @classmethod
    def of(cls, context: pf.ClientContext, per_class: int) -> Memory | None:
        """At most ``per_class`` images of each class, drawn by the federation's seed; None without training images.

        Labels are indices in the candidates, matched by name; -1 where a class is none of them.
        """
        if not len(context.train):
            return None
        labels = context.train.labels
        draws = pf.generator(context.seed, "memory", context.client)
        order = torch.randperm(len(labels), generator=draws)
        kept = torch.cat([order[labels[order] == label][:per_class] for label in sorted(set(labels.tolist()))])
        rows = kept.sort().values
        device = context.backbone.device
        candidates = context.among_candidates(labels[rows]).to(device)
        return cls(context.train.features()[pf.sent_to(rows, device)], pf.sent_to(rows, device), candidates)


class MemoryLogits:
    """What the memory adds to the logits of images ``(B, C)``."""

    def __init__(self, hyper: PFedPromptHyper, memory: Memory, scale: float):
        self._hyper, self._memory, self._scale = hyper, memory, scale
        self._kappa = hyper.kappa if hyper.kappa is not None else scale

    def __call__(self, split: pf.Split, indices: Tensor, text: Tensor, own: bool = False) -> Tensor:
        """Of the images at ``indices (B,)`` and text features ``(C, d_e)``; ``own``: they are training images, each of
        which is left out of its own memory.
        """
        rows = pf.sent_to(indices, text.device)
        images = split.features()[rows]
        left_out = self._memory.rows[None, :] == rows[:, None] if own else None  # (B, N)
        if self._hyper.memory == "labels":
            return self._hyper.weight * self._density(images, left_out, len(text))
        queries = split.patches(indices) if self._hyper.query == "patches" else images.unsqueeze(1)
        return self._hyper.weight * self._scale * self._recalled(queries, left_out) @ text.T

    def _recalled(self, queries: Tensor, left_out: Tensor | None) -> Tensor:
        """f̂ ``(B, d_e)`` of ``queries (B, P, d_e)``; zero where the memory is empty."""
        scores = self._kappa * queries @ self._memory.features.T  # (B, P, N)
        if left_out is not None:
            scores = scores.masked_fill(left_out[:, None, :], -torch.inf)
        shares = torch.nan_to_num(scores.softmax(dim=-1))  # NaN where nothing is left
        return F.normalize((shares @ self._memory.features).mean(dim=1), dim=-1)

    def _density(self, images: Tensor, left_out: Tensor | None, classes: int) -> Tensor:
        """Σ_j exp(−β(1 − ⟨f, F_j⟩))·[y_j = c] ``(B, C)``."""
        nearness = torch.exp(-self._hyper.beta * (1 - images @ self._memory.features.T))
        if left_out is not None:
            nearness = nearness.masked_fill(left_out, 0)
        known = self._memory.labels >= 0
        one_hot = F.one_hot(self._memory.labels[known], classes).to(nearness.dtype)
        return nearness[:, known] @ one_hot


class MemoryClassifier:
    """q·⟨f, z⟩ and what the client's memory adds; plain code cannot use it."""

    def __init__(self, scale: float, text: Tensor, memory: MemoryLogits | None):
        self._scale, self._text, self._memory = scale, text, memory

    def logits(self, split: pf.Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        plain = self._scale * split.features()[pf.sent_to(indices, self._text.device)] @ self._text.T
        return plain if self._memory is None else plain + self._memory(split, indices, self._text)

    def weights(self) -> Tensors | None:
        """The text features where there is no memory, else none."""
        return {"class_weights": self._text} if self._memory is None else None


class PFedPrompt(PromptFL):
    """Trains and sends what PromptFL does; the memory is made anew of the kept features, and never leaves the client.

    Evaluators, and clients without training images, have no memory.
    """

    name = "pfedprompt"
    summary = "A reconstruction: PromptFL, and each client's attention over features of its own training images."
    paper = "Guo et al., pFedPrompt: Learning Personalized Prompt for Vision-Language Models, 2023 (a reconstruction)"
    personal = True
    unprotected = "it keeps features of a client's images, untouched by noise"
    Hyper = PFedPromptHyper
    hyper: PFedPromptHyper

    def __init__(self, hyper: PFedPromptHyper):
        super().__init__(hyper)
        if hyper.query == "patches":
            self.needs = replace(self.needs, patch_tokens=True)

    def check(self, spec: pf.FederationSpec) -> None:
        """Labels are looked up by the image, not by its patches."""
        super().check(spec)
        if self.hyper.query == "patches" and self.hyper.memory == "labels":
            raise pf.MethodError("memory: labels is looked up by the image: leave query out, or take memory: features")

    def _memory(self, context: pf.ClientContext) -> MemoryLogits | None:
        memory = Memory.of(context, self.hyper.per_class)
        return None if memory is None else MemoryLogits(self.hyper, memory, context.backbone.logit_scale)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """PromptFL's training; with ``train_with_memory`` the memory's logits stand in the loss."""
        memory = self._memory(context) if self.hyper.train_with_memory else None
        if memory is None:
            return super().train(context, payload, private)
        backbone, split = context.backbone, context.train
        learned = pf.leaf(payload["context"], backbone)
        prompts, features = pf.class_prompts(context, self.hyper.m), split.features()
        labels = split.labels.to(backbone.device)

        def loss(indices: Tensor) -> Tensor:
            rows, text = pf.sent_to(indices, backbone.device), backbone.encode_prompts(learned, prompts)
            logits = backbone.logit_scale * features[rows] @ text.T + memory(split, indices, text, own=True)
            return F.cross_entropy(logits, labels[rows])

        final = pf.train(context, [learned], loss, reads_images=self.hyper.query == "patches")
        return pf.TrainResult({"context": learned}, metrics={"loss": final})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """The shared context's text features, and the client's memory."""
        backbone = context.backbone
        with torch.no_grad():
            text = backbone.encode_prompts(payload["context"], pf.class_prompts(context, self.hyper.m))
        return MemoryClassifier(backbone.logit_scale, text, self._memory(context))
