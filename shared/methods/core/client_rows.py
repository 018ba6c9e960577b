"""Base of methods whose coordinator stores each client's last context in a row of the state.

Notation: ``n`` clients in order of name, ``m`` context vectors, ``d_t`` width of the text tower. Clients cannot
download the rows themselves; a method decides what other clients receive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.tensors import Tensors, TensorSpec

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone

ROWS = TensorSpec("client_contexts", ("n", "m", "d_t"), shared_with_clients=False)
ANSWERED = TensorSpec("answered", ("n",), dtype="int64", shared_with_clients=False)


class ClientRowsMethod(pf.ContextMethod):
    """A common start context, and the last counted context of every client.

    ``answered`` is the round of a client's last counted answer (0: none yet). A newcomer gets an empty row. A withdrawn
    client's row is not used from the next payload on, and is emptied when its updates are deleted.
    """

    one_payload = False  # each client gets its own payload

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The common context and the rows."""
        return (pf.CONTEXT, ROWS, ANSWERED)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``m``, ``d_t`` and ``n``, the clients that the state knows."""
        return {**super().dims(context), "n": len(context.clients)}

    def initial_state(self, context: pf.ServerContext, generator: Generator) -> Tensors:
        """The common start, and empty rows."""
        return self.adopt(super().initial_state(context, generator), context)

    def initial_state_with(self, backbone: Backbone, context: pf.ServerContext, generator: Generator) -> Tensors:
        """The initial state, made with a backbone."""
        return self.adopt(super().initial_state_with(backbone, context, generator), context)

    def adopt(self, state: Tensors, context: pf.ServerContext) -> Tensors:
        """The supplied start, with an empty row for each client."""
        count, start = len(context.clients), state[pf.CONTEXT.name]
        empty = {
            ROWS.name: torch.zeros(count, *start.shape),
            ANSWERED.name: torch.zeros(count, dtype=torch.int64),
        }
        return state | empty

    def join(self, state: Tensors, client: pf.ClientInfo, context: pf.ServerContext) -> Tensors:
        """Insert an empty row for the newcomer at the place of its name."""
        at, rows, answered = row_of(client.name, context), state[ROWS.name], state[ANSWERED.name]
        return state | {
            ROWS.name: torch.cat([rows[:at], rows.new_zeros(1, *rows.shape[1:]), rows[at:]]),
            ANSWERED.name: torch.cat([answered[:at], answered.new_zeros(1), answered[at:]]),
        }

    def forget(self, state: Tensors, client: pf.ClientInfo, context: pf.ServerContext) -> Tensors:
        """Empty the client's row, as if it had never answered."""
        at = row_of(client.name, context)
        if not int(state[ANSWERED.name][at]):
            return state
        rows, answered = state[ROWS.name].clone(), state[ANSWERED.name].clone()
        rows[at], answered[at] = 0, 0
        return state | {ROWS.name: rows, ANSWERED.name: answered}

    def with_answers(self, state: Tensors, updates: pf.Updates, context: pf.ServerContext) -> Tensors:
        """Replace the rows of the counted clients by their contexts."""
        rows, answered = state[ROWS.name].clone(), state[ANSWERED.name].clone()
        round = int(answered.max()) + 1 if len(answered) else 1  # every round counts somebody
        for update in updates:
            at = row_of(update.client, context)
            rows[at], answered[at] = update.tensors[pf.CONTEXT.name], round
        return state | {ROWS.name: rows, ANSWERED.name: answered}

    def usable(self, state: Tensors, context: pf.ServerContext) -> list[int]:
        """Rows of active trainers that have answered, in order of name; for an exported state, all filled rows."""
        answered = state[ANSWERED.name].tolist()
        known = context.clients if len(context.clients) == len(answered) else None
        return [
            row
            for row, round in enumerate(answered)
            if round and (known is None or (known[row].active and known[row].role == "trainer"))
        ]

    def client_vectors(
        self, state: Tensors, context: pf.ServerContext, class_features: Mapping[str, Tensor]
    ) -> Tensors:
        """The clients' last contexts. The state must include all clients, since rows follow the roster."""
        rows, answered = state.get(ROWS.name, torch.zeros(0)), state.get(ANSWERED.name, torch.zeros(0)).tolist()
        if len(rows) != len(context.clients):
            return {}
        return {client.name: rows[row].flatten() for row, client in enumerate(context.clients) if answered[row]}


def row_of(name: str, context: pf.ServerContext) -> int:
    """The index of the client's row; the roster is in order of name."""
    return [client.name for client in context.clients].index(name)
