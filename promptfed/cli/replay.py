"""`promptfed federation replay`: rounds computed again at the coordinator, as they were or as they would have been."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import write_file
from promptfed.sdk.output import console, print_json, table
from promptfed.sdk.text import size
from promptfed.shared.api.replay_schemas import ReplayedState, ReplayReport
from promptfed.shared.messages import ENDED

RULES = ("mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "flame")
SHOWN = 5


def question(
    rule: str | None, tolerate: float | None, clip_norm: str | None, without: list[str]
) -> operations.ReplayQuestion:
    """What a replay asks to be otherwise; empty: nothing.

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


def replay(
    api: Coordinator,
    federation: str,
    round: int | None,
    asked: operations.ReplayQuestion,
    out: Path | None,
    as_json: bool,
) -> None:
    """Replay one round, or all that are over, and print what came of it.

    Raises:
        CommandError: the coordinator refuses, or a state that should be the same is not.
    """
    if out is not None and round is None:
        raise CommandError("--out takes the state of one round: give --round", Exit.BAD_INPUT)
    rounds = [round] if round is not None else _over(api, federation)
    answers = [api.send(operations.replay(federation, number, asked)) for number in rounds]
    if out is not None and round is not None:
        body = api.send(operations.replay(federation, round, asked, "application/octet-stream")).body
        write_file(out, body)
    if as_json:
        print_json({"rounds": [answer.json for answer in answers]})
    else:
        (_show_otherwise if asked else _show_states)([answer.view for answer in answers])
        if out is not None:
            console.print(f"Wrote {out} ({size(len(body))}).", highlight=False)
    if not asked:
        _expect_same([answer.view for answer in answers])


def _over(api: Coordinator, federation: str) -> list[int]:
    view = api.send(operations.get_summary(federation)).view
    return list(range(view.round + (1 if view.state in ENDED else 0)))


def _show_states(reports: list[ReplayReport]) -> None:
    states = [state for report in reports for state in report.states]
    same = sum(state.same for state in states)
    console.print(f"{len(reports)} rounds: {same} of {len(states)} states came to their hashes again.", highlight=False)


def _expect_same(reports: list[ReplayReport]) -> None:
    others = [
        f"round {report.round}, {state.origin}: {state.replayed_hash} instead of {state.state_hash}"
        for report in reports
        for state in report.states
        if not state.same
    ]
    if others:
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        text = "; ".join(others[:SHOWN])
        raise CommandError(f"not the run that was recorded: {text}{more}", Exit.FAILED)


def _show_otherwise(reports: list[ReplayReport]) -> None:
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
        console.print(note[0].upper() + note[1:] + ".", highlight=False, soft_wrap=True)


def _updates(state: ReplayedState) -> Table:
    rows = [
        [update.client, update.verdict, *map(_shown, (update.weight, update.influence, update.distance))]
        for update in state.updates
    ]
    return table(state.origin, ["client", "verdict", "weight", "influence", "distance"], rows)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
