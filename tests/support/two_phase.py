"""A method for tests as PLAN and pFedPG will be: two phases a round, payloads per client, newcomers.

``prompts``: each client trains its own prompt; the state keeps all of them (as many as answered) and a descriptor of
each client that never leaves the coordinator. ``aggregators``: everybody's prompts come down, one vector goes up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Generator

from promptfed.shared.methods.core.interface import (
    Classifier,
    ClientContext,
    ClientInfo,
    ClientUpdate,
    Combine,
    Hyperparameters,
    Measured,
    Method,
    MethodError,
    Phase,
    ServerContext,
    TrainResult,
)
from promptfed.shared.tensors import Tensors, TensorSpec

PROMPT = TensorSpec("prompt", ("m", "d_t"))
AGGREGATOR = TensorSpec("aggregator", ("d_t",))
ANSWERS = TensorSpec("answers", ("K", "m", "d_t"))
DESCRIPTORS = TensorSpec("descriptors", ("n", 2), shared_with_clients=False)


class TwoPhaseHyper(Hyperparameters):
    """Number of vectors."""

    m: int = 2


class TwoPhase(Method):
    """See the module."""

    name = "two_phase"
    summary = "For tests."
    paper = "None."
    Hyper: ClassVar[type[Hyperparameters]] = TwoPhaseHyper
    hyper: TwoPhaseHyper
    one_payload = False

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        return (PROMPT, AGGREGATOR, ANSWERS, DESCRIPTORS)

    def phases(self, round: int, rounds: int) -> tuple[Phase, ...]:
        return (
            Phase("prompts", down=(PROMPT,), up=(PROMPT,)),
            Phase("aggregators", down=(PROMPT, AGGREGATOR, ANSWERS), up=(AGGREGATOR,)),
        )

    def dims(self, context: ServerContext) -> dict[str, int]:
        if context.shape.d_t is None:
            raise MethodError("needs a text tower")
        return {"m": self.hyper.m, "d_t": context.shape.d_t, "n": len(context.clients)}

    def initial_state(self, context: ServerContext, generator: Generator) -> Tensors:
        m, d_t = self.hyper.m, context.shape.d_t or 0
        return {
            "prompt": torch.randn(m, d_t, generator=generator),
            "aggregator": torch.zeros(d_t),
            "answers": torch.zeros(1, m, d_t),
            "descriptors": torch.randn(len(context.clients), 2, generator=generator),
        }

    def join(self, state: Tensors, client: ClientInfo, context: ServerContext) -> Tensors:
        at = self._row(client, context)
        known = state["descriptors"]
        return state | {"descriptors": torch.cat([known[:at], known.mean(dim=0, keepdim=True), known[at:]])}

    def payload(self, state: Tensors, phase: Phase | None, client: ClientInfo, context: ServerContext) -> Tensors:
        own = state["prompt"] + state["descriptors"][self._row(client, context)].sum()
        if phase is not None and phase.name == "prompts":
            return {"prompt": own}
        return {"prompt": own, "aggregator": state["aggregator"], "answers": state["answers"]}

    def aggregate(
        self, state: Tensors, phase: Phase, updates: Iterable[ClientUpdate], combine: Combine, context: ServerContext
    ) -> Tensors:
        if phase.name == "aggregators":
            return state | combine(updates)
        kept = list(updates)
        descriptors = state["descriptors"].clone()
        names = [client.name for client in context.clients]
        for update in kept:
            row = names.index(update.client)
            descriptors[row] = torch.tanh(descriptors[row] + update.tensors["prompt"].mean())  # bounded in long runs
        answers = torch.stack([update.tensors["prompt"] for update in kept])
        return state | {"descriptors": descriptors, "answers": answers} | combine(kept)

    def measure(self, before: Tensors, phase: Phase, after: Tensors, context: ServerContext) -> Measured:
        """How many prompts there are, and each client's descriptor: one of them no number that JSON has."""
        if phase.name == "prompts":
            return Measured()
        names = [client.name for client in context.clients]
        descriptors = {name: {"first": float(row[0])} for name, row in zip(names, after["descriptors"], strict=True)}
        return Measured(phase={"prompts": len(after["answers"]), "broken": float("nan")}, clients=descriptors)

    def _row(self, client: ClientInfo, context: ServerContext) -> int:
        return [one.name for one in context.clients].index(client.name)

    def train(self, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        raise NotImplementedError

    def classifier(self, context: ClientContext, payload: Tensors, private: Tensors) -> Classifier:
        raise NotImplementedError
