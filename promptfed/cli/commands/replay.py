"""`promptfed federation replay`: rounds computed again at the coordinator, with or without changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from promptfed.cli.commands.federation import group
from promptfed.cli.common import Api, Federation, Json
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import write_file
from promptfed.sdk.output import console, print_json, say, table
from promptfed.sdk.text import size
from promptfed.shared.api.replay_schemas import ReplayedState, ReplayReport
from promptfed.shared.messages import ENDED
from promptfed.shared.plain_text import counted

Rule = Literal["mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "flame"]
MOST_SHOWN = 5


@group.add()
def replay(
    federation: Federation,
    api: Api,
    round: Annotated[int | None, typer.Option(min=0, help="this round alone; default: all that are over")] = None,
    rule: Annotated[Rule | None, typer.Option(help="another aggregation rule")] = None,
    tolerate: Annotated[float | None, typer.Option(help="of the rule: share of updates that may be bad")] = None,
    clip_norm: Annotated[str | None, typer.Option(help="of the rule: longest update, a number or median")] = None,
    without: Annotated[list[str] | None, typer.Option(help="leave out this client's updates, repeatable")] = None,
    out: Annotated[Path | None, typer.Option(help="with --round: write the resulting state here, safetensors")] = None,
    as_json: Json = False,
) -> None:
    """Compute rounds again from their kept updates: unchanged, under another rule, or without a client.

    Unchanged rounds must have the same hashes as before; the exit code is 1 if one differs.
    """
    if out is not None and round is None:
        raise CommandError("--out takes the state of one round: give --round", Exit.BAD_INPUT)
    changes = _changes(rule, tolerate, clip_norm, without or [])
    rounds = [round] if round is not None else _over(api, federation)
    answers = [api.send(operations.replay(federation, number, changes)) for number in rounds]
    reports = [answer.view for answer in answers]
    if as_json:
        print_json({"rounds": [answer.json for answer in answers]})
    elif changes:
        _show_changed(reports)
    else:
        _show_states(reports)
    if out is not None:
        body = api.send(operations.replay(federation, rounds[0], changes, "application/octet-stream")).body
        write_file(out, body)
        if not as_json:
            say(f"Wrote {out} ({size(len(body))}).")
    if not changes:
        _expect_same(reports)


def _changes(
    rule: str | None, tolerate: float | None, clip_norm: str | None, without: list[str]
) -> operations.ReplayQuestion:
    """What a replay changes, as the coordinator takes it; empty: nothing.

    Raises:
        CommandError: ``clip_norm`` is neither a number nor 'median'.
    """
    limit = clip_norm if clip_norm is None or clip_norm == "median" else _number(clip_norm)
    options = {"rule": rule, "tolerate": tolerate, "clip_norm": limit}
    aggregation = {name: value for name, value in options.items() if value is not None}
    changes: operations.ReplayQuestion = {"aggregation": aggregation} if aggregation else {}
    return {**changes, "without": without} if without else changes


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CommandError(f"--clip-norm takes a number or 'median', not {text!r}", Exit.BAD_INPUT) from None


def _over(api: Coordinator, federation: str) -> list[int]:
    view = api.send(operations.get_summary(federation)).view
    return list(range(view.round + (1 if view.state in ENDED else 0)))


def _show_states(reports: list[ReplayReport]) -> None:
    states = [state for report in reports for state in report.states]
    same = sum(state.same for state in states)
    say(f"{counted(len(reports), 'round')}: {same} of {len(states)} states came to their hashes again.")


def _expect_same(reports: list[ReplayReport]) -> None:
    others = [
        f"round {report.round}, {state.origin}: {state.replayed_hash} instead of {state.state_hash}"
        for report in reports
        for state in report.states
        if not state.same
    ]
    if others:
        more = f" and {len(others) - MOST_SHOWN} more" if len(others) > MOST_SHOWN else ""
        text = "; ".join(others[:MOST_SHOWN])
        raise CommandError(f"not the run that was recorded: {text}{more}", Exit.FAILED)


def _show_changed(reports: list[ReplayReport]) -> None:
    rows = []
    for report in reports:
        for state in report.states:
            rejected = [update.client for update in state.updates if update.verdict == "rejected"]
            share = state.distance / state.moved if state.moved else 0.0
            figures = [f"{state.moved:.4g}", f"{state.distance:.4g}", f"{100 * share:.0f} %"]
            rows.append([str(report.round), state.origin, *figures, ", ".join(rejected) or "-"])
    columns = ["round", "phase", "step", "away from it", "of the step", "rejected"]
    console.print(table("As it would have been", columns, rows))
    if len(reports) == 1:
        for state in reports[0].states:
            console.print(_updates(state))
    for note in {report.note for report in reports if report.note}:
        say(note[0].upper() + note[1:] + ".")


def _updates(state: ReplayedState) -> Table:
    rows = [
        [update.client, update.verdict, *map(_shown, (update.weight, update.influence, update.distance))]
        for update in state.updates
    ]
    return table(state.origin, ["client", "verdict", "weight", "influence", "distance"], rows)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
