"""`promptfed federation`: create, watch and steer federations at a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from promptfed.cli.replay import RULES, question
from promptfed.cli.replay import replay as replay_rounds
from promptfed.sdk.client import (
    DEFAULT_URL,
    TOKEN_VARIABLE,
    URL_VARIABLE,
    CommandError,
    Coordinator,
    open_coordinator,
)
from promptfed.sdk.exit_codes import Exit
from promptfed.sdk.output import console, print_json, reporting_errors, size, table, write_file, write_private
from promptfed.sdk.progress import Snapshot, Watcher, follow, pages, read_result, result_table

federation_app = typer.Typer(no_args_is_help=True, help="Create, watch and steer federations at a coordinator.")

Url = Annotated[
    str | None, typer.Option("--coordinator", help=f"its URL; default: ${URL_VARIABLE}, else {DEFAULT_URL}")
]
TokenFile = Annotated[Path | None, typer.Option(help=f"file with the operator token; default: ${TOKEN_VARIABLE}")]
Federation = Annotated[str, typer.Argument(help="its name or id")]
Json = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]


@federation_app.command()
def create(
    spec: Annotated[Path, typer.Argument(help="YAML or JSON file with the federation's spec")],
    dry_run: Annotated[bool, typer.Option(help="only check the spec")] = False,
    backbone: Annotated[
        bool, typer.Option(help="load the backbone here, so that its fingerprint is fixed and words become a context")
    ] = True,
    allow_backbone: Annotated[bool, typer.Option(help="allow a backbone outside open_clip's registry")] = False,
    coordinator: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Create a federation from a spec."""
    with reporting_errors():
        raw = read_spec(spec)
        tensors = None
        if backbone:
            from promptfed.sdk.backbone import with_backbone

            raw, tensors = with_backbone(raw, allow_backbone)
        with open_coordinator(coordinator, token_file) as api:
            created = api.post("/v1/federations", raw, params={"dry_run": "true"} if dry_run else None)
            if tensors is not None and not dry_run:
                path = f"/v1/federations/{created['id']}/initial-state"
                api.call("PUT", path, content=tensors, headers={"Content-Type": "application/octet-stream"})
        if as_json:
            print_json(created)
        elif dry_run:
            console.print("The spec is good; nothing was created.")
        else:
            console.print(f"Created {created['name']} ({created['id']}), state {created['state']}.", highlight=False)


@federation_app.command("list")
def list_federations(coordinator: Url = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """List the coordinator's federations."""
    with reporting_errors(), open_coordinator(coordinator, token_file) as api:
        found = list(pages(api, "/v1/federations", "federations"))
        if as_json:
            print_json(found)
            return
        rows = [
            [one["name"], one["spec"]["method"]["name"], one["state"], f"{one['round']}/{one['spec']['rounds']}"]
            for one in found
        ]
        console.print(table(None, ["federation", "method", "state", "round"], rows))


@federation_app.command()
def status(
    federation: Federation, coordinator: Url = None, token_file: TokenFile = None, as_json: Json = False
) -> None:
    """Show one federation: its state, who has answered, who is awaited until when, accuracy so far."""
    with reporting_errors(), open_coordinator(coordinator, token_file) as api:
        found = api.get(f"/v1/federations/{federation}")
        if as_json:
            print_json(found)
            return
        _show_status(found)
        _show_result(api, federation)


@federation_app.command()
def watch(federation: Federation, coordinator: Url = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Follow a federation until it ends; exit code 7 if it did not finish."""
    with reporting_errors(), open_coordinator(coordinator, token_file) as api:
        with Watcher(quiet=as_json) as watcher:
            for snapshot in follow(api, federation):
                watcher.show(snapshot)
        found = api.get(f"/v1/federations/{federation}")
        if as_json:
            print_json(found)
        else:
            _show_result(api, federation)
        if found["state"] != "finished":
            reason = f": {found['reason']}" if found.get("reason") else ""
            raise CommandError(f"{found['name']} is {found['state']}{reason}", Exit.FEDERATION_ENDED_BADLY)


def _steer(verb: str, summary: str) -> None:
    @federation_app.command(verb, help=summary)
    def command(
        federation: Federation, coordinator: Url = None, token_file: TokenFile = None, as_json: Json = False
    ) -> None:
        with reporting_errors(), open_coordinator(coordinator, token_file) as api:
            found = api.post(f"/v1/federations/{federation}/{verb}")
            if as_json:
                print_json(found)
            else:
                console.print(f"{found['name']} is {found['state']}.", highlight=False)


_steer("start", "Start the rounds; confirms the backbone that the first client enrolled with.")
_steer("pause", "Pause: nobody is asked until it is resumed; updates of open tasks are still taken.")
_steer("resume", "Go on after a pause.")
_steer("cancel", "End for good.")


@federation_app.command()
def words(
    federation: Federation,
    allow_backbone: Annotated[bool, typer.Option(help="allow a backbone outside open_clip's registry")] = False,
    coordinator: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Give the coordinator the backbone's words, once: its page names those nearest to the prompts of any round."""
    with reporting_errors(), open_coordinator(coordinator, token_file) as api:
        from promptfed.cli.vocabulary import supply_words

        supply_words(api, federation, allow_backbone, as_json)


@federation_app.command()
def token(
    federation: Federation,
    out: Annotated[Path | None, typer.Option(help="write the token here, readable by you alone")] = None,
    coordinator: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Mint an enrolment token for those who are to join."""
    with reporting_errors(), open_coordinator(coordinator, token_file) as api:
        minted = api.post(f"/v1/federations/{federation}/enrolment-tokens")
        if out is not None:
            write_private(out, minted["token"])
        if as_json:
            print_json(minted)
        elif out is None:
            console.print(minted["token"], highlight=False)
        else:
            console.print(f"Wrote {out}; it is good until {minted['expires_at']}.", highlight=False)


@federation_app.command()
def prompts(
    federation: Federation,
    out: Annotated[Path | None, typer.Option(help="write safetensors here; default: print JSON")] = None,
    round: Annotated[str, typer.Option(help="a round's number, or latest")] = "latest",
    coordinator: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Take the global state (prompts, aggregators, generators) of a round."""
    with reporting_errors(), open_coordinator(coordinator, token_file) as api:
        kind = "application/json" if out is None else "application/octet-stream"
        path = f"/v1/federations/{federation}/prompts"
        answer = api.call("GET", path, params={"round": round}, headers={"Accept": kind})
        if out is None:
            print_json(answer.json)
            return
        written = {"file": str(out), "bytes": len(answer.body), "state_hash": answer.headers["etag"].strip('"')}
        write_file(out, answer.body)
        if as_json:
            print_json(written)
        else:
            console.print(f"Wrote {out} ({size(len(answer.body))}), state {written['state_hash']}.", highlight=False)


@federation_app.command()
def replay(
    federation: Federation,
    round: Annotated[int | None, typer.Option(min=0, help="this round alone; default: all that are over")] = None,
    rule: Annotated[str | None, typer.Option(help=f"another aggregation rule: {', '.join(RULES)}")] = None,
    tolerate: Annotated[float | None, typer.Option(help="of the rule: share of updates that may be bad")] = None,
    clip_norm: Annotated[str | None, typer.Option(help="of the rule: longest update, a number or median")] = None,
    without: Annotated[list[str] | None, typer.Option(help="leave out this client's updates, repeatable")] = None,
    out: Annotated[Path | None, typer.Option(help="with --round: write its state as it came out, safetensors")] = None,
    coordinator: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Compute rounds again from their kept updates: to the same hashes, or under another rule or without a client."""
    with reporting_errors():
        asked = question(rule, tolerate, clip_norm, without or [])
        with open_coordinator(coordinator, token_file) as api:
            replay_rounds(api, federation, round, asked, out, as_json)


def _show_status(found: dict[str, Any]) -> None:
    counts, backbone = found["clients"], found["backbone"]
    fingerprint = backbone["fingerprint"] or "not known before the first client"
    unconfirmed = backbone["fingerprint"] is not None and not backbone["confirmed"]
    who = f"{counts['trainers']} trainers, {counts['evaluators']} evaluators"
    snapshot = Snapshot.of(found)
    lines = [
        f"{found['name']} ({found['id']}): {found['spec']['method']['name']}, {snapshot.describe()}",
        f"round {snapshot.round} of {snapshot.rounds}, {who}",
        f"backbone {found['spec']['backbone']['model']}, {fingerprint}"
        + (" (`start` confirms it)" if unconfirmed else ""),
    ]
    lines += [f"waiting for {one['name']} until {one['until']}" for one in found["awaited"]]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _show_result(api: Coordinator, federation: str) -> None:
    result = read_result(api, federation)
    if result is not None:
        console.print(result_table(result, f"Accuracy after round {result.round}"))
        console.print(f"sent up {size(result.bytes_up)}, down {size(result.bytes_down)}", highlight=False)


def read_spec(path: Path) -> dict[str, Any]:
    """A spec from a YAML or JSON file.

    Raises:
        CommandError: the file cannot be read, is no YAML, or holds no mapping.
    """
    import yaml

    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}", Exit.BAD_INPUT) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} is not YAML: {' '.join(str(error).split())}", Exit.BAD_INPUT) from None
    if not isinstance(raw, dict):
        raise CommandError(f"{path} must hold a mapping, such as `name: eyes`", Exit.BAD_INPUT)
    return raw
