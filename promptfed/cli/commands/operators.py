"""`promptfed operator` and `promptfed audit-log`: who may operate a coordinator, and what was done there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.commands.tokens import good_until, show_minted
from promptfed.cli.common import Api, AskedLater, Json
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import expect_new
from promptfed.sdk.output import console, print_json, say, table, tell
from promptfed.shared.api.access_schemas import AuditEntry, BrokenChain, check_chain
from promptfed.shared.plain_text import counted
from promptfed.shared.service.reasons import why

operators = app.group("operator", "Name those who may operate a coordinator, each with a role.", "Operate federations")
audit_log = app.group("audit-log", "Read and verify the log of what was done at a coordinator.", "Operate federations")


@operators.add()
def add(
    name: Annotated[str, typer.Argument(help="of the person or program, as the audit log shows it")],
    api: Api,
    role: Annotated[str, typer.Option(help="viewer reads, operator steers, admin also names operators")] = "operator",
    hours: Annotated[float | None, typer.Option(help="how long the token is good; default: 90 days")] = None,
    out: Annotated[Path | None, typer.Option(help="write the token here, readable by you alone")] = None,
    as_json: Json = False,
) -> None:
    """Mint a token for an operator; it is shown only here."""
    expect_new(out)
    show_minted(api.send(operations.mint_operator(name, role, hours)).json, out, as_json)


@operators.add("list")
def list_operators(api: Api, as_json: Json = False) -> None:
    """List operators' tokens, without the one in the coordinator's data folder."""
    pages = api.run(operations.list_operators())
    if as_json:
        print_json([operator for page in pages for operator in page.json["operators"]])
        return
    views = [view for page in pages for view in page.view.operators]
    rows = [[view.name, view.role, good_until(view), view.id] for view in views]
    console.print(table(None, ["operator", "role", "good until", "token"], rows))


@operators.add()
def remove(
    operator: Annotated[str, typer.Argument(help="an operator's name, or the id of one token")], api: Api
) -> None:
    """Revoke all tokens of an operator, or one of them."""
    api.send(operations.revoke_operator(operator))
    say(f"The tokens of {operator} are revoked.")


@audit_log.add()
def show(api: Api, as_json: Json = False) -> None:
    """Print the audit log, one action a line."""
    for entry in _entries(api):
        if as_json:
            typer.echo(entry.model_dump_json())
            continue
        details = [f"{key}={value}" for key, value in entry.detail.items() if value is not None]
        where = [entry.federation_name] if entry.federation_name else []
        say(" ".join([entry.at, entry.actor, entry.address, entry.act, *where, *details]))


@audit_log.add()
def verify(
    asked: AskedLater,
    head: Annotated[
        str | None, typer.Option(help="a head that an earlier verify has printed: it must be there")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="verify what `show --json` has printed into this file")] = None,
    as_json: Json = False,
) -> None:
    """Compute the log's chain of hashes again; the exit code is 6 if the log was changed."""
    if file is not None:
        entries = _read(file)
    else:
        with asked.open() as api:
            entries = list(_entries(api))
    try:
        number, last = check_chain(entries)
    except BrokenChain as broken:
        raise CommandError(f"the audit log was tampered with: {broken}", Exit.REFUSED) from None
    if head is not None and head not in {entry.hash for entry in entries}:
        text = f"no entry has the hash {head}: its end was cut, or all of it was written anew"
        raise CommandError(f"the audit log was tampered with: {text}", Exit.REFUSED)
    tell(
        as_json,
        {"entries": number, "head": last},
        f"{counted(number, 'entry', 'entries')}, each as it was written; head {last}",
    )


def _entries(api: Coordinator) -> Iterator[AuditEntry]:
    for page in api.run(operations.audit_log()):
        yield from page.view.entries


def _read(file: Path) -> list[AuditEntry]:
    try:
        return [AuditEntry.model_validate_json(line) for line in file.read_text().splitlines() if line]
    except OSError as error:
        raise CommandError(f"cannot read {file}: {why(error)}", Exit.BAD_INPUT) from None
    except ValueError:
        text = f"{file} is not an audit log: give what `promptfed audit-log show --json` has printed"
        raise CommandError(text, Exit.BAD_INPUT) from None
