"""`promptfed ledger`: the privacy budget of an owner's data."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from promptfed.cli.app import Made, app
from promptfed.cli.common import Json
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.settings import ledger_path
from promptfed.console.output import console, print_json, say, table, tell
from promptfed.sdk.client import PROXY_VARIABLE
from promptfed.shared.errors import BadInput
from promptfed.shared.plain_text import counted

if TYPE_CHECKING:
    from promptfed.shared.api.api_schemas import SpendList

ledger_group = app.group("ledger", "Read the privacy budget of this owner's data.", "Take part with own data")
EXPLAINED = (
    "ε bounds how much more likely one record of the training images made any result: by at most e^ε, except with "
    "probability δ. This ε compares the record with one that contributes nothing; compared with another record "
    "instead (replace-one), it is {:.4g}. What several federations have spent adds up to less than the sum of their ε."
)
ANSWER_SECONDS = 30.0


def open_ledger(
    ledger: Annotated[Path | None, typer.Option(help="its file; default: the data set's own")] = None,
    dataset: Annotated[str | None, typer.Option(help="name of the data set; default: default")] = None,
) -> Ledger:
    """The ledger of a data set. Raises PromptfedError if both are given."""
    if ledger is not None and dataset is not None:
        raise BadInput("--ledger and --dataset both name the ledger: give one")
    name = "default" if dataset is None else dataset
    return Ledger(ledger_path(name) if ledger is None else ledger, name)


def expect_there(ledger: Ledger) -> None:
    """Raise PromptfedError if the ledger has no file."""
    if ledger.path is None or not ledger.path.exists():
        text = f"there is no ledger {ledger.path}: nothing was spent there"
        raise BadInput(f"{text}, or its data set has another --dataset or --ledger")


OwnLedger = Annotated[Ledger, Made(open_ledger)]


@ledger_group.add()
def show(
    ledger: OwnLedger,
    most: Annotated[float, typer.Option("--max-epsilon", help="the budget")] = 8.0,
    as_json: Json = False,
) -> None:
    """Show what was spent, by federation and in all, and what is left."""
    expect_there(ledger)
    spends = ledger.spends()
    federations = sorted({(spend.coordinator, spend.federation_id) for spend in spends})
    shares = [_of_federation(ledger, spends, *federation) for federation in federations]
    epsilon, replace_one = ledger.epsilon(), ledger.epsilon(replace_one=True)
    if as_json:
        facts = {"ledger": str(ledger.path), "delta": ledger.delta(), "epsilon": epsilon}
        facts |= {"left": max(0.0, most - epsilon), "epsilon_replace_one": replace_one}
        print_json(facts | {"test_epsilon": ledger.epsilon("test"), "federations": shares})
        return
    say(f"{ledger.path}: ε = {epsilon:.4g} of {most:g} spent at δ = {ledger.delta()}")
    console.print(EXPLAINED.format(replace_one), highlight=False)
    if shares:
        columns = ["name", "federation", "coordinator", "first", "last", "releases"]
        rows = [[*(str(share[key]) for key in columns), f"{share['epsilon']:.4g}"] for share in shares]
        console.print(table(None, [*columns, "ε by itself"], rows))


def _of_federation(ledger: Ledger, spends: list[Any], coordinator: str, federation: str) -> dict[str, object]:
    from promptfed.shared.privacy.accounting import epsilon_of

    of_federation = [spend for spend in spends if (spend.coordinator, spend.federation_id) == (coordinator, federation)]
    events = [event for spend in of_federation if spend.split == "train" for event in spend.events]
    return {
        "name": of_federation[-1].federation or "-",
        "federation": federation,
        "coordinator": coordinator,
        "first": of_federation[0].at[:10],
        "last": of_federation[-1].at[:10],
        "releases": len(of_federation),
        "epsilon": epsilon_of(events, ledger.delta() or 0.0),
    }


@ledger_group.add()
def verify(ledger: OwnLedger) -> None:
    """Check that every line follows from the previous one and states the ε that its events add up to."""
    expect_there(ledger)
    spends = ledger.spends()
    if spends and abs(ledger.epsilon(spends[-1].split) - spends[-1].epsilon) > 1e-6:
        epsilon = ledger.epsilon(spends[-1].split)
        text = f"the last line says ε = {spends[-1].epsilon:.6g}, its events make {epsilon:.6g}"
        raise ClientError(Exit.LEDGER, f"{ledger.path}: {text}")
    say(f"{ledger.path} holds together: {counted(len(spends), 'release')}.")


@ledger_group.add()
def adopt(
    state_dir: Annotated[Path, typer.Option(help="the client's state folder, whose coordinator is asked")],
    ledger: OwnLedger,
    coordinator: Annotated[str | None, typer.Option(help="its address now; default: as it was joined")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="PEM file of the authority that signed it")] = None,
    as_json: Json = False,
) -> None:
    """Add the releases that a coordinator knows of a client and that an old copy of the ledger lacks."""
    from promptfed.client_service.privacy.ledger import adopt_head
    from promptfed.client_service.state.private_state import PrivateState

    spends, address = known_spends(state_dir, coordinator, ca_file)
    state = PrivateState(state_dir)  # first: it locks the folder, so that nobody else uses it meanwhile
    try:
        added = ledger.adopt(spends, address)
        adopt_head(ledger, state)
    finally:
        state.close()
    result = f"{counted(added, 'release')} added" if added else "it lacks nothing"
    epsilon = ledger.epsilon()
    facts = {"ledger": str(ledger.path), "added": added, "epsilon": epsilon}
    tell(as_json, facts, f"{ledger.path}: {result}; ε = {epsilon:.4g} spent.")


def known_spends(folder: Path, coordinator: str | None, ca_file: Path | None) -> tuple[SpendList, str]:
    """The spends that the coordinator of a client's state folder knows, and its address. The client may be running.

    Raises:
        PromptfedError: the folder is no enrolled client's, or the coordinator does not answer it.
    """
    from promptfed.client_service.http.bodies import SentLog
    from promptfed.client_service.http.connection import BadAnswer, Refused
    from promptfed.client_service.http.coordinator_client import CoordinatorClient, http_to
    from promptfed.client_service.privacy.agreement import FILE
    from promptfed.client_service.state.site_log import SiteLog
    from promptfed.shared.api.api_schemas import SpendList
    from promptfed.shared.service.addresses import addresses_of

    try:
        identity = json.loads((folder / "identity.json").read_bytes())
        address = coordinator or json.loads((folder / FILE).read_bytes())["terms"]["coordinator"]
        federation, secret = str(identity["federation_id"]), str(identity["secret"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        text = f"{folder} holds no client that has enrolled: give its --state-dir"
        raise BadInput(text) from None

    async def ask() -> SpendList:
        async with http_to(address, ca_file, proxy=os.environ.get(PROXY_VARIABLE)) as http:
            client = CoordinatorClient(http, address, federation, ANSWER_SECONDS, secret)
            client.sent = SentLog(SiteLog(folder).note)
            return await client.ask(SpendList, "spends")

    try:
        return asyncio.run(ask()), addresses_of(address)[0]
    except Refused as refused:
        raise ClientError(Exit.REFUSED, f"{address} does not tell: {refused}") from None
    except BadAnswer as error:
        raise ClientError(Exit.PROTOCOL, str(error)) from None
