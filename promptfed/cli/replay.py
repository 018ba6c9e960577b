"""`promptfed federation replay`: rounds computed again at the coordinator, as they were or as they would have been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from promptfed.sdk.client import CommandError, Coordinator
from promptfed.sdk.exit_codes import Exit
from promptfed.sdk.output import console, print_json, size, table, write_file

RULES = ("mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median")
SECONDS = 600.0  # that one round may take
SHOWN = 5


def question(rule: str | None, tolerate: float | None, clip_norm: str | None, without: list[str]) -> dict[str, Any]:
    """What a replay asks to be otherwise; empty: nothing.

    Raises:
        CommandError: ``clip_norm`` is neither a number nor 'median'.
    """
    aggregation: dict[str, Any] = {}
    if rule is not None:
        aggregation["rule"] = rule
    if tolerate is not None:
        aggregation["tolerate"] = tolerate
    if clip_norm is not None:
        aggregation["clip_norm"] = "median" if clip_norm == "median" else _number(clip_norm)
    asked: dict[str, Any] = {"aggregation": aggregation} if aggregation else {}
    return asked | ({"without": without} if without else {})


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CommandError(f"--clip-norm takes a number or 'median', not {text!r}", Exit.BAD_INPUT) from None


def replay(
    api: Coordinator, federation: str, round: int | None, asked: dict[str, Any], out: Path | None, as_json: bool
) -> None:
    """Replay one round, or all that are over, and print what came of it.

    Raises:
        CommandError: the coordinator refuses, or a state that should be the same is not.
    """
    if out is not None and round is None:
        raise CommandError("--out takes the state of one round: give --round", Exit.BAD_INPUT)
    path = f"/v1/federations/{federation}/rounds"
    rounds = [round] if round is not None else _over(api, federation)
    reports = [api.post(f"{path}/{number}/replay", asked, timeout=SECONDS) for number in rounds]
    if out is not None:
        headers = {"Accept": "application/octet-stream"}
        answer = api.call("POST", f"{path}/{round}/replay", json=asked, headers=headers, timeout=SECONDS)
        write_file(out, answer.body)
    if as_json:
        print_json({"rounds": reports})
    elif asked:
        _show_otherwise(reports)
    else:
        _show_states(reports)
    if out is not None and not as_json:
        console.print(f"Wrote {out} ({size(len(answer.body))}).", highlight=False)
    if not asked:
        _expect_same(reports)


def _over(api: Coordinator, federation: str) -> list[int]:
    found = api.get(f"/v1/federations/{federation}")
    ended = found["state"] in ("finished", "failed", "cancelled")
    return list(range(found["round"] + (1 if ended else 0)))


def _show_states(reports: list[dict[str, Any]]) -> None:
    states = [one for report in reports for one in report["states"]]
    same = sum(one["same"] for one in states)
    console.print(f"{len(reports)} rounds: {same} of {len(states)} states came to their hashes again.", highlight=False)


def _expect_same(reports: list[dict[str, Any]]) -> None:
    others = [
        f"round {report['round']}, {one['origin']}: {one['replayed_hash']} instead of {one['state_hash']}"
        for report in reports
        for one in report["states"]
        if not one["same"]
    ]
    if others:
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        text = "; ".join(others[:SHOWN])
        raise CommandError(f"not the run that was recorded: {text}{more}", Exit.FAILED)


def _show_otherwise(reports: list[dict[str, Any]]) -> None:
    rows = []
    for report in reports:
        for one in report["states"]:
            rejected = [update["client"] for update in one["updates"] if update["verdict"] == "rejected"]
            share = one["distance"] / one["moved"] if one["moved"] else 0.0
            figures = [f"{one['moved']:.4g}", f"{one['distance']:.4g}", f"{100 * share:.0f} %"]
            rows.append([str(report["round"]), one["origin"], *figures, ", ".join(rejected) or "-"])
    columns = ["round", "phase", "step", "away from it", "of the step", "rejected"]
    console.print(table("As it would have been", columns, rows))
    if len(reports) == 1:
        for one in reports[0]["states"]:
            console.print(_updates(one))
    for note in {report["note"] for report in reports if report["note"]}:
        console.print(note[0].upper() + note[1:] + ".", highlight=False, soft_wrap=True)


def _updates(state: dict[str, Any]) -> Any:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    rows = [
        [one["client"], one["verdict"], number(one["weight"]), number(one["influence"]), number(one["distance"])]
        for one in state["updates"]
    ]
    return table(state["origin"], ["client", "verdict", "weight", "influence", "distance"], rows)
