"""`promptfed federation token` and `invite`: enrolment tokens, minted, listed and revoked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.commands.federation import group
from promptfed.cli.common import Api, Federation, Json
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import expect_new, write_private
from promptfed.sdk.output import console, print_json, table, tell
from promptfed.shared.api.access_schemas import OperatorView, TokenView

Uses = Annotated[int, typer.Option(min=1, help="how many clients can enrol with it")]
Hours = Annotated[float | None, typer.Option(help="how long it is good; default: the coordinator's setting")]
Name = Annotated[str | None, typer.Option(help="name in the list of tokens; default: its id")]
Role = Annotated[str | None, typer.Option(help="for trainers or evaluators alone: trainer, evaluator")]
COLUMNS = ["token", "for", "used", "good until", "clients"]


@group.add()
def token(
    federation: Federation,
    api: Api,
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
        raise CommandError("--list and --revoke are two things: give one of them", Exit.BAD_INPUT)
    expect_new(out)
    if listed:
        _list(api, federation, as_json)
    elif revoke is not None:
        api.send(operations.revoke_token(federation, revoke))
        tell(as_json, {"revoked": revoke}, f"Nobody enrols with {revoke} any more.")
    else:
        asked = {"hours": hours, "name": name, "role": role, "client": client}
        show_minted(api.send(operations.mint_token(federation, uses, **asked)).json, out, as_json)


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
    asked = {"hours": hours, "name": name, "role": role, "address": address or api.url}
    minted = api.send(operations.mint_token(federation, uses, **asked)).json
    tell(as_json, minted, f"promptfed join - --data folder:/path/to/images\n{minted['invitation']}")


def show_minted(minted: dict[str, str], out: Path | None, as_json: bool) -> None:
    """Write a token that is shown only once into ``out``, or print it."""
    if out is not None:
        write_private(out, minted["token"])
    text = minted["token"] if out is None else f"Wrote {out}; it is good until {minted['expires_at']}."
    tell(as_json, minted, text)


def good_until(view: TokenView | OperatorView) -> str:
    """The time at which a token expires, and whether it has expired."""
    return view.expires_at.isoformat(timespec="seconds") + (", expired" if view.expired_at else "")


def _list(api: Coordinator, federation: str, as_json: bool) -> None:
    pages = api.run(operations.list_tokens(federation))
    if as_json:
        print_json([token for page in pages for token in page.json["tokens"]])
        return
    console.print(table(None, COLUMNS, [_row(view) for page in pages for view in page.view.tokens]))


def _row(view: TokenView) -> list[str]:
    used = f"{view.used} of {view.uses}" if view.uses is not None else str(view.used)
    return [
        view.name,
        view.client or view.role or "any role",
        f"{used}, closed" if view.closed else used,
        good_until(view),
        ", ".join(view.clients[:5]) + (f" and {len(view.clients) - 5} more" if len(view.clients) > 5 else ""),
    ]
