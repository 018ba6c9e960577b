"""FedRep and FedRoD: a tower that all share, under heads of each client's own."""

from __future__ import annotations

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.heads import LinearHead
from promptfed.shared.methods.core.tower import TowerHyper, WeightMethod
from promptfed.shared.methods.core.visual import ImageClassifier
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.lazy import F, Tensor, torch

OWN_HEAD, OWN_BIAS = "own_head", "own_bias"  # Q's (C, d_h) and (C,): rows in the order of the shared head's
ABSENT = -1e9  # in the place of log 0


class FedRepHyper(TowerHyper):
    """What is trained of the tower, and how long the head is before it."""

    head_epochs: int = pf.option(
        10, "E_h, epochs of the head under the received tower, before the tower's", ge=1, le=10_000
    )


class PrivateHeadMethod(WeightMethod):
    """Base of the methods that share the tower under a linear head which is none of the state's."""

    personal = True
    takes_evaluators = False  # a head is made by training only

    @property
    def shares_head(self) -> bool:
        """The head stays with its client."""
        return False

    def check(self, spec: pf.FederationSpec) -> None:
        """A tower that does not change leaves nothing to share."""
        super().check_options(spec)
        if self.hyper.trainable == "none":
            raise pf.MethodError(f"{self.name} shares the tower: with trainable: none nothing is left; take another")


class FedRep(PrivateHeadMethod):
    """First E_h epochs of the head under the received tower, then E epochs of the tower under that head.

    Source: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.
    """

    name = "fedrep"
    summary = "A shared image tower under heads of each client's own, the head trained before the tower."
    paper = "Collins et al., Exploiting Shared Representations (FedRep), 2021"
    Hyper = FedRepHyper
    hyper: FedRepHyper

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """The head, whose features are computed once; then the tower. Two optimizers, in this order."""
        tower = self.tower(context, payload, private)
        begun = self.start_head(context, payload, private)
        assert isinstance(begun, LinearHead)
        head = begun.trainable(context.backbone.device)
        head_loss = self.fit(context, tower, head, trains="head", epochs=self.hyper.head_epochs)
        fixed = LinearHead(head.names, head.weight.detach(), head.bias.detach())
        moving = tower.trainable()
        loss = self.fit(context, moving, fixed, trains="tower")
        metrics = {"loss": loss, "head_loss": head_loss}
        return pf.TrainResult(self.sent(moving), fixed.private(), metrics)

    metrics = ("loss", "head_loss")


class FedRoD(WeightMethod):
    """CE(G(f) + log π, y) over the tower and the shared G; beside it CE(sg[G(f)] + Q(sg[f]), y) over the private Q.

    π are the client's shares of classes, over those that it has. G and Q are linear with a bias; Q starts at zero.
    Trainers predict by G + Q, evaluators by G. Source:
    Chen & Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022.
    """

    name = "fedrod"
    summary = "A shared image tower and a balanced generic head, and a private head beside it."
    paper = "Chen & Chao, On Bridging Generic and Personalized Federated Learning (FedRoD), 2022"
    personal = True
    Hyper = TowerHyper

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of both losses in the same steps."""
        tower, device = self.tower(context, payload, private).trainable(), context.backbone.device
        begun = self.shared_head(context, payload)
        head = begun.trainable(device)
        own_q = own_head(begun, private).trainable(device)
        labels = context.train.labels.to(device)
        shares = log_shares(context.train.labels, len(begun.names)).to(device)

        def loss(indices: Tensor) -> Tensor:
            features = self.features(tower, context.train.images(indices))
            classes = labels[pf.sent_to(indices, device)]
            generic = head.logits(features)
            personal = generic.detach() + own_q.logits(features.detach())
            return F.cross_entropy(generic + shares, classes) + F.cross_entropy(personal, classes)

        groups = self.head_groups(context, [*head.parameters, *own_q.parameters])
        final = pf.train(context, list(tower.leaves.values()), loss, groups=groups, reads_images=True)
        kept = {OWN_HEAD: own_q.weight, OWN_BIAS: own_q.bias}
        return pf.TrainResult(self.sent(tower, head, begun), kept, {"loss": final})

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> ImageClassifier:
        """By G + Q; by G where the client has no Q."""
        head = self.shared_head(context, payload)
        own_q = own_head(head, private)
        head = LinearHead(head.names, head.weight + own_q.weight, head.bias + own_q.bias)
        return self.classify(self.tower(context, payload, private), head, context)

    def variants(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> dict[str, pf.Classifier]:
        """``generic``: by G alone, for those who have a Q."""
        if OWN_HEAD not in private:
            return {}
        head = self.shared_head(context, payload)
        return {"generic": self.classify(self.tower(context, payload, private), head, context)}


def own_head(generic: LinearHead, private: Tensors) -> LinearHead:
    """Q as it was left; zero before the first training."""
    weight, bias = (
        private.get(name, torch.zeros_like(like))
        for name, like in zip((OWN_HEAD, OWN_BIAS), generic.parameters, strict=True)
    )
    return LinearHead(generic.names, weight, bias)


def log_shares(labels: Tensor, classes: int) -> Tensor:
    """``(C,)`` log of each class's share of ``labels``; of classes without images so low that no softmax has them."""
    counts = torch.bincount(labels, minlength=classes).double()
    shares = (counts / counts.sum()).clamp_min(1e-300).log().float()
    return torch.where(counts > 0, shares, torch.full_like(shares, ABSENT))
