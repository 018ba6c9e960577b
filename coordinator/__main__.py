"""``python -m promptfed.coordinator``: the options of ``Settings``, or PROMPTFED_COORDINATOR_* variables."""

from __future__ import annotations

import os
import sys
from typing import Any

from pydantic import ValidationError

from promptfed.coordinator.settings import Settings, unread
from promptfed.shared.service.process import given_settings, unfit_server
from promptfed.shared.service.reasons import collect_seldom, offence
from promptfed.shared.service.streams import as_process


def start(options: dict[str, Any]) -> int:
    """Run a coordinator with these ``options`` over the settings of the environment.

    The exit code: 0; 2 if it cannot start; 3 if the database did not answer in time. With ``verify`` 1 if something
    stored is damaged.
    """
    # Before numpy is imported: threads of its own would take memory, and time from the event loop.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if "database_url" in options or "database_url_file" in options:
        # One of them given here is the answer, whichever the environment has.
        options = {"database_url": None, "database_url_file": None} | options
    try:
        settings = Settings(**options)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_context=False, include_input=False):
            option = "".join(f"--{str(part).replace('_', '-')}: " for part in item["loc"])
            print(f"coordinator: {option}{offence(item)}", file=sys.stderr)
        for line in unread():
            print(f"coordinator: {line}", file=sys.stderr)
        return 2
    if settings.verify:
        from promptfed.coordinator.resources.results.verification import verify

        return verify(settings)
    if (unfit := unfit_server()) is not None:
        print(f"coordinator: {unfit}", file=sys.stderr)
        return 2
    from promptfed.coordinator.server import serve

    return serve(settings)


def main(arguments: list[str] | None = None) -> int:
    """The exit code, as of `start`."""
    collect_seldom()
    return start(given_settings(Settings, "coordinator", arguments))


if __name__ == "__main__":
    as_process(main)
