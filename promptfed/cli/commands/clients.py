"""`promptfed federation clients`, `withdraw`, `reset`, `delete-updates`: the clients of a federation."""

from __future__ import annotations

from typing import Annotated

import typer

from promptfed.cli.commands.federation import group
from promptfed.cli.common import Api, Client, Federation, Json, Yes, confirm
from promptfed.sdk import operations
from promptfed.sdk.output import console, print_json, say, table, tell
from promptfed.shared.api.api_schemas import ClientView

COLUMNS = ["client", "role", "images", "classes", "last seen", "refusals", "standing"]


@group.add("clients")
def list_clients(federation: Federation, api: Api, as_json: Json = False) -> None:
    """List the enrolled clients: role, images, when each was last seen, and its last refusal."""
    pages = api.run(operations.list_clients(federation))
    if as_json:
        print_json([client for page in pages for client in page.json["clients"]])
        return
    views = operations.clients_of(pages)
    console.print(table(None, COLUMNS, [_row(view) for view in views]))
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


def _row(view: ClientView) -> list[str]:
    seen = view.last_seen.isoformat(timespec="seconds") if view.last_seen is not None else "never"
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
