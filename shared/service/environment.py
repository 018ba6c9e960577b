"""Environment variables of promptfed's: those that nobody reads, and what they were probably meant to be."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

COORDINATOR, CLIENT = "PROMPTFED_COORDINATOR_", "PROMPTFED_CLIENT_"  # prefixes of the services' settings
SINGLE = (
    # Of the command.
    *("ALLOW_PLAIN_HTTP", "BACKBONE_FILE", "CA_FILE", "COORDINATOR", "OPERATOR_TOKEN", "PROXY", "SIGNING_KEY"),
    *("COMMIT", "COORDINATOR_TARGET", "EXTRA_INDEX_URL", "PORT", "RUN", "STORAGE"),  # builds and recipes
    *("FAULT", "PICTURES"),  # tests
)
"""Variables that are no setting of a service, without ``PROMPTFED_``."""

LINK = re.compile(r"PROMPTFED(_\w+)?_(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""Names that Kubernetes makes of a service's name in each container beside it; for ``_PORT`` see `is_of_a_link`."""


def is_of_a_link(value: object) -> bool:
    """Whether ``value`` is a port as Kubernetes writes it, ``tcp://10.0.0.1:8080``, which no setting has."""
    return isinstance(value, str) and value.startswith(("tcp://", "udp://", "sctp://"))


def unread_variables(settings: Mapping[str, Iterable[str]]) -> list[str]:
    """A line for each variable of the environment that begins with ``PROMPTFED_`` and that nothing reads.

    ``settings`` are the fields that this process knows, by prefix; variables of the other services are not judged.
    """
    read_names = {f"{prefix}{field}".upper() for prefix, fields in settings.items() for field in fields}
    read_names |= {f"PROMPTFED_{name}" for name in SINGLE}
    others = tuple({COORDINATOR, CLIENT} - settings.keys())
    lines = []
    for variable, value in sorted(os.environ.items()):
        name = variable.upper()
        if not name.startswith("PROMPTFED_") or name.startswith(others):
            continue
        if is_of_a_link(value):
            lines += [f"{variable}={value} is of a link to a service, not a setting: it is not read"] * (
                name in read_names
            )
        elif name not in read_names and not LINK.fullmatch(name):
            near = get_close_matches(name, sorted(read_names), n=1)
            lines.append(f"nothing reads the variable {variable}" + (f": did you mean {near[0]}?" if near else ""))
    return lines


def not_structured(error: Exception, prefix: str) -> str:
    """A line for a variable whose setting has several values, of pydantic's error."""
    field = re.findall('"(\\w+)"', str(error))[:1]
    return f'{prefix}{"".join(field).upper()} is no list: write JSON, as in ["one", "two"]'
