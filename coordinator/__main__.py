"""``python -m promptfed.coordinator``: the options of ``Settings``, or PROMPTFED_COORDINATOR_* variables."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pydantic import ValidationError

from promptfed.coordinator.settings import DEFAULT_PORT, Settings
from promptfed.shared.leaving import leave


def parser() -> argparse.ArgumentParser:
    """The options. One that is not given leaves the variable, or the default."""
    found = argparse.ArgumentParser(
        prog="coordinator", description=__doc__, argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    add = found.add_argument
    add("--data-dir", type=Path, help="database, blobs, operator token (default: coordinator-data)")
    add(
        "--database-url",
        help="postgresql+psycopg://USER:PASSWORD@HOST/NAME (default, or where empty: SQLite in the data folder)",
    )
    add("--database-url-file", type=Path, help="a file that holds this URL: options can be seen by others")
    add("--database-wait-seconds", type=float, help="how long to wait for the database at the start (default: 30)")
    add("--host", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, help=f"port to listen on, 0 for any free one (default: {DEFAULT_PORT})")
    add("--port-file", type=Path, help="write the base URL here once the coordinator answers")
    add("--allow-plain-http", action="store_true", help="listen without TLS on an address that others can reach")
    add("--tls-cert", type=Path, help="PEM certificate chain")
    add("--tls-key", type=Path, help="PEM private key")
    add("--max-uploads", type=int, help="uploads received at once (default: 8)")
    add("--upload-wait-seconds", type=float, help="how long more uploads wait their turn before 503 (default: 20)")
    add(
        "--auth-failures-per-minute",
        type=int,
        help="wrong tokens that an address may send before it has to wait (default: 60)",
    )
    add("--token-hours", type=float, help="how long an enrolment token is good (default: 168)")
    add("--bootstrap", type=Path, help="spec (YAML) of a federation to create if it is absent")
    add("--enrolment-token-file", type=Path, help="where --bootstrap writes an enrolment token")
    add("--enrolment-token-mode", type=lambda text: int(text, 8), help="octal mode of that file (default: 600)")
    add("--log-level", choices=["debug", "info", "warning", "error"], help="default: info")
    return found


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0; 2 where it cannot start; 3 where the database did not answer in time."""
    options = vars(parser().parse_args(arguments))
    if "database_url" in options or "database_url_file" in options:
        # One of them given here is the answer, whichever the environment has.
        options = {"database_url": None, "database_url_file": None} | options
    try:
        settings = Settings(**options)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_context=False, include_input=False):
            place = "".join(f"--{str(part).replace('_', '-')}: " for part in item["loc"])
            print(f"coordinator: {place}{item['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        return 2
    from promptfed.coordinator.server import serve

    return serve(settings)


if __name__ == "__main__":
    leave(main())
