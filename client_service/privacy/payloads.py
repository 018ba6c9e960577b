"""Checks of the payloads that a coordinator serves: are they plausible, and were other clients given the same?

Prompts that were made for one client can read from its update whether an image was trained on (PromptMIA, 2601.06641).
Plausibility is looked at before training. That others were given the same is known a round later: each update carries
its client's signature of the payload, which the others ask for. Only where the site's policy has a section ``payload``.

In the state folder: ``payloads.json`` (what was trained from, and how far it changed) and
``payload-last.safetensors`` (what was trained from last).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel
from torch import Tensor

from promptfed.client_service.exits import Failure
from promptfed.client_service.privacy.peers import identity_of
from promptfed.client_service.privacy.policy import Payload
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.clip import Backbone, BackboneError, shape_of
from promptfed.shared.messages import PayloadReceipt, Task, Witnesses, receipt_body
from promptfed.shared.methods.core.interface.base import ClientInfo, Method, MethodError, Phase, ServerContext
from promptfed.shared.plain_text import counted
from promptfed.shared.secagg.keys import is_signed, public_identity, sign
from promptfed.shared.seeds import initial_draws
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode

FILE, LAST = "payloads.json", "payload-last.safetensors"
LONGER = 10.0  # times the longest row of the first payload and of the last own update
CLOSE = 1e-4  # relative distance of two computations of one initial state, on two machines
LEAST_CHANGE = 1e-6  # an own update that changed nothing bounds nothing


class _TrainedFrom(BaseModel):
    """A payload that this client has trained from."""

    round: int
    phase: str
    sha256: str

    def is_of(self, task: Task) -> bool:
        """Whether it came with the same phase of the same round."""
        return (self.round, self.phase) == (task.round, task.phase)


class _LastTrainedFrom(_TrainedFrom):
    """The same, and the length of this client's own change."""

    change: float


class _Known(BaseModel):
    """What is known of earlier payloads.

    Attributes:
        last: the one that was trained from last.
        first: the longest row of each tensor of the first one.
        rows: the same, or that of the last own update where it is longer.
        seen: round and phase of each digest that was trained from.
        refused: the round of each digest that was refused.
        unwitnessed: the one for which no others' receipts were checked yet.
    """

    last: _LastTrainedFrom | None = None
    first: dict[str, float] = {}
    rows: dict[str, float] = {}
    seen: dict[str, tuple[int, str]] = {}
    refused: dict[str, int] = {}
    unwitnessed: _TrainedFrom | None = None


@dataclass(frozen=True)
class PayloadLook:
    """What one look at a payload found; ``figures`` are lengths and their ratios."""

    verdict: Literal["ok", "suspicious"]
    figures: Mapping[str, float]
    why: tuple[str, ...]


class PayloadChecks:
    """The payloads of one client of one federation, held against its site's policy."""

    def __init__(self, state: PrivateState, rules: Payload, federation_id: str):
        self._state = state
        self._rules = rules
        self._federation = federation_id
        self.last: PayloadLook | None = None

    # Plausibility

    def expect_plausible(self, task: Task, payload: Tensors, start: Tensors | None, explained: bool = True) -> None:
        """Look at what is to be trained from; ``start`` is what the seed gives, where this is the very first phase.

        The reasons name lengths of this client's own change. Unless ``explained``, they stay in its own log.

        Raises:
            Failure: policy-payload, where the policy refuses what is suspicious.
        """
        self.last = look = self.look(task, payload, start)
        if look.verdict == "suspicious" and self._rules.on_suspicion == "refuse":
            known = self._known()
            known.refused[task.payload.sha256] = task.round
            self._state.write_as(FILE, known)
            text = f"payload.on_suspicion is refuse, and round {task.round}, {task.phase}, looks crafted"
            why = "; ".join(look.why) if explained else "this client's own log says why"
            raise Failure("policy-payload", f"{text}: {why}")

    def look(self, task: Task, payload: Tensors, start: Tensors | None) -> PayloadLook:
        """Figures and verdict; nothing is written down."""
        known, figures, why = self._known(), dict[str, float](), list[str]()
        before = known.seen.get(task.payload.sha256)
        if before is not None and before[1] == task.phase and before[0] != task.round:
            why.append(f"these very bytes were served for round {before[0]}")
        if task.payload.sha256 in known.refused:
            why.append(f"these very bytes were refused in round {known.refused[task.payload.sha256]}")
        if start is not None:
            figures["from_seed"] = far = _relative(payload, start)
            if far > CLOSE:
                text = "the first payload is not what the spec's seed gives"
                why.append(f"{text} (relative distance {far:.3g}): the operator has supplied a state, or crafted one")
        if known.last is not None and not known.last.is_of(task):
            figures |= self._change(task, payload, known.last, why)
        for name, longest in _rows(payload).items():
            bound = known.rows.get(name)
            if bound is not None:
                figures["longest_row"] = max(figures.get("longest_row", 0.0), longest / max(bound, LEAST_CHANGE))
                if longest > LONGER * max(bound, LEAST_CHANGE):
                    text = f"a row of {name} is {longest:.3g} long"
                    why.append(f"{text}; the longest of the first payload and of the own update was {bound:.3g}")
        return PayloadLook("suspicious" if why else "ok", figures, tuple(why))

    def _change(self, task: Task, payload: Tensors, last: _LastTrainedFrom, why: list[str]) -> dict[str, float]:
        """How far the payload has moved since the last one, in own changes for each round that has passed."""
        content = self._state.read_file(LAST)
        if content is None or last.change < LEAST_CHANGE:
            return {}
        before, _ = decode(content)
        moved, rounds = _distance(payload, before), max(1, task.round - last.round)
        ratio = moved / (last.change * rounds)
        if ratio > self._rules.max_change:
            text = f"it moved by {moved:.3g} in {rounds} rounds, {ratio:.3g} times this client's own last change"
            why.append(f"{text} for each; payload.max_change is {self._rules.max_change:g}")
        return {"change": ratio}

    def note(self, task: Task, payload: Tensors, update: Tensors) -> None:
        """Remember the payload that was trained from, and the length of this client's change."""
        known, digest = self._known(), task.payload.sha256
        known.first = known.first or _rows(payload)
        own = _rows(update)
        known.rows = {name: max(long, own.get(name, 0.0)) for name, long in known.first.items()}
        known.seen.setdefault(digest, (task.round, task.phase))
        known.last = _LastTrainedFrom(
            round=task.round, phase=task.phase, sha256=digest, change=_distance(update, payload)
        )
        unsigned = task.secure is not None
        known.unwitnessed = None if unsigned else _TrainedFrom(round=task.round, phase=task.phase, sha256=digest)
        self._state.write_file(LAST, encode({name: tensor.contiguous() for name, tensor in payload.items()}))
        self._state.write_as(FILE, known)

    # Witnesses

    def unwitnessed(self, task: Task) -> tuple[int, str] | None:
        """Round and phase that this client has trained in before ``task`` and nobody has witnessed yet."""
        waits = self._known().unwitnessed if self._rules.witnesses else None
        return None if waits is None or waits.is_of(task) else (waits.round, waits.phase)

    def expect_witnesses(self, told: Witnesses) -> None:
        """Compare the receipts of a phase in which this client has trained with its own payload.

        Raises:
            Failure: policy-witnesses, where too few others have signed the same payload, or one another.
        """
        known = self._known()
        waits = known.unwitnessed
        assert waits is not None
        own = public_identity(identity_of(self._state)).hex()
        same, others = set[str](), set[str]()
        for receipt in told.receipts:
            body = receipt_body(self._federation, waits.round, waits.phase, receipt.payload_sha256)
            key, signature = bytes.fromhex(receipt.identity_key), bytes.fromhex(receipt.signature)
            if receipt.identity_key != own and is_signed(key, signature, "receipt", body):
                (same if receipt.payload_sha256 == waits.sha256 else others).add(receipt.identity_key)
        where = f"round {waits.round}, {waits.phase}"
        if others:
            clients = counted(len(others), "client has", "clients have")
            raise Failure("policy-witnesses", f"{where}: {clients} signed another payload")
        if len(same) < self._rules.witnesses:
            others_have = counted(len(same), "other has", "others have")
            text = f"payload.witnesses is {self._rules.witnesses}, and {others_have} signed {where}'s payload"
            raise Failure("policy-witnesses", text)
        known.unwitnessed = None
        self._state.write_as(FILE, known)

    def _known(self) -> _Known:
        return self._state.read_as(FILE, _Known) or _Known()


def receipt(state: PrivateState, federation_id: str, task: Task) -> PayloadReceipt:
    """This client's signature of the payload that it was given for ``task``."""
    private = identity_of(state)
    body = receipt_body(federation_id, task.round, task.phase, task.payload.sha256)
    signature = sign(private, "receipt", body).hex()
    return PayloadReceipt(identity_key=public_identity(private).hex(), signature=signature)


def start_of(method: Method, backbone: Backbone, task: Task, own: ClientInfo) -> Tensors | None:
    """The payload of a federation's very first phase, as the seed gives it; None where it cannot be told here.

    It cannot where this is another phase, or where the state depends on who takes part.
    """
    first = method.phases(1, task.config.rounds)[:1]
    if task.round != 1 or not first or first[0].name != task.phase:
        return None
    made = [_start(method, backbone, task, clients, first[0], own) for clients in ((), (own,))]
    if made[0] is None or made[1] is None or made[0].keys() != made[1].keys():
        return None
    same = all(torch.equal(made[0][name], tensor) for name, tensor in made[1].items())
    return made[1] if same else None


def _start(
    method: Method, backbone: Backbone, task: Task, clients: tuple[ClientInfo, ...], phase: Phase, own: ClientInfo
) -> Tensors | None:
    config = task.config
    names = tuple(config.class_names) if config.class_names else None
    context = ServerContext(config.training, shape_of(backbone), names, clients, config.seed, config.rounds)
    try:
        with torch.no_grad():
            state = method.initial_state_with(backbone, context, initial_draws(config.seed))
            payload = dict(method.payload(state, phase, own, context))
    except (MethodError, BackboneError, KeyError, IndexError, ValueError, RuntimeError):
        return None  # it needs to know the other clients
    return payload


def _rows(tensors: Tensors) -> dict[str, float]:
    """The longest row of each tensor, along its last dimension."""
    return {
        name: float(tensor.double().reshape(-1, tensor.shape[-1]).norm(dim=1).max())
        for name, tensor in tensors.items()
        if tensor.ndim and tensor.numel() and tensor.is_floating_point()
    }


def _distance(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """How far apart they are over the tensors that both have in the same shape."""
    squares: list[float] = [
        float((tensor.double() - others[name].double()).square().sum())
        for name, tensor in some.items()
        if name in others and others[name].shape == tensor.shape
    ]
    return math.sqrt(math.fsum(squares))


def _relative(payload: Tensors, start: Tensors) -> float:
    """The distance to ``start`` in units of its length; infinite if the names or shapes differ."""
    if {name: tensor.shape for name, tensor in payload.items()} != {n: tensor.shape for n, tensor in start.items()}:
        return float("inf")
    length = _distance(start, {name: torch.zeros_like(tensor) for name, tensor in start.items()})
    return _distance(payload, start) / max(length, LEAST_CHANGE)
