"""pFedPrompt, a reconstruction: PromptFL, and a memory of the client's own training features beside its logits.

Guo et al., "pFedPrompt: Learning Personalized Prompt for Vision-Language Models in Federated Learning", WWW 2023, could
not be read, and has no code. Others describe it as a shared prompt with a non-parametric attention of each client over
stored features of its own images. Here their labels are looked up, and no more is claimed. Notation: F ``(N, d_e)`` the
memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.lazy import F, Tensor, torch


class PFedPromptHyper(pf.WordsHyper):
    """PromptFL's hyperparameters, and what is made of the memory."""

    weight: float = pf.option(1.0, "w, of what the memory adds to the logits", ge=0, le=1e3)
    beta: float = pf.option(5.5, "β, sharpness of the labels' kernel", gt=0, le=1e3)
    per_class: int = pf.option(16, "most images of a class in the memory", ge=1, le=10_000)


@dataclass(frozen=True)
class Memory:
    """Features ``(N, d_e)`` of training images and their labels ``(N,)``."""

    features: Tensor
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
        return cls(context.train.features()[pf.sent_to(rows, device)], candidates)


def density(images: Tensor, memory: Memory, beta: float, classes: int) -> Tensor:
    """Σ_j exp(−β(1 − ⟨f, F_j⟩))·[y_j = c] ``(B, C)`` of image features f ``(B, d_e)``: what the memory adds to w."""
    nearness = torch.exp(-beta * (1 - images @ memory.features.T))
    labelled = memory.labels >= 0
    one_hot = F.one_hot(memory.labels[labelled], classes).to(nearness.dtype)
    return nearness[:, labelled] @ one_hot


class MemoryClassifier:
    """q·⟨f, z⟩ and what the client's memory adds; plain code cannot use it."""

    def __init__(self, scale: float, text: Tensor, memory: Memory | None, hyper: PFedPromptHyper):
        self._scale, self._text, self._memory, self._hyper = scale, text, memory, hyper

    def logits(self, split: pf.Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        images = split.features()[pf.sent_to(indices, self._text.device)]
        plain = self._scale * images @ self._text.T
        if self._memory is None:
            return plain
        return plain + self._hyper.weight * density(images, self._memory, self._hyper.beta, len(self._text))

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

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """The shared context's text features, and the client's memory."""
        backbone = context.backbone
        with torch.no_grad():
            text = self.prompted(context)(payload["context"])
        memory = Memory.of(context, self.hyper.per_class)
        return MemoryClassifier(backbone.logit_scale, text, memory, self.hyper)
