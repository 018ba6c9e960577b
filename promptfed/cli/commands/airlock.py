"""`promptfed airlock`: a site without a network takes part by files that people carry."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from promptfed.cli.app import Made, app
from promptfed.cli.common import Api, Federation, Json, Yes, confirm
from promptfed.cli.settings_options import options_of
from promptfed.client_service.settings import Settings
from promptfed.sdk import operations
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import write_whole_file
from promptfed.sdk.output import say, tell
from promptfed.shared.service.reasons import why

FROM_FILE = frozenset(
    {"coordinator", "federation", "name", "enrolment_token_file", "allow_plain_http", "check", "withdraw"}
    | {"fingerprint", "sent", "serve", "proxy", "ca_file", "client_cert", "give_up_after", "yes"}
)
"""The settings of a client that the tasks' file brings, or that need a network."""

group = app.group("airlock", "Take part by files, without a network.", section="Take part with own data")


@group.add()
def take(
    federation: Federation,
    client: Annotated[str, typer.Argument(help="the name of the client, also before it has enrolled")],
    api: Api,
    out: Annotated[Path, typer.Option(help="the file to carry to the site")] = Path("tasks.airlock"),
    wait: Annotated[float, typer.Option(min=0, max=60, help="seconds to wait for a task")] = 0,
    as_json: Json = False,
) -> None:
    """Beside the coordinator: write a client's task, and what became of its last answer, into a signed file."""
    content = api.send(operations.take_tasks(federation, client, wait)).body
    write_whole_file(out, content)
    tell(as_json, {"file": str(out), "bytes": len(content)}, f"{out}: carry it to {client}.")


@group.add()
def work(
    tasks: Annotated[Path, typer.Argument(help="the file that `airlock take` wrote")],
    given: Annotated[dict[str, Any], Made(options_of(Settings, without=FROM_FILE))],
    out: Annotated[Path, typer.Option(help="the file to carry back; a page that shows it lies beside it")] = Path(
        "answers.airlock"
    ),
    coordinator_key: Annotated[
        str | None, typer.Option(help="the key that the operator has told over another channel (ed25519:...)")
    ] = None,
    yes: Yes = False,
) -> None:
    """At the site, without a network: carry out the task. A person looks at what would leave, and releases it."""
    from promptfed.cli import air_gap
    from promptfed.client_service.__main__ import set_up_logging
    from promptfed.client_service.joining.consent import Terminal
    from promptfed.client_service.joining.parts import Parts

    sealed = air_gap.read_tasks(tasks, coordinator_key)
    settings = air_gap.settings_for(sealed, given)
    set_up_logging(settings.log_format)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    terminal = Terminal(settings.log_format, not yes, settings.agree)
    prepared = air_gap.work(sealed, settings, Parts(consent=terminal.consent))
    if prepared.answers is None:
        say("Nothing is to leave: there is no open task. Take the tasks again once a phase has opened.")
        return
    for line in prepared.summary:
        say(f"  {line}")
    confirm(f"This would be written to {out}, for the coordinator.", yes)
    write_whole_file(out.with_name(out.name + ".html"), prepared.sheet.encode())
    write_whole_file(out, prepared.answers)
    say(f"Released: {out}. The page {out.name}.html shows it.")


@group.add()
def give(
    federation: Federation,
    answers: Annotated[Path, typer.Argument(help="the file that `airlock work` wrote")],
    api: Api,
    as_json: Json = False,
) -> None:
    """Beside the coordinator: enter a client's answer. The same file again changes nothing."""
    try:
        content = answers.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {answers}: {why(error)}", Exit.BAD_INPUT) from None
    receipt = api.send(operations.give_answers(federation, content))
    done = "is entered" if receipt.view.new else "had been entered before"
    tell(as_json, receipt.json, f"The {receipt.view.request} of {receipt.view.client} {done}.")
