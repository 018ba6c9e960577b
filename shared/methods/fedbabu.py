"""FedBABU: the tower alone is trained and shared, under one head that never changes; fine-tuned where it is used."""

from __future__ import annotations

from typing import Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.heads import Head, LinearHead, head_width
from promptfed.shared.methods.core.trained_tower import TowerHyper, TrainedTower
from promptfed.shared.methods.fedrep import PrivateHeadMethod, Tuning
from promptfed.shared.tensors import Tensors


class FedBABUHyper(TowerHyper):
    """What is trained of the tower, and the fine-tuning before an evaluation."""

    finetune: Literal["all", "head"] = pf.option("all", "what is fine-tuned on the client's own training images")
    finetune_epochs: int = pf.option(
        5, "epochs over the client's training images before an evaluation", ge=1, le=10_000
    )
    finetune_learning_rate: float | None = pf.option(
        None, "the tower's rate in the fine-tuning; default: training.learning_rate", gt=0, le=1000
    )


class FedBABU(PrivateHeadMethod):
    """The head stays at its seeded start, so only the tower is trained and exchanged.

    Each client classifies with a copy of tower and head that it fine-tunes on its own training images and does not
    keep; one fine-tuning serves all label spaces. Source: Oh et al., "FedBABU", ICLR 2022.
    """

    name = "fedbabu"
    summary = "A shared image tower trained under a head that never changes, fine-tuned by each client for itself."
    paper = "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, 2022"
    Hyper = FedBABUHyper
    hyper: FedBABUHyper

    @property
    def tuning(self) -> Tuning:
        """The parts to tune: tower and head, or only the head."""
        return Tuning(self.hyper.finetune, self.hyper.finetune_epochs, self.hyper.finetune_learning_rate)

    def check(self, spec: pf.FederationSpec) -> None:
        """Also refuses a rate for a tower that is not fine-tuned."""
        super().check(spec)
        if self.hyper.finetune == "head" and self.hyper.finetune_learning_rate is not None:
            raise pf.MethodError(
                "finetune_learning_rate is the tower's, and finetune: head leaves the tower alone: set "
                "head_learning_rate instead"
            )

    def start_head(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> LinearHead:
        """The fixed head, equal for all clients with the same number of classes."""
        return LinearHead.start(context, head_width(context.backbone, self.hyper.projected))

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of the tower."""
        tower = self.tower(context, payload, private).trainable()
        head = self.start_head(context, payload, private).to(context.backbone.device)
        loss = self.fit(context, tower, head, trains="tower")
        return pf.TrainResult(self.sent(tower), {}, {"loss": loss})

    def kept(self, tower: TrainedTower, head: Head) -> Tensors:
        """No private tensors."""
        return {}
