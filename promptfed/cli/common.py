"""Options that several commands take, and the question before something that cannot be undone."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from rich.markup import escape

from promptfed.cli.app import Made, written
from promptfed.console.output import messages
from promptfed.sdk.client import DEFAULT_URL, TOKEN_VARIABLE, URL_VARIABLE, Coordinator, open_coordinator
from promptfed.shared.errors import BadInput
from promptfed.shared.plain_text import plain
from promptfed.shared.service.reasons import Exit

KEY_VARIABLE = "PROMPTFED_SIGNING_KEY"

Federation = Annotated[str, typer.Argument(help="its name or id")]
Client = Annotated[str, typer.Argument(help="its name or id")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON value last, for programs")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask for confirmation")]
Round = Annotated[str, typer.Option(help="a round's number, or latest")]
RunFilePath = Annotated[Path, typer.Argument(help="run file: a federation's spec and its clients, in YAML")]
Trainers = Annotated[int | None, typer.Option(min=1, help="trainers; default: as many as the run file has")]
NewData = Annotated[bool, typer.Option(help="go on although the data have changed since the run began")]
Pool = Annotated[int, typer.Option(min=1, help="clients that compute at once")]
SimulationPool = Annotated[
    int | None,
    typer.Option(min=1, help="clients that compute at once; default: one for each core, or 1 on a GPU or with threads"),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N")]
Engine = Annotated[Literal["ray"] | None, typer.Option(help="ray: on a Ray cluster (promptfed[ray])")]
RayAddress = Annotated[
    str | None, typer.Option(help="--engine ray: auto or HOST:PORT of a cluster; default: start Ray here")
]
Url = Annotated[
    str | None,
    typer.Option(
        "--coordinator", help=f"its URL, or those of several by commas; default: ${URL_VARIABLE}, else {DEFAULT_URL}"
    ),
]
TokenFile = Annotated[Path | None, typer.Option(help=f"file with the operator token; default: ${TOKEN_VARIABLE}")]
Key = Annotated[
    str | None,
    typer.Option(
        envvar=KEY_VARIABLE, help="the coordinator's public key: refuse an export that is not as it has signed it"
    ),
]
AllowedNames = Annotated[
    list[str] | None,
    typer.Option("--allow-backbone", help="a model outside open_clip's registry that may be loaded; repeatable"),
]
BackboneFile = Annotated[
    Path | None,
    typer.Option(help="file of the backbone's weights, or a folder with one, that is read instead of a download"),
]
Written = Annotated[Set[str], Made(written)]  # names of the parameters that the command line gives


@dataclass(frozen=True)
class Access:
    """The coordinator that a command may ask, and the operator that it asks as."""

    coordinator: Url = None
    token_file: TokenFile = None

    def open(self) -> Coordinator:
        """The coordinator. Raises PromptfedError without an operator token."""
        return open_coordinator(self.coordinator, self.token_file)


def _opened(coordinator: Url = None, token_file: TokenFile = None) -> Coordinator:
    return Access(coordinator, token_file).open()


def _opened_by_anybody(coordinator: Url = None, token_file: TokenFile = None) -> Coordinator:
    return open_coordinator(coordinator, token_file, public=True)


def use_backbone_file(backbone_file: Path | None) -> None:
    """Name the file in the environment: clients that the command starts read it there, as do backbones opened here."""
    if backbone_file is not None:
        for variable in ("PROMPTFED_BACKBONE_FILE", "PROMPTFED_CLIENT_BACKBONE_FILE"):
            os.environ[variable] = str(backbone_file.expanduser().absolute())


def _backbone_allowed(allow_backbone: AllowedNames = None, backbone_file: BackboneFile = None) -> list[str]:
    use_backbone_file(backbone_file)
    return allow_backbone or []


def _class_names(
    classes: Annotated[
        str | None,
        typer.Option(help="class names by commas, to choose among; default: those that the federation names"),
    ] = None,
    data: Annotated[str | None, typer.Option(help="data URI whose class names are taken instead")] = None,
) -> tuple[str, ...] | None:
    if classes is None and data is None:
        return None
    from promptfed.export.adapted_model import given_class_names

    return given_class_names(classes, data)


AskedLater = Annotated[Access, Made(Access)]  # for commands that may need no coordinator
Api = Annotated[Coordinator, Made(_opened)]
PublicApi = Annotated[Coordinator, Made(_opened_by_anybody)]  # for what needs no token
AllowBackbone = Annotated[list[str], Made(_backbone_allowed)]
ClassNames = Annotated[tuple[str, ...] | None, Made(_class_names)]


def refuse(unused: Set[str], reason: str, prefix: str = "") -> None:
    """Refuse options, given by the names of their parameters, that would change nothing.

    Raises:
        PromptfedError: there are any.
    """
    if unused:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(unused))
        raise BadInput(f"{prefix}{options}: {reason}")


def at_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


def confirm(consequence: str, yes: bool) -> None:
    """Ask at the terminal whether to go on with something that cannot be undone; ``yes`` answers beforehand.

    Raises:
        PromptfedError: there is no terminal to ask at.
        typer.Exit: the answer is no, with exit code 13.
    """
    if yes:
        return
    if not at_terminal():
        text = f"{consequence} Nobody is at a terminal to be asked: give --yes to confirm"
        raise BadInput(text)
    messages.print(f"{escape(plain(consequence))} Go on? [y/N] ", end="", highlight=False, soft_wrap=True, markup=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        messages.print("Nothing was done.", highlight=False)
        raise typer.Exit(Exit.DECLINED)


def options_of(
    settings: type[BaseSettings], without: Set[str] = frozenset(), required: bool = True
) -> Callable[..., dict[str, Any]]:
    """A maker (see `promptfed.cli.app.Made`) of the settings that the command line gives, by their names.

    ``without``: names of settings that are no options of the command. ``required``: whether help says which have no
    default.

    What it does not give comes from the environment or is a default, and pydantic checks all of it.
    """

    def make(context: typer.Context, **values: Any) -> dict[str, Any]:
        return {name: values[name] for name in written(context) & values.keys()}

    fields = {name: field for name, field in settings.model_fields.items() if name not in without}
    options = [_option(name, field, required) for name, field in fields.items()]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    make.__signature__ = inspect.Signature([context, *options])  # type: ignore[attr-defined]
    return make


def _option(name: str, field: FieldInfo, required: bool) -> inspect.Parameter:
    kinds = (field.annotation, *get_args(field.annotation))
    kind: Any = next((kind for kind in (bool, list[str], Path, float, int) if kind in kinds), str)
    if get_origin(field.annotation) is Literal:
        kind = field.annotation
    if name.endswith("_mode"):
        kind = str  # octal
    default = False if kind is bool else None
    option = typer.Option(help=_help(field, required), show_default=False)
    annotation: Any = Annotated[bool, option] if kind is bool else Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _help(field: FieldInfo, required: bool) -> str:
    text = field.description or ""
    if field.is_required():
        return text if "default:" in text or not required else f"{text} (required)"
    default = field.get_default(call_default_factory=True)
    if default in (None, False, []) or "default" in text:
        return text
    shown = "yes" if default is True else f"{default:g}" if isinstance(default, float) else default
    return f"{text} (default: {shown})"
