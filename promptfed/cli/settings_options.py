"""The settings of a service as options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Set
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from promptfed.cli.common import _written


def options_of(settings: type[BaseSettings], without: Set[str] = frozenset()) -> Callable[..., dict[str, Any]]:
    """A maker (see `promptfed.cli.app.Made`) of the settings that the command line gives, by their names.

    ``without``: names of settings that are no options of the command.

    What it does not give comes from the environment or is a default, and pydantic checks all of it.
    """

    def make(context: typer.Context, **values: Any) -> dict[str, Any]:
        return {name: values[name] for name in _written(context) & values.keys()}

    options = [_option(name, field) for name, field in settings.model_fields.items() if name not in without]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    make.__signature__ = inspect.Signature([context, *options])  # type: ignore[attr-defined]
    return make


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    kinds = (field.annotation, *get_args(field.annotation))
    kind: Any = next((kind for kind in (bool, list[str], Path, float, int) if kind in kinds), str)
    if get_origin(field.annotation) is Literal:
        kind = field.annotation
    if name.endswith("_mode"):
        kind = str  # octal
    default = False if kind is bool else None
    option = typer.Option(help=_help(field), show_default=False)
    annotation: Any = Annotated[bool, option] if kind is bool else Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    if field.is_required():
        return text if "default:" in text else f"{text} (required)"
    default = field.get_default(call_default_factory=True)
    if default in (None, False, []) or "default" in text:
        return text
    shown = "yes" if default is True else f"{default:g}" if isinstance(default, float) else default
    return f"{text} (default: {shown})"
