"""`promptfed federation`: create, watch and steer federations at a coordinator, read their reports, replay rounds."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import (
    AllowBackbone,
    Api,
    Federation,
    Json,
    Key,
    PublicApi,
    Round,
    Written,
    Yes,
    confirm,
    refuse,
)
from promptfed.console import progress
from promptfed.console.files import expect_suffix, read_federation_and_data, write_file
from promptfed.console.output import console, note, print_json, say, table, tell
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.shared.api.api_schemas import CentralPrivacyView, ClientPrivacy, FederationView
from promptfed.shared.api.report_schemas import RoundReport
from promptfed.shared.errors import EndedBadly, Failed, Misused
from promptfed.shared.messages import ENDED, Role
from promptfed.shared.methods import resolve_spec, with_default_backbone
from promptfed.shared.plain_text import counted, moment, percent, plain, size

group = app.group("federation", "Create, watch and steer federations at a coordinator.", "Operate federations")
SPENT = ["client", "releases", "ε here", "replace-one", "its ledger", "ε planned", "δ", "noise multiplier", "noise"]
COLUMNS = ["round", "loss", "accuracy", "unseen", "seconds", "up", "down"]
MOST_SHOWN = 5


@group.add()
def create(
    api: Api,
    allow_backbone: AllowBackbone,
    written: Written,
    spec: Annotated[
        Path | None, typer.Argument(help="YAML or JSON file with the federation's spec, or a run file")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option("--from", help="an export whose state it starts from; its spec too, where SPEC gives no other"),
    ] = None,
    key: Key = None,
    dry_run: Annotated[bool, typer.Option(help="only check the spec")] = False,
    backbone: Annotated[
        bool, typer.Option(help="load the backbone here, so that its fingerprint is fixed and words become a context")
    ] = True,
    as_json: Json = False,
) -> None:
    """Create a federation from a spec."""
    if spec is None and export is None:
        raise Misused("give the file of a spec, or --from EXPORT")
    if export is None:
        refuse(written & {"key"}, "of an export; give --from too, or leave it out")
    if export is not None or not backbone:
        refuse(written & {"allow_backbone", "backbone_file"}, "no backbone is loaded here; leave it out")
    if export is not None:
        refuse(written & {"backbone"}, "the export names the backbone; leave it out")
    raw, data = ({}, []) if spec is None else read_federation_and_data(spec)
    initial_state = chosen = None
    if export is not None:
        from promptfed.export.verification import continued

        raw, initial_state = continued(export, raw, key)
    else:
        raw, chosen = with_default_backbone(raw, data)
        if backbone:
            from promptfed.shared.methods.core.spec_backbone import with_backbone

            resolved, initial_state = with_backbone(resolve_spec(raw), allow_backbone)
            raw = {**raw, "backbone": resolved.backbone.model_dump(mode="json", exclude_unset=True)}
    if chosen is not None:
        note(chosen)
    if dry_run:
        checked = api.send(operations.dry_run(raw)).json
        tell(as_json, checked, "The spec is good; nothing was created.")
        return
    created = api.run(operations.create(raw, initial_state))
    if as_json:
        print_json(created.json)
    else:
        _show_created(created.view)


def _show_created(view: FederationView) -> None:
    say(f"Created {view.name} ({view.id}), state {view.state}.")
    for text in view.privacy.warnings if view.privacy is not None else ():
        say(f"warning: {text}")


@group.add("list")
def list_federations(api: Api, as_json: Json = False) -> None:
    """List the coordinator's federations."""
    pages = api.run(operations.list_federations())
    if as_json:
        print_json([federation for page in pages for federation in page.json["federations"]])
        return
    views = [view for page in pages for view in page.view.federations]
    rows = [
        [view.name, str(view.spec.method["name"]), _state(view), f"{view.round}/{view.spec.rounds}"] for view in views
    ]
    if not rows:
        say("There is no federation: `promptfed federation create SPEC` makes one.")
        return
    console.print(table(None, ["federation", "method", "state", "round"], rows))
    for view in views:
        if view.unreadable is not None:
            say(f"{plain(view.name)} ({plain(view.id)}) is unreadable: {plain(view.unreadable)}")


def _state(view: FederationView) -> str:
    return view.state if view.unreadable is None else "unreadable"


@group.add()
def status(federation: Federation, api: Api, as_json: Json = False) -> None:
    """Show one federation: its state, who has answered, who is awaited until when, and the accuracy so far."""
    if as_json:
        print_json(api.send(operations.get_federation(federation)).json)
        return
    _show_status(api.send(operations.get_federation(federation)).view)
    _show_result(api, federation)


@group.add()
def watch(federation: Federation, api: Api, as_json: Json = False) -> None:
    """Follow a federation until it ends.

    Shows loss, accuracy and seconds of each round; the exit code is 7 if the federation did not finish.
    """
    _watch(api, federation, as_json)
    answer = api.send(operations.get_federation(federation))
    if as_json:
        print_json(answer.json)
    else:
        _show_result(api, federation)
    if answer.view.state != "finished":
        reason = f": {answer.view.reason}" if answer.view.reason else ""
        raise EndedBadly(f"{answer.view.name} is {answer.view.state}{reason}")


def finished(api: Coordinator, federation: str, last: int = -1) -> list[RoundReport]:
    """The finished rounds after round ``last``."""
    return [report for report in api.run(operations.reports_after(federation, last)) if report.ended_at is not None]


def _watch(api: Coordinator, federation: str, quiet: bool) -> None:
    """Show each round once it is over, and meanwhile what happens and how long the rest takes."""
    last = -1
    with progress.Watcher(quiet=quiet) as watcher:
        for snapshot in progress.follow(api, federation):
            newest = snapshot.round if snapshot.over else snapshot.round - 1
            if not quiet and newest > last:  # a report has megabytes with a thousand clients: once a round
                for report in finished(api, federation, last):
                    last = report.round
                    watcher.note(progress.describe_round(report))
            watcher.show(snapshot)


def _steer(api: Coordinator, federation: str, verb: operations.Verb, as_json: bool) -> None:
    answer = api.send(operations.steer(federation, verb))
    tell(as_json, answer.json, f"{answer.view.name} is {answer.view.state}.")


@group.add()
def start(federation: Federation, api: Api, as_json: Json = False) -> None:
    """Start the rounds, and confirm the backbone that the first client enrolled with."""
    _steer(api, federation, "start", as_json)


@group.add()
def pause(federation: Federation, api: Api, as_json: Json = False) -> None:
    """Pause a federation: nobody is asked until it is resumed, but updates of open tasks are accepted."""
    _steer(api, federation, "pause", as_json)


@group.add()
def resume(federation: Federation, api: Api, as_json: Json = False) -> None:
    """Resume a federation after a pause."""
    _steer(api, federation, "resume", as_json)


@group.add()
def cancel(federation: Federation, api: Api, yes: Yes = False, as_json: Json = False) -> None:
    """End a federation for good, after confirmation; its rounds so far stay."""
    view = api.send(operations.get_federation(federation)).view
    confirm(f"{view.name} (round {view.round} of {view.spec.rounds}) would end for good.", yes)
    _steer(api, federation, "cancel", as_json)


@group.add()
def delete(federation: Federation, api: Api, yes: Yes = False, as_json: Json = False) -> None:
    """Delete a federation with all its data, after confirmation."""
    view = api.send(operations.get_federation(federation)).view
    described = f"{view.name} ({view.state}, round {view.round} of {view.spec.rounds})"
    confirm(f"{described} would be deleted with its states, updates and reports.", yes)
    api.send(operations.delete_federation(view.id))
    tell(as_json, {"deleted": view.id}, f"{view.name} is deleted.")


@group.add()
def prompts(
    federation: Federation,
    api: Api,
    out: Annotated[Path, typer.Option(help="the safetensors file to write")],
    round: Round = "latest",
    as_json: Json = False,
) -> None:
    """Fetch the global state of a round: prompts, aggregators, generators."""
    expect_suffix(out, ".safetensors", "a safetensors file")
    answer = api.send(operations.get_prompts(federation, round))
    written = {"file": str(out), "bytes": len(answer.body), "state_hash": answer.headers["etag"].strip('"')}
    write_file(out, answer.body)
    tell(as_json, written, f"Wrote {out} ({size(len(answer.body))}), state {written['state_hash']}.")


def _show_status(federation: FederationView) -> None:
    spec, fingerprint, snapshot = federation.spec, federation.backbone.fingerprint, progress.Snapshot.of(federation)
    unconfirmed = fingerprint is not None and not federation.backbone.confirmed
    who = f"{counted(federation.clients.trainers, 'trainer')}, {counted(federation.clients.evaluators, 'evaluator')}"
    lines = [
        f"{federation.name} ({federation.id}): {spec.method['name']}, {snapshot.describe()}",
        f"round {snapshot.round} of {snapshot.rounds}, {who}",
        f"backbone {spec.backbone.model}, {fingerprint or 'not known before the first client'}"
        + (" (`start` confirms it)" if unconfirmed else ""),
    ]
    if federation.privacy is not None:
        lines += _privacy_lines(federation.privacy)
    lines += progress.why_this_round(federation)[:1] if federation.selection is not None else []
    for one in federation.awaited:
        notes = [] if one.progress is None else [f"{one.progress:.0%} done"]
        about = f" ({', '.join(notes)})" if notes else ""
        lines.append(f"waiting for {one.name}{about} until {moment(one.until)}")
    for line in lines:
        say(plain(line))


def _privacy_lines(given: CentralPrivacyView) -> list[str]:
    end = "" if given.budget_rounds is None else f"; rounds end after {given.budget_rounds}"
    lines = [f"ε = {given.epsilon:.3g} of {given.epsilon_planned:.3g} at δ = {given.delta:g} for a whole client{end}"]
    lines.append(f"all rounds, replace-one neighbours: ε = {given.epsilon_planned_replace_one:.3g}")
    if given.epsilon_planned_if_secret is not None:
        secret = f"ε = {given.epsilon_planned_if_secret:.3g}"
        lines.append(f"all rounds, against parties who do not learn who took part: {secret}")
    return [*lines, *(f"warning: {text}" for text in given.warnings)]


def _show_result(api: Coordinator, federation: str) -> None:
    result = api.run(operations.accuracies(federation))
    if result.evaluated_round is not None:
        final = result.final()
        if any(row.split == "test" for row in final):  # with selection none before the end
            console.print(
                progress.result_table(final, f"{result.federation.spec.figure} after round {result.evaluated_round}")
            )
        for remark in api.send(operations.get_remarks(federation)).view.remarks:
            say(plain(remark))
        say(f"sent up {size(result.bytes_up)}, down {size(result.bytes_down)}")


@group.add()
def metrics(
    federation: Federation,
    api: Api,
    out: Annotated[Path | None, typer.Option(help="write the CSV here; default: print it")] = None,
    as_json: Json = False,
) -> None:
    """Print every number by round as CSV, or with --json as objects: clients' metrics, accuracies, bytes, seconds."""
    expect_suffix(out, ".csv", "CSV")
    body = api.send(operations.get_metrics(federation)).body
    if out is None and as_json:
        lines = csv.DictReader(body.decode().splitlines())
        print_json({"metrics": [line | {"round": int(line["round"]), "value": float(line["value"])} for line in lines]})
    elif out is None:
        typer.echo(body.decode(), nl=False)
    else:
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
    rows, damaged = [], []
    for report in finished(api, federation):
        mean_loss = progress.loss_of(report)
        unknown = "masked" if any(phase.secure is not None for phase in report.phases) else "-"
        loss = unknown if mean_loss is None else f"{mean_loss:.4g}"
        seconds = "-" if report.seconds is None else f"{report.seconds:.1f}"
        rows.append(
            [
                str(report.round),
                loss,
                _accuracy(report, "trainer"),
                _accuracy(report, "evaluator"),
                seconds,
                size(report.bytes_up),
                size(report.bytes_down),
            ]
        )
        damaged += [f"round {report.round}: {text}" for stage in report.stages for text in stage.unreadable]
    console.print(table(None, COLUMNS, rows))
    for line in _unreadable(damaged):
        say(line)


def _unreadable(texts: list[str]) -> list[str]:
    return [plain(f"cannot be read, and is in no figure: {text}") for text in texts]


def _accuracy(report: RoundReport, role: Role) -> str:
    clients = report.evaluation.clients.values() if report.evaluation is not None else ()
    withheld = [client.withheld for client in clients if client.role == role]
    mean = progress.means_of(report, role).get("accuracy")
    return "withheld" if mean is None and withheld and all(withheld) else percent(mean)


@group.add()
def privacy(federation: Federation, api: Api, as_json: Json = False) -> None:
    """Show what differential privacy has cost each client here, what its ledger is said to hold, and refused tasks."""
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
    for line in (*view.warnings, *refused, *_unreadable(view.unreadable)):
        say(line)


def _spent(client: ClientPrivacy) -> list[str]:
    planned, last = client.planned.epsilon_planned if client.planned else None, client.last
    names = ("epsilon", "epsilon_replace_one", "ledger_epsilon", "delta", "noise_multiplier")
    spent = [getattr(last, name, None) for name in names]
    shown = ["-" if value is None else f"{value:.4g}" for value in (*spent[:3], planned, *spent[3:])]
    return [client.client, str(len(client.spent)), *shown, last.noise if last else "-"]


@group.add("signing-key")
def signing_key(api: PublicApi, as_json: Json = False) -> None:
    """Print the coordinator's public key: `promptfed verify FOLDER --key` checks exports with it."""
    answer = api.send(operations.get_signing_key())
    tell(as_json, answer.json, answer.view.public_key)


@group.add()
def replay(
    federation: Federation,
    api: Api,
    round: Annotated[int | None, typer.Option(min=0, help="this round alone; default: all that are over")] = None,
    as_json: Json = False,
) -> None:
    """Compute rounds again from their kept updates. The exit code is 1 if a hash differs."""
    view = api.send(operations.get_federation(federation)).view
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
        raise Failed(f"not the run that was recorded: {'; '.join(others[:MOST_SHOWN])}{more}")
