"""`promptfed federation metrics`, `rounds`, `privacy`, `signing-key`: reports about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.commands.federation import group
from promptfed.cli.common import Api, Federation, Json
from promptfed.sdk import operations
from promptfed.sdk.files import write_file
from promptfed.sdk.output import console, print_json, say, table, tell
from promptfed.sdk.summary import RoundSummary
from promptfed.sdk.text import percent, size
from promptfed.shared.api.privacy_schemas import ClientPrivacy

SPENT = ["client", "releases", "ε spent", "replace-one", "ε planned", "δ", "noise multiplier", "noise"]
COLUMNS = ["round", "loss", "accuracy", "unseen", "seconds", "up", "down"]


@group.add()
def metrics(
    federation: Federation,
    api: Api,
    out: Annotated[Path | None, typer.Option(help="write the CSV here; default: print it")] = None,
    as_json: Json = False,
) -> None:
    """Print every number by round as CSV: clients' metrics, accuracies, bytes, seconds."""
    if as_json and out is None:
        pages = api.run(operations.list_metrics(federation))
        print_json({"metrics": [number for page in pages for number in page.json["metrics"]]})
        return
    body = api.send(operations.get_metrics_csv(federation)).body
    if out is None:
        typer.echo(body.decode(), nl=False)
        return
    write_file(out, body)
    tell(as_json, {"file": str(out), "bytes": len(body)}, f"Wrote {out} ({size(len(body))}).")


@group.add()
def rounds(federation: Federation, api: Api, as_json: Json = False) -> None:
    """Show the rounds so far: loss, mean accuracies, seconds and bytes; with --json the whole reports.

    Losses of secure sums are masked, and accuracies that sites keep to themselves are withheld.
    """
    if as_json:
        print_json(api.run(operations.accuracies(federation)).reports)
        return
    rows = []
    for report in api.run(operations.rounds_after(federation, -1)):
        unknown = "masked" if report.is_summed else "-"
        loss = unknown if report.loss is None else f"{report.loss:.4g}"
        seconds = "-" if report.seconds is None else f"{report.seconds:.1f}"
        accuracies = [_accuracy(report, role) for role in ("trainer", "evaluator")]
        rows.append([str(report.round), loss, *accuracies, seconds, size(report.bytes_up), size(report.bytes_down)])
    console.print(table(None, COLUMNS, rows))


def _accuracy(report: RoundSummary, role: str) -> str:
    mean = report.accuracy(role)
    if mean is None and report.withholds(role):
        return "withheld"
    return percent(mean[0] if mean is not None else None)


@group.add()
def privacy(federation: Federation, api: Api, as_json: Json = False) -> None:
    """Show what differential privacy has cost each client, by its own account, and what budgets have refused."""
    answer = api.send(operations.get_privacy(federation))
    if as_json:
        print_json(answer.json)
        return
    view = answer.view
    if view.level == "none":
        say("Nobody's training is protected by differential privacy here.")
    if view.clients:
        console.print(table(None, SPENT, [_spent(client) for client in view.clients]))
    refused = [f"{count} tasks refused: {kind}" for kind, count in view.failures.items()]
    for line in (*view.warnings, *refused):
        say(line)


def _spent(client: ClientPrivacy) -> list[str]:
    planned = client.planned.epsilon_planned if client.planned else None
    numbers = [client.epsilon, client.epsilon_replace_one, planned, client.delta, client.noise_multiplier]
    shown = ["-" if value is None else f"{value:.4g}" for value in numbers]
    return [client.client, str(client.releases), *shown, client.noise or "-"]


@group.add("signing-key")
def signing_key(api: Api, as_json: Json = False) -> None:
    """Print the coordinator's public key: `promptfed verify FOLDER --key` checks exports with it."""
    answer = api.send(operations.get_signing_key())
    tell(as_json, answer.json, answer.view.public_key)
