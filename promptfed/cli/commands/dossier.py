"""`promptfed dossier`: a draft for auditors, from the record of a federation or from a site's own log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from promptfed.cli.app import app
from promptfed.cli.common import AskedLater, Json
from promptfed.dossier.facts import facts_of, facts_of_site, read_record
from promptfed.dossier.kinds import Kind
from promptfed.dossier.rendering import as_html, as_markdown
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import write_file
from promptfed.sdk.output import print_json, say


@app.add(section="Use a result")
def dossier(
    asked: AskedLater,
    federation: Annotated[str | None, typer.Argument(help="its name or id")] = None,
    kind: Annotated[Kind, typer.Option(help="dpia: GDPR, Art. 35; ai-act-annex-iv; hipaa: 45 CFR Part 164")] = "dpia",
    site: Annotated[
        Path | None, typer.Option(help="a client's --state-dir: from its own log, instead of a federation's record")
    ] = None,
    format: Annotated[Literal["md", "html"], typer.Option(help="Markdown, or one HTML page")] = "md",
    out: Annotated[Path | None, typer.Option(help="write it here; default: print it")] = None,
    as_json: Json = False,
) -> None:
    """Write a draft in which every figure comes from the record, with its source; blanks are marked."""
    if (federation is None) == (site is None):
        raise CommandError("name a federation, or give --site STATE_DIR", Exit.USAGE)
    if site is not None:
        facts, title = facts_of_site(site), f"site log in {site}"
    else:
        assert federation is not None
        with asked.open() as api:
            facts = facts_of(read_record(api, federation))
        title = str(facts["name"].value)
    text = (as_markdown if format == "md" else as_html)(kind, facts, title)
    if out is not None:
        write_file(out, text.encode())
    if as_json:
        print_json({key: {"value": fact.value, "source": fact.source} for key, fact in facts.items()})
    elif out is not None:
        say(f"Wrote {out}: a draft, with blanks to fill.")
    else:
        typer.echo(text)
