"""`promptfed federation replay`: rounds computed again at the coordinator."""

from __future__ import annotations

from typing import Annotated

import typer

from promptfed.cli.commands.federation import group
from promptfed.cli.common import Api, Federation, Json
from promptfed.sdk import operations
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import print_json, say
from promptfed.shared.messages import ENDED
from promptfed.shared.plain_text import counted

MOST_SHOWN = 5


@group.add()
def replay(
    federation: Federation,
    api: Api,
    round: Annotated[int | None, typer.Option(min=0, help="this round alone; default: all that are over")] = None,
    as_json: Json = False,
) -> None:
    """Compute rounds again from their kept updates. The exit code is 1 if a hash differs."""
    view = api.send(operations.get_summary(federation)).view
    over = range(view.round + (1 if view.state in ENDED else 0)) if round is None else [round]
    answers = [api.send(operations.replay(federation, number)) for number in over]
    states = [(answer.view.round, state) for answer in answers for state in answer.view.states]
    if as_json:
        print_json({"rounds": [answer.json for answer in answers]})
    else:
        same = sum(state.same for _, state in states)
        say(f"{counted(len(answers), 'round')}: {same} of {len(states)} states came to their hashes again.")
    others = [
        f"round {number}, {state.origin}: {state.replayed_hash} instead of {state.state_hash}"
        for number, state in states
        if not state.same
    ]
    if others:
        more = f" and {len(others) - MOST_SHOWN} more" if len(others) > MOST_SHOWN else ""
        raise CommandError(f"not the run that was recorded: {'; '.join(others[:MOST_SHOWN])}{more}", Exit.FAILED)
