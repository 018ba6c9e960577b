"""Multi-modal style transfer (MST): image embeddings turned into another domain's style by its description alone.

For each other domain j a perceptron Q learns on one client's own embeddings I of class y

    L = λ·(1 − cos(Q(I) − I, T(t_j, y) − T(t_i, y))) + (1 − λ)·CE(Q(I)·T(t_y))          (both means over the batch)

with t_i and t_j the descriptions of its own and of the other domain, t_y the template, and T normalised text features.
The logits of the second term are cosines, as Eq. 2 prints them; ``mst_temperature`` divides them, since the paper calls
the term "CLIP's standard contrastive loss", which has one. Source: Chen et al., FaST-PT, AAAI 2026, Eq. 1-3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from promptfed.shared.messages import Domain
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.training import TaskCancelled, batches
from promptfed.shared.methods.fast_pt.domains import domain_key, wording
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.lazy import F, torch

if TYPE_CHECKING:
    from torch import Generator, Tensor

PARAMETERS = ("w1", "b1", "w2", "b2")
REPORTED = ("alignment_before", "alignment_after", "consistency_before", "consistency_after")


class StyleTransferHyper(pf.Hyperparameters):
    """How the transforms are trained; the paper gives λ, the rate, the decay and d_e/2 hidden units."""

    mst_weight: float = pf.option(0.5, "λ, the alignment term's share of MST's loss", ge=0, le=1)
    mst_temperature: float = pf.option(
        1.0, "divides the cosines of MST's consistency term; CLIP's own is 0.01", gt=0, le=100
    )
    mst_hidden: int | None = pf.option(None, "hidden units of a transform; default: half of d_e", ge=1, le=65_536)
    mst_steps: int = pf.option(
        400, "steps of each transform's training, however few images there are", ge=1, le=1_000_000
    )
    mst_epochs: int | None = pf.option(
        None, "epochs of each transform's training, instead of mst_steps", ge=1, le=10_000
    )
    mst_batch_size: int = pf.option(256, "batch of a transform's training", ge=1, le=100_000)
    mst_learning_rate: float = pf.option(1e-3, "AdamW's rate in MST", gt=0, le=10)
    mst_weight_decay: float = pf.option(0.05, "AdamW's weight decay in MST", ge=0, le=10)


def new_transform(d_e: int, hidden: int, draws: Generator) -> Tensors:
    """Parameters of d_e→hidden→d_e, each layer uniform in ±1/√(its inputs)."""

    def uniform(*shape: int, inputs: int) -> Tensor:
        return (torch.rand(*shape, generator=draws) * 2 - 1) / math.sqrt(inputs)

    return {
        "w1": uniform(hidden, d_e, inputs=d_e),
        "b1": uniform(hidden, inputs=d_e),
        "w2": uniform(d_e, hidden, inputs=hidden),
        "b2": uniform(d_e, inputs=hidden),
    }


def transform(parameters: Tensors, embeddings: Tensor) -> Tensor:
    """``(N, d_e)`` Q(I) = W₂·ReLU(W₁I + b₁) + b₂ of ``embeddings (N, d_e)``, not normalised."""
    hidden = F.relu(F.linear(embeddings, parameters["w1"], parameters["b1"]))
    return F.linear(hidden, parameters["w2"], parameters["b2"])


def transferred(parameters: Tensors, embeddings: Tensor) -> Tensor:
    """``(N, d_e)`` normalised embeddings in the other domain's style, as they are trained on."""
    with torch.no_grad():
        moved = transform({name: tensor.to(embeddings.device) for name, tensor in parameters.items()}, embeddings)
        return F.normalize(moved, dim=-1)


def alignment(moved: Tensor, original: Tensor, directions: Tensor) -> Tensor:
    """``(N,)`` cosines of Q(I) − I with each image's text direction ``(N, d_e)``."""
    return F.cosine_similarity(moved - original, directions, dim=-1)


def transfer_loss(
    moved: Tensor, original: Tensor, labels: Tensor, directions: Tensor, text: Tensor, hyper: StyleTransferHyper
) -> Tensor:
    """MST's loss of a batch: ``moved`` and ``original (B, d_e)``, directions and template features ``(C, d_e)``."""
    aligned = (1 - alignment(moved, original, directions[labels])).mean()
    consistent = F.cross_entropy(F.normalize(moved, dim=-1) @ text.T / hyper.mst_temperature, labels)
    return hyper.mst_weight * aligned + (1 - hyper.mst_weight) * consistent


@dataclass(frozen=True)
class EmbeddedSplit:
    """Embeddings ``(N, d_e)`` with labels ``(N,)`` as a split (``core.interface.Split``)."""

    values: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def features(self) -> Tensor:
        """``(N, d_e)``."""
        return self.values

    def raw_features(self) -> Tensor:
        """Raises MethodError: transferred embeddings lie on the sphere."""
        raise pf.MethodError("transferred embeddings have no lengths")

    def images(self, indices: Tensor) -> Tensor:
        """Raises MethodError: only embeddings are transferred."""
        raise pf.MethodError("transferred embeddings have no images")

    def patches(self, indices: Tensor) -> Tensor:
        """Raises MethodError: only embeddings are transferred."""
        raise pf.MethodError("transferred embeddings have no patches")

    @staticmethod
    def of(parts: Iterable[tuple[Tensor, Tensor]]) -> EmbeddedSplit:
        """Several embeddings with their labels as one split."""
        values, labels = zip(*parts, strict=True)
        return EmbeddedSplit(torch.cat(values), torch.cat(labels))


class StyleTransfer:
    """A client's transforms in its private state: one for each other domain, kept by the two descriptions."""

    def __init__(self, context: pf.ClientContext, hyper: StyleTransferHyper):
        if context.domain is None:
            raise pf.MethodError(
                f"client {context.client!r} has no domain description, which style transfer starts from"
            )
        self._context = context.for_training()
        self._hyper = hyper
        self._own = context.domain.description

    def has(self, private: Tensors, target: Domain) -> bool:
        """Whether the transform to ``target`` is there."""
        return self._name(target, PARAMETERS[0]) in private

    def apply(self, private: Tensors, target: Domain) -> Tensor:
        """``(N, d_e)`` the client's training embeddings in the style of ``target``."""
        parameters = {name: private[self._name(target, name)] for name in PARAMETERS}
        return transferred(parameters, self._context.train.features())

    def train(self, target: Domain) -> Tensors:
        """The tensors of a new transform to ``target``, with what is to be reported of it.

        Raises:
            TaskCancelled: the client was told to stop meanwhile.
        """
        context, hyper = self._context, self._hyper
        features = context.train.features()
        draws = pf.generator(context.seed, context.client, "style-transfer", wording(target.description))
        hidden = hyper.mst_hidden or max(1, features.shape[1] // 2)
        start = new_transform(features.shape[1], hidden, draws)
        learned = {name: tensor.to(features.device).requires_grad_() for name, tensor in start.items()}
        before = self.quality(learned, target)
        with torch.enable_grad():  # an evaluation, which asks for it first, has gradients switched off
            self._minimise(learned, target, draws)
        report = torch.tensor(
            [value for pair in zip(before, self.quality(learned, target), strict=True) for value in pair]
        )
        trained = {name: tensor.detach().cpu() for name, tensor in learned.items()}
        return {self._name(target, name): tensor for name, tensor in (trained | {"report": report}).items()}

    def _minimise(self, parameters: Tensors, target: Domain, draws: Generator) -> None:
        context, hyper = self._context, self._hyper
        features, labels = context.train.features(), context.train.labels.to(context.backbone.device)
        directions, text = self._texts(target)
        optimizer = torch.optim.AdamW(
            list(parameters.values()), lr=hyper.mst_learning_rate, weight_decay=hyper.mst_weight_decay
        )
        for rows in self._batches(len(labels), draws):
            if context.cancelled():
                raise TaskCancelled
            rows = pf.sent_to(rows, features.device)
            optimizer.zero_grad(set_to_none=True)
            moved = transform(parameters, features[rows])
            loss = transfer_loss(moved, features[rows], labels[rows], directions, text, hyper)
            torch.autograd.backward(loss)
            optimizer.step()

    def _batches(self, count: int, draws: Generator) -> Iterator[Tensor]:
        """``mst_epochs`` passes, or ``mst_steps`` batches: with few images an epoch is a single step."""
        hyper = self._hyper
        if hyper.mst_epochs is not None:
            return batches(count, hyper.mst_batch_size, hyper.mst_epochs, draws)
        epochs = math.ceil(hyper.mst_steps / math.ceil(count / hyper.mst_batch_size))
        return islice(batches(count, hyper.mst_batch_size, epochs, draws), hyper.mst_steps)

    def quality(self, parameters: Tensors, target: Domain) -> tuple[float, float]:
        """Mean cosine with the text direction, and the share of embeddings whose class the template still reads."""
        features, labels = self._context.train.features(), self._context.train.labels.to(self._context.backbone.device)
        directions, text = self._texts(target)
        with torch.no_grad():
            moved = transform(parameters, features)
            aligned = alignment(moved, features, directions[labels]).mean()
            read = (moved @ text.T).argmax(dim=-1) == labels
        return float(aligned), float(read.float().mean())

    def report(self, private: Tensors, target: Domain) -> dict[str, float]:
        """Alignment and consistency before and after the training of the transform to ``target``, while kept."""
        values = private.get(self._name(target, "report"))
        return {} if values is None else dict(zip(REPORTED, values.tolist(), strict=True))

    def without_report(self, private: Tensors, target: Domain) -> Tensors:
        """The private state once the report on ``target`` has gone out."""
        return {name: tensor for name, tensor in private.items() if name != self._name(target, "report")}

    def _texts(self, target: Domain) -> tuple[Tensor, Tensor]:
        """``(C, d_e)`` text directions T(t_j, y) − T(t_i, y), and the template's text features."""
        backbone, names = self._context.backbone, self._context.class_names
        there = pf.template_features(backbone, target.description, names)
        here = pf.template_features(backbone, self._own, names)
        return there - here, pf.template_features(backbone, self._context.template, names)

    def _name(self, target: Domain, part: str) -> str:
        return f"transform.{domain_key(self._own):016x}.{domain_key(target.description):016x}.{part}"
