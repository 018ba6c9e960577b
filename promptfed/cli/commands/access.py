"""Who takes part and who operates: `promptfed federation clients`, `token`, `invite`, `operator` and `audit-log`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.commands.federation import group
from promptfed.cli.common import Api, AskedLater, Client, Federation, Json, Written, Yes, confirm, refuse
from promptfed.console.files import expect_new, write_private
from promptfed.console.output import console, print_json, say, table, tell
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.shared.api.api_schemas import AuditEntry, BrokenChain, ClientView, OperatorView, TokenView, check_chain
from promptfed.shared.errors import BadInput, Refused
from promptfed.shared.plain_text import counted, moment
from promptfed.shared.service.invitation import COMMAND
from promptfed.shared.service.reasons import why

CLIENT_COLUMNS = ["client", "role", "images", "classes", "last seen", "refusals", "standing"]
Uses = Annotated[int, typer.Option(min=1, help="how many clients can enrol with it")]
Hours = Annotated[float | None, typer.Option(help="how long it is good; default: the coordinator's setting")]
Name = Annotated[str | None, typer.Option(help="name in the list of tokens; default: its id")]
Role = Annotated[str | None, typer.Option(help="for trainers or evaluators alone: trainer, evaluator")]
TOKEN_COLUMNS = ["token", "for", "used", "good until", "clients"]
operators = app.group("operator", "Name those who may operate a coordinator, each with a role.", "Operate federations")
audit_log = app.group("audit-log", "Read and verify the log of what was done at a coordinator.", "Operate federations")


@group.add("clients")
def list_clients(federation: Federation, api: Api, as_json: Json = False) -> None:
    """List the enrolled clients: role, images, when each was last seen, and its last refusal."""
    pages = api.run(operations.list_clients(federation))
    if as_json:
        print_json([client for page in pages for client in page.json["clients"]])
        return
    views = operations.clients_of(pages)
    console.print(table(None, CLIENT_COLUMNS, [_client_row(view) for view in views]))
    for view in views:
        if view.last_refusal is not None:
            say(f"{view.name} was refused last: {view.last_refusal.type}, {view.last_refusal.detail}")


@group.add()
def withdraw(
    federation: Federation,
    client: Client,
    api: Api,
    discard: Annotated[bool, typer.Option(help="drop its accepted update of the open phase too")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Take a client out for good, after confirmation: it is refused from now on."""
    confirm(f"{client} would be taken out of {federation} for good.", yes)
    api.send(operations.withdraw_client(federation, client, discard))
    text = f"{client} is withdrawn; what it sent before stays until `promptfed federation delete-updates`."
    tell(as_json, {"withdrawn": client}, text)


@group.add()
def reset(federation: Federation, client: Client, api: Api, as_json: Json = False) -> None:
    """Let a client that has lost its state folder enrol again under its name; its place and domain stay."""
    answer = api.send(operations.reset_client(federation, client))
    token = f"`promptfed federation token {federation} --client {answer.view.name}`"
    tell(as_json, answer.json, f"{answer.view.name} can enrol anew, with a token for it: {token}.")


@group.add("delete-updates")
def delete_updates(federation: Federation, client: Client, api: Api, yes: Yes = False, as_json: Json = False) -> None:
    """Delete the tensors that a client has sent, after confirmation; reports keep their figures.

    The client must be withdrawn, or the federation must have ended.
    """
    confirm(f"What {client} has sent to {federation} would be deleted.", yes)
    api.send(operations.delete_updates(federation, client))
    tell(as_json, {"deleted_updates_of": client}, f"The updates of {client} are deleted.")


def _client_row(view: ClientView) -> list[str]:
    seen = moment(view.last_seen) if view.last_seen is not None else "never"
    standing = "withdrawn" if view.status == "withdrawn" else "name was reset" if view.reset else ""
    waiting = "" if view.joined else "joins at the next round"
    domain = f" ({view.domain.name})" if view.domain is not None else ""
    return [
        f"{view.name}{domain}",
        view.role,
        str(view.num_samples),
        str(view.num_classes),
        seen,
        str(view.refusals),
        standing or waiting or "takes part",
    ]


@group.add()
def token(
    federation: Federation,
    api: Api,
    written: Written,
    out: Annotated[Path | None, typer.Option(help="write the token here, readable by you alone")] = None,
    uses: Uses = 1,
    hours: Hours = None,
    name: Name = None,
    role: Role = None,
    client: Annotated[str | None, typer.Option(help="for this client alone, whose name was reset")] = None,
    listed: Annotated[bool, typer.Option("--list", help="mint nothing: list the tokens and who used them")] = False,
    revoke: Annotated[str | None, typer.Option(help="mint nothing: revoke the token of this name or id")] = None,
    as_json: Json = False,
) -> None:
    """Mint a token with which clients enrol; or list the tokens, or revoke one."""
    if listed and revoke is not None:
        raise BadInput("--list and --revoke are two things: give one of them")
    if listed or revoke is not None:
        refuse(written & {"out", "uses", "hours", "name", "role", "client"}, "of a new token; nothing is minted here")
    expect_new(out)
    if listed:
        _list(api, federation, as_json)
    elif revoke is not None:
        api.send(operations.revoke_token(federation, revoke))
        tell(as_json, {"revoked": revoke}, f"Nobody enrols with {revoke} any more.")
    else:
        request = {"hours": hours, "name": name, "role": role, "client": client}
        show_minted(api.send(operations.mint_token(federation, uses, **request)).json, out, as_json)


@group.add()
def invite(
    federation: Federation,
    api: Api,
    address: Annotated[
        str | None, typer.Option(help="where clients reach the coordinator; default: where this command does")
    ] = None,
    uses: Uses = 1,
    hours: Hours = None,
    name: Name = None,
    role: Role = None,
    as_json: Json = False,
) -> None:
    """Mint a token and print an invitation, and the command that asks a data owner for it."""
    request = {"hours": hours, "name": name, "role": role, "address": address or api.url}
    minted = api.send(operations.mint_token(federation, uses, **request)).json
    tell(as_json, minted, f"{COMMAND} - --data folder:/path/to/images\n{minted['invitation']}")


def show_minted(minted: dict[str, str], out: Path | None, as_json: bool) -> None:
    """Write a token that is shown only once into ``out``, or print it."""
    if out is not None:
        write_private(out, minted["token"])
    text = minted["token"] if out is None else f"Wrote {out}; it is good until {minted['expires_at']}."
    tell(as_json, minted, text)


def good_until(view: TokenView | OperatorView) -> str:
    """The time at which a token expires, and whether it has expired."""
    return moment(view.expires_at) + (", expired" if view.expired_at else "")


def _list(api: Coordinator, federation: str, as_json: bool) -> None:
    pages = api.run(operations.list_tokens(federation))
    if as_json:
        print_json([token for page in pages for token in page.json["tokens"]])
        return
    console.print(table(None, TOKEN_COLUMNS, [_token_row(view) for page in pages for view in page.view.tokens]))


def _token_row(view: TokenView) -> list[str]:
    used = f"{view.used} of {view.uses}"
    return [
        view.name,
        view.client or view.role or "any role",
        f"{used}, closed" if view.closed else used,
        good_until(view),
        ", ".join(view.clients[:5]) + (f" and {len(view.clients) - 5} more" if len(view.clients) > 5 else ""),
    ]


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
    written: Written,
    head: Annotated[
        str | None, typer.Option(help="a head that an earlier verify has printed: it must be there")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="verify what `show --json` has printed into this file")] = None,
    as_json: Json = False,
) -> None:
    """Compute the log's chain of hashes again; the exit code is 6 if the log was changed."""
    if file is not None:
        refuse(written & {"coordinator", "token_file"}, "no coordinator is asked with --file; leave it out")
        entries = _read(file)
    else:
        with asked.open() as api:
            entries = list(_entries(api))
    try:
        number, last = check_chain(entries)
    except BrokenChain as broken:
        raise Refused(f"the audit log was tampered with: {broken}") from None
    if head is not None and head not in {entry.hash for entry in entries}:
        text = f"no entry has the hash {head}: its end was cut, or all of it was written anew"
        raise Refused(f"the audit log was tampered with: {text}")
    tell(
        as_json,
        {"entries": number, "head": last},
        f"{counted(number, 'entry', 'entries')}, each as it was written; head {last}",
    )


def _entries(api: Coordinator) -> Iterator[AuditEntry]:
    for page in api.run(operations.audit_log()):
        yield from page.view.entries


def _read(file: Path) -> list[AuditEntry]:
    entries: list[AuditEntry] = []
    try:
        for line in filter(None, file.read_text().split("\n")):
            entries.append(AuditEntry.model_validate_json(line))
    except OSError as error:
        raise BadInput(f"cannot read {file}: {why(error)}") from None
    except ValueError:
        text = f"line {len(entries) + 1} of {file} is no entry" if entries else f"{file} is not an audit log"
        raise BadInput(f"{text}: give what `promptfed audit-log show --json` has printed") from None
    return entries
