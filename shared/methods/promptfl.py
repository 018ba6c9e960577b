"""PromptFL (= FedCoOp): one context, trained in turn on each client's images, averaged by the coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.context import PairClassifier
from promptfed.shared.spec.spec_section import left_out
from promptfed.shared.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor


class PromptFLHyper(pf.ContextHyper):
    """A learned context, or two."""

    pair: Annotated[
        bool,
        left_out(
            False,
            description="with task: multi_label: m vectors for a class that is present and m for one that is absent; a "
            "softmax over the two prompts of a class decides (DualCoOp, Sun et al. 2022)",
        ),
    ] = False


class PromptFL(pf.SharedContextMethod):
    """Cross-entropy of cosine logits; the context is all that is trained and all that travels.

    Source: Guo et al., "PromptFL", 2023; the context is CoOp's (Zhou et al., 2022).
    """

    name = "promptfl"
    summary = "One shared context before the class names, averaged over clients by their numbers of samples."
    protects = True
    paper = "Guo et al., PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models, 2023"
    several_labels = True
    Hyper: ClassVar[type[pf.ContextHyper]] = PromptFLHyper

    def check(self, spec: pf.FederationSpec) -> None:
        """Only a class that may be absent has a prompt for that."""
        super().check(spec)
        if self.is_pair and spec.task != "multi_label":
            raise pf.MethodError("pair is for classes that may be absent: set task: multi_label, or leave it out")

    @property
    def is_pair(self) -> bool:
        """Whether each class has two prompts. Other methods built on this one have no such option."""
        return bool(getattr(self.hyper, "pair", False))

    @property
    def contexts_of_a_class(self) -> int:  # type: ignore[override]
        """One, or two with ``pair``."""
        return 2 if self.is_pair else 1

    @property
    def shared_length(self) -> int:
        """``m``, or 2m with ``pair``."""
        return self.contexts_of_a_class * self.hyper.m

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``m`` is the number of rows of the context."""
        return super().dims(context) | {"m": self.shared_length}

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the global context ``(m, d_t)``; sends the trained one."""
        start = payload["context"]
        learned, loss = pf.train_context(context, start, self.penalty(context, start), pair=self.is_pair)
        return pf.TrainResult(update={"context": learned}, metrics={"loss": loss})

    def penalty(self, context: pf.ClientContext, start: Tensor) -> pf.Penalty | None:
        """What is added to the loss of a task that starts from ``start (m, d_t)``: nothing in PromptFL."""
        return None

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """Classifies with the global context, or with the pair."""
        if self.is_pair:
            return PairClassifier(context, payload["context"])
        return super().classifier(context, payload, private)
