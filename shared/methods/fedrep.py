"""FedRep: a tower that all share under heads of each client's own, trained one after the other."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from promptfed.shared.methods.core.base import ClientContext, ClientInfo, MethodError, ServerContext, TrainResult
from promptfed.shared.methods.core.heads import LinearHead
from promptfed.shared.methods.core.trained_tower import TrainedTower
from promptfed.shared.methods.singleset_full import refuse_evaluator
from promptfed.shared.methods.weights import TowerHyper, WeightMethod
from promptfed.shared.spec import FederationSpec
from promptfed.shared.tensors import Tensors


class FedRepHyper(TowerHyper):
    """What is trained of the tower, and how long the head is before it."""

    head_epochs: Annotated[
        int, Field(ge=1, le=10_000, description="E_h, epochs of the head under the received tower, before the tower's")
    ] = 10


class PrivateHeadMethod(WeightMethod):
    """Base of the methods that share the tower under a linear head which is none of the state's."""

    personal = True

    @property
    def shares_head(self) -> bool:
        """The head stays with its client."""
        return False

    @property
    def takes_evaluators(self) -> bool:
        """No: they train no head."""
        return False

    def check(self, spec: FederationSpec) -> None:
        """A tower that does not change leaves nothing to share."""
        super().check_options(spec)
        if self.hyper.trainable == "none":
            raise MethodError(f"{self.name} shares the tower: with trainable: none nothing is left; take another")

    def admit(self, client: ClientInfo, former: ClientInfo | None, context: ServerContext) -> None:
        """Evaluators are refused."""
        refuse_evaluator(self, client)


class FedRep(PrivateHeadMethod):
    """First E_h epochs of the head under the received tower, then E epochs of the tower under that head.

    Source: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.
    """

    name = "fedrep"
    summary = "A shared image tower under heads of each client's own, the head trained before the tower."
    paper = "Collins et al., Exploiting Shared Representations (FedRep), 2021"
    Hyper = FedRepHyper
    hyper: FedRepHyper

    def train(self, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        """The head, whose features are computed once; then the tower. Two optimizers, in this order."""
        start = self.changes(context, payload, private)
        tower = TrainedTower.of(context.backbone, self.hyper, start)
        begun = self.start_head(context, payload, private)
        assert isinstance(begun, LinearHead)
        head = begun.trainable(context.backbone.device)
        head_loss = self.fit(context, tower, head, what="head", epochs=self.hyper.head_epochs)
        fixed = LinearHead(head.names, head.weight.detach(), head.bias.detach())
        moving = tower.trainable()
        loss = self.fit(context, moving, fixed, what="tower")
        metrics = {"loss": loss, "head_loss": head_loss}
        return TrainResult(self.sent(start, moving, None, None), fixed.private(), metrics)

    metrics = ("loss", "head_loss")
