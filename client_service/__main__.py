"""``python -m promptfed.client_service --coordinator URL --federation NAME ...``: one client process."""

from __future__ import annotations

import gc
import logging
import sys
from typing import Literal

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.monitor import EventJsonLines, EventTextLines
from promptfed.client_service.settings import Settings, make_settings, unread
from promptfed.client_service.state.site_log import sent_lines
from promptfed.shared.service.process import given_settings, log_to_stderr, unfit_server
from promptfed.shared.service.reasons import collect_seldom
from promptfed.shared.service.streams import as_process


def set_up_logging(log_format: Literal["text", "json"]) -> None:
    """Log to stderr: our own events, and only warnings of libraries."""
    log_to_stderr(EventJsonLines() if log_format == "json" else EventTextLines(), "WARNING")
    logging.getLogger("promptfed").setLevel(logging.INFO)


def start(settings: Settings) -> int:
    """Do what the settings ask for, with logging set up; the exit code. Torch is imported here and not before."""
    set_up_logging(settings.log_format)
    for line in unread():
        logging.getLogger("promptfed.client").warning("%s", line)
    try:
        if settings.check:
            return check(settings)
        if settings.withdraw:
            from promptfed.client_service.joining.consent import withdraw

            return withdraw(settings)
        if settings.fingerprint:
            from promptfed.client_service.privacy.identity import own_fingerprint

            print(own_fingerprint(settings.state_dir))
            return Exit.OK
        if settings.sent:
            print("\n".join(sent_lines(settings.state_dir, settings.log_format)))
            return Exit.OK
        if (unfit := unfit_server()) is not None:
            raise ClientError(Exit.USAGE, unfit)
    except ClientError as error:
        logging.getLogger("promptfed.client").error("%s", error)
        return error.exit
    from promptfed.client_service.worker import run

    gc.freeze()  # no collection goes through what torch's import has brought
    return run(settings)


def check(settings: Settings) -> int:
    """Check everything and join nothing; BAD_INPUT if a check fails."""
    from promptfed.client_service.joining.consent import Terminal
    from promptfed.client_service.joining.doctor import Examination

    examination = Examination(settings)
    examination.run()
    terminal = Terminal(settings.log_format, ask=False)
    terminal.tell(examination.checks)
    if examination.disclosure is not None:
        terminal.show(examination.disclosure)
    return Exit.OK if examination.healthy else Exit.BAD_INPUT


def main(arguments: list[str] | None = None) -> int:
    """The exit code of a client with the settings that the command line gives."""
    collect_seldom()
    try:
        settings = make_settings(**given_settings(Settings, "client_service", arguments))
    except ClientError as error:
        print(error, file=sys.stderr)
        return error.exit
    return start(settings)


if __name__ == "__main__":
    as_process(main)
