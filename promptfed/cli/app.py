"""The application that commands register with: `app` and its groups.

A command is a function with typed options, in a module of `promptfed.cli.commands`. A parameter annotated with
`Annotated[T, Made(make)]` is no option itself: ``make`` has the options, and the command receives what it returns.
A dataclass of options is such a ``make`` too. What is a context manager is entered for the time of the command.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, get_args

import typer
from pydantic import ValidationError
from rich.markup import escape
from typer.core import TyperGroup

from promptfed.client_service.exits import ClientError
from promptfed.console.output import commit, messages
from promptfed.shared import errors
from promptfed.shared.plain_text import plain
from promptfed.shared.service.reasons import Exit, of_surroundings, offence
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.versions import RELEASE, VERSION

Section = Literal["Try and simulate", "Operate federations", "Take part with own data", "Use a result"]
SECTIONS: tuple[str, ...] = get_args(Section)
CODES: dict[type[errors.PromptfedError], Exit] = {
    errors.BadInput: Exit.BAD_INPUT,
    errors.EndedBadly: Exit.FEDERATION_ENDED_BADLY,
    errors.Failed: Exit.FAILED,
    errors.Misused: Exit.USAGE,
    errors.NotAllowed: Exit.NOT_ALLOWED,
    errors.Refused: Exit.REFUSED,
    errors.Unreachable: Exit.UNREACHABLE,
}


@dataclass(frozen=True)
class Made:
    """Marks a parameter that ``make`` makes of its own parameters, which are options of the command."""

    make: Callable[..., Any]


class SectionedGroup(TyperGroup):
    """A group whose help lists its commands by section, each with its whole first paragraph."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an option that cannot be read is refused in the words of specs."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError):
                error.message = "; ".join(map(offence, error.__cause__.errors(include_url=False)))
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the sections, in the order of `SECTIONS`."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            paragraph = (command.help or "").partition("\n\n")[0]
            section = getattr(command, "rich_help_panel", None) or "Commands"
            rows.setdefault(section, []).append((name, " ".join(paragraph.split())))
        for section in sorted(rows, key=lambda title: SECTIONS.index(title) if title in SECTIONS else len(SECTIONS)):
            with formatter.section(section):
                formatter.write_dl(sorted(rows[section]))


class Commands(typer.Typer):
    """The application, or a group in it. Every command reports errors in the same way."""

    def __init__(self, **settings: Any):
        super().__init__(cls=SectionedGroup, rich_markup_mode=None, **{"no_args_is_help": True} | settings)

    def add(self, name: str | None = None, section: Section | None = None) -> Callable[[Callable[..., None]], Any]:
        """Decorates a command; its docstring is its help. ``name``: default: the function's."""

        def decorate(function: Callable[..., None]) -> Callable[..., None]:
            self.command(name, rich_help_panel=section)(with_options(function))
            return function

        return decorate

    def group(self, name: str, help: str, section: Section, **settings: Any) -> Commands:
        """A new group of commands; ``settings`` are typer's."""
        made = Commands(help=help, **settings)
        self.add_typer(made, name=name, rich_help_panel=section)
        return made


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` as typer takes it: parameters that are `Made` stand there as the options they are made of."""
    makers: dict[str, Callable[..., Any]] = {}
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    options: dict[str, inspect.Parameter] = {context.name: context}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        made = [mark for mark in getattr(parameter.annotation, "__metadata__", ()) if isinstance(mark, Made)]
        if made:
            makers[parameter.name] = made[0].make
            options |= inspect.signature(made[0].make, eval_str=True).parameters
        else:
            options[parameter.name] = parameter

    @wraps(function)
    def command(**given: Any) -> None:
        with reporting_errors(), ExitStack() as stack:
            _expect_filled(given.get("context"), given)
            for name, make in makers.items():
                value = make(**{option: given[option] for option in inspect.signature(make).parameters})
                given[name] = stack.enter_context(value) if isinstance(value, AbstractContextManager) else value
            function(**{name: given[name] for name in inspect.signature(function).parameters})

    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in options.values()]
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return command


def written(context: typer.Context) -> Set[str]:
    """The names of the parameters that the command line gives."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _expect_filled(context: typer.Context | None, given: Mapping[str, Any]) -> None:
    """Raise PromptfedError for an empty text on the command line: it would pass for an option that is not given."""
    if context is None:  # called as a function
        return
    spelt = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for name in sorted(written(context)):
        texts = given[name] if isinstance(given[name], list) else [given[name]]
        if "" in texts:
            raise errors.Misused(f"{spelt[name]} is empty: give a value, or leave it out")


def exit_code(error: errors.PromptfedError | ClientError) -> Exit:
    """What the command ends with after ``error``."""
    if isinstance(error, ClientError):
        return error.exit
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), Exit.FAILED)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Turn an expected error, or one of the surroundings, into one line on stderr and its code, and Ctrl-C into 130."""
    try:
        yield
    except (errors.PromptfedError, ClientError) as error:
        text = plain(errors.offences(error.errors) if isinstance(error, SpecError) else error, keep="\n")
        messages.print(f"promptfed: {escape(text)}", soft_wrap=True, highlight=False)
        raise typer.Exit(exit_code(error)) from None
    except Exception as error:
        reason = of_surroundings(error)
        if reason is None:
            raise
        messages.print(f"promptfed: {escape(plain(reason))}", soft_wrap=True, highlight=False)
        raise typer.Exit(Exit.BAD_INPUT) from None
    except KeyboardInterrupt:
        messages.print("promptfed: interrupted")
        raise typer.Exit(Exit.INTERRUPTED) from None


def show_version(asked: bool) -> None:
    """Print the version, the commit if it is known, and the protocol's range, and end, if ``asked``."""
    if asked:
        revision = commit()
        typer.echo(f"promptfed {RELEASE}{f' ({revision})' if revision else ''}, protocol {VERSION}")
        raise typer.Exit


app = Commands()
