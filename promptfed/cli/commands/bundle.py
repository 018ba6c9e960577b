"""`promptfed bundle`: an installation for a machine without network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import Json
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import tell


@app.add(section="Operate federations")
def bundle(
    wheel: Annotated[Path, typer.Option(help="promptfed's wheel, of the version that runs here")],
    out: Annotated[Path, typer.Option(help="a new tar archive")] = Path("promptfed-offline.tar"),
    backbone: Annotated[
        tuple[str, str] | None, typer.Option(metavar="MODEL PRETRAINED", help="names of the weights to pack")
    ] = None,
    backbone_file: Annotated[Path | None, typer.Option(help="the weights to pack: the file of --backbone")] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(help="a package that the other machine has, such as a torch of its own; repeatable"),
    ] = None,
    key: Annotated[Path | None, typer.Option(help="SSH key that signs the list of files")] = None,
    as_json: Json = False,
) -> None:
    """Pack wheels, weights and an installer for machines of this system, processor and Python that have no network.

    The wheels have the versions that are installed here. pip collects them; its settings apply.
    """
    from promptfed.runtime.bundle import write_bundle

    if (backbone is None) != (backbone_file is None):
        raise CommandError("--backbone and --backbone-file belong together: give both", Exit.BAD_INPUT)
    if out.exists():
        raise CommandError(f"{out} exists: move it away, or give another --out", Exit.BAD_INPUT)
    wheels = write_bundle(out, wheel, set(without or ()), backbone, backbone_file, key)
    signed = "signed" if key is not None else "not signed: give --key FILE"
    tell(as_json, {"file": str(out), "wheels": wheels, "signed": key is not None}, f"{out}: {wheels} wheels, {signed}")
