"""`promptfed policy`: a site's policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import Json
from promptfed.console.output import print_json, say

policy_group = app.group("policy", "Write and check a site's policy.", "Take part with own data")


@policy_group.add()
def example() -> None:
    """Print a policy with comments, to begin with."""
    from promptfed.client_service.privacy.policy import EXAMPLE

    typer.echo(EXAMPLE, nl=False)


@policy_group.add()
def check(policy: Annotated[Path, typer.Argument(help="a policy file")], as_json: Json = False) -> None:
    """Check that a policy can be read, and show what it says.

    `promptfed doctor --policy` compares it with a federation.
    """
    from promptfed.client_service.privacy.policy import read_policy

    rules, digest = read_policy(policy)
    if as_json:
        print_json({"sha256": digest, "policy": rules.model_dump(mode="json")})
        return
    say(f"{policy} is understood (sha256 {digest}).")
    for section, values in rules.model_dump(mode="json", exclude_none=True).items():
        say(f"  {section}: {values}")
