"""`promptfed federation token`: enrolment tokens, minted, listed and taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.common import Federation, Json, TokenFile, Url
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator, open_coordinator
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import write_private
from promptfed.sdk.output import console, print_json, reporting_errors, table
from promptfed.shared.api.access_schemas import TokenView

COLUMNS = ["token", "for", "used", "good until", "clients"]


def token(
    federation: Federation,
    out: Annotated[Path | None, typer.Option(help="write the token here, readable by you alone")] = None,
    uses: Annotated[int, typer.Option(min=1, help="how many clients can enrol with it")] = 1,
    hours: Annotated[float | None, typer.Option(help="how long it is good; default: the coordinator's setting")] = None,
    name: Annotated[str | None, typer.Option(help="by which it is listed; default: its id")] = None,
    role: Annotated[str | None, typer.Option(help="let in trainers or evaluators alone: trainer, evaluator")] = None,
    client: Annotated[str | None, typer.Option(help="give this client, whose name was reset, its name back")] = None,
    listed: Annotated[bool, typer.Option("--list", help="mint nothing: list the tokens, and who came by them")] = False,
    revoke: Annotated[str | None, typer.Option(help="mint nothing: take back the token of this name or id")] = None,
    coordinator: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Mint an enrolment token for those who are to join; or list the tokens that there are, or take one back."""
    with reporting_errors():
        if listed and revoke is not None:
            raise CommandError("--list and --revoke are two things: give one of them", Exit.BAD_INPUT)
        with open_coordinator(coordinator, token_file) as api:
            if listed:
                _list(api, federation, as_json)
            elif revoke is not None:
                api.send(operations.revoke_token(federation, revoke))
                print_json({"revoked": revoke}) if as_json else console.print(f"Nobody enrols with {revoke} any more.")
            else:
                asked = {"hours": hours, "name": name, "role": role, "client": client}
                minted = api.send(operations.mint_token(federation, uses, **asked)).json
                show_minted(minted, out, as_json)


def show_minted(minted: dict[str, str], out: Path | None, as_json: bool) -> None:
    """Write a token that is shown only once into ``out``, or print it."""
    if out is not None:
        write_private(out, minted["token"])
    if as_json:
        print_json(minted)
    elif out is None:
        console.print(minted["token"], highlight=False)
    else:
        console.print(f"Wrote {out}; it is good until {minted['expires_at']}.", highlight=False)


def _list(api: Coordinator, federation: str, as_json: bool) -> None:
    pages = api.run(operations.list_tokens(federation))
    if as_json:
        print_json([token for page in pages for token in page.json["tokens"]])
        return
    console.print(table(None, COLUMNS, [_row(view) for page in pages for view in page.view.tokens]))


def _row(view: TokenView) -> list[str]:
    whom = view.client or view.role or "any role"
    used = f"{view.used} of {view.uses}" if view.uses is not None else str(view.used)
    return [
        view.name,
        whom,
        f"{used}, closed" if view.closed else used,
        view.expires_at.isoformat(timespec="seconds") + (", expired" if view.expired_at else ""),
        ", ".join(view.clients[:5]) + (f" and {len(view.clients) - 5} more" if len(view.clients) > 5 else ""),
    ]
