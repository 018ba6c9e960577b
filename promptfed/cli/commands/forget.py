"""`promptfed forget`: a client is forgotten, and the rounds since it joined are done again without it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import AskedLater, Json, Yes, confirm
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import write_file
from promptfed.sdk.output import say, tell
from promptfed.shared.api.forgetting_schemas import ForgettingPlan, SignedForgetting
from promptfed.shared.canonical import canonical_json
from promptfed.shared.plain_text import counted
from promptfed.shared.service.reasons import why
from promptfed.shared.signatures import forgetting_statement, is_signed


@app.add(section="Operate federations")
def forget(
    asked: AskedLater,
    client: Annotated[str | None, typer.Argument(help="its name; its id before it is forgotten")] = None,
    federation: Annotated[
        str | None, typer.Option(help="its name or id; default: the coordinator's only federation")
    ] = None,
    out: Annotated[Path, typer.Option(help="write the signed certificate here")] = Path("forgotten.json"),
    logs: Annotated[
        list[Path] | None, typer.Option("--log", help="a log file in which the name and id are overwritten; repeatable")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(help="only verify this certificate; with CLIENT also that it is of this name")
    ] = None,
    key: Annotated[str | None, typer.Option(help="with --verify: the coordinator's public key")] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Forget a client: the federation becomes what it were had the client never enrolled.

    Shows first what it costs, and asks. A finished federation goes on: start its clients again.
    """
    if verify is not None:
        _verify(verify, client, key, as_json)
        return
    if client is None:
        raise CommandError("name the client, or give --verify CERTIFICATE", Exit.USAGE)
    with asked.open() as api:
        federation = federation or _only_one(api)
        names = [client]
        try:
            plan = api.send(operations.plan_forgetting(federation, client)).view
        except CommandError as error:
            if error.kind != "not-found":
                raise  # An unknown one may be forgotten already, in part even: asking again finishes it.
        else:
            names = [plan.client, plan.client_id]
            _show(plan, yes, as_json)
        answer = api.send(operations.forget_client(federation, client))
    write_file(out, f"{canonical_json(answer.json)}\n".encode())
    for log in logs or []:
        _overwrite(log, names)
    done = answer.view.report.done
    text = f"{client} is forgotten; {counted(done.rounds, 'round is', 'rounds are')} repeated. Certificate: {out}"
    state = answer.view.report.federation.state
    tell(as_json, answer.json, f"{text}. The federation is {state}.")


def _show(plan: ForgettingPlan, yes: bool, as_json: bool) -> None:
    lines = plan.told()
    if not as_json:
        for line in lines:
            say(line)
    confirm(f"All that {plan.client} has sent to {plan.federation.name} would be erased.", yes)


def _only_one(api: Coordinator) -> str:
    found = [view.name for page in api.run(operations.list_federations()) for view in page.view.federations]
    if len(found) != 1:
        text = f"the coordinator has {counted(len(found), 'federation')}"
        raise CommandError(f"{text}: name one with --federation", Exit.BAD_INPUT)
    return found[0]


def _overwrite(log: Path, names: list[str]) -> None:
    """Overwrite each name with as many asterisks: services that write to the file go on."""
    try:
        content = log.read_bytes()
        with log.open("r+b") as file:
            for name in names:
                wanted, at = name.encode(), -1
                while (at := content.find(wanted, at + 1)) >= 0:
                    file.seek(at)
                    file.write(b"*" * len(wanted))
    except OSError as error:
        raise CommandError(f"cannot overwrite names in {log}: {why(error)}", Exit.BAD_INPUT) from None


def _verify(file: Path, client: str | None, key: str | None, as_json: bool) -> None:
    try:
        certificate = SignedForgetting.model_validate_json(file.read_bytes())
    except OSError as error:
        raise CommandError(f"cannot read {file}: {why(error)}", Exit.BAD_INPUT) from None
    except ValueError:
        text = f"{file} is no certificate: give what `promptfed forget` has written"
        raise CommandError(text, Exit.BAD_INPUT) from None
    report = certificate.report
    said = forgetting_statement(canonical_json(report.model_dump(mode="json")))
    if key is not None and key != certificate.public_key:
        raise CommandError(f"{file} is signed with another key: {certificate.public_key}", Exit.REFUSED)
    if not is_signed(certificate.public_key, certificate.signature, said):
        raise CommandError(f"{file} is not as it was signed", Exit.REFUSED)
    if client is not None and not report.done.client.is_of(client):
        raise CommandError(f"{file} is of another client than {client}", Exit.REFUSED)
    if as_json:
        tell(as_json, report.model_dump(mode="json"), "")
        return
    say(f"{report.federation.name} has forgotten {client or 'a client'} on {report.erased.at}, as {report.by} asked.")
    whose = "" if key is not None else f" The key is {certificate.public_key}: compare it with the coordinator's."
    say(f"The signature is valid.{whose}")
    for limit in report.limits:
        say(limit)
