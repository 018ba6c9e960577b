"""Base of methods whose coordinator stores each client's last context in a row of the state.

Notation: ``n`` clients in order of name, ``m`` context vectors, ``d_t`` width of the text tower. Clients cannot
download the rows themselves; a method decides what other clients receive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.arrays import copied, namespace

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

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """The common start, and empty rows."""
        return self.adopt(super().initial_state(context, draws), context)

    def initial_state_with(self, backbone: Backbone, context: pf.ServerContext, draws: Draws) -> Tensors:
        """The initial state, made with a backbone."""
        return self.adopt(super().initial_state_with(backbone, context, draws), context)

    def adopt(self, state: Tensors, context: pf.ServerContext) -> Tensors:
        """The supplied start, with an empty row for each client."""
        count, start = len(context.clients), state[pf.CONTEXT.name]
        xp = namespace(start)
        empty = {
            ROWS.name: xp.zeros((count, *start.shape), dtype=xp.float32),
            ANSWERED.name: xp.zeros(count, dtype=xp.int64),
        }
        return state | empty

    def join(self, state: Tensors, client: pf.ClientInfo, context: pf.ServerContext) -> Tensors:
        """Insert an empty row for the newcomer at the place of its name."""
        at, rows, answered = row_of(client.name, context), state[ROWS.name], state[ANSWERED.name]
        xp = namespace(rows)
        return state | {
            ROWS.name: xp.concat([rows[:at], xp.zeros((1, *rows.shape[1:]), dtype=rows.dtype), rows[at:]]),
            ANSWERED.name: xp.concat([answered[:at], xp.zeros(1, dtype=answered.dtype), answered[at:]]),
        }

    def forget(self, state: Tensors, client: pf.ClientInfo, context: pf.ServerContext) -> Tensors:
        """Empty the client's row, as if it had never answered."""
        at = row_of(client.name, context)
        if not int(state[ANSWERED.name][at]):
            return state
        rows, answered = copied(state[ROWS.name]), copied(state[ANSWERED.name])
        rows[at], answered[at] = 0, 0
        return state | {ROWS.name: rows, ANSWERED.name: answered}

    def with_answers(self, state: Tensors, updates: pf.Updates, context: pf.ServerContext) -> Tensors:
        """Replace the rows of the counted clients by their contexts."""
        rows, answered = copied(state[ROWS.name]), copied(state[ANSWERED.name])
        round = int(answered.max()) + 1 if len(answered) else 1  # every round counts somebody
        for update in updates:
            at = row_of(update.client, context)
            rows[at], answered[at] = update.tensors[pf.CONTEXT.name], round
        return state | {ROWS.name: rows, ANSWERED.name: answered}

    def usable(self, state: Tensors, context: pf.ServerContext) -> list[int]:
        """Rows of active trainers that have answered, in order of name; for an exported state, all filled rows."""
        answered = state[ANSWERED.name].tolist()
        members = context.clients if len(context.clients) == len(answered) else None
        return [
            row
            for row, round in enumerate(answered)
            if round and (members is None or (members[row].active and members[row].role == "trainer"))
        ]


def row_of(name: str, context: pf.ServerContext) -> int:
    """The index of the client's row; the roster is in order of name."""
    return [client.name for client in context.clients].index(name)
