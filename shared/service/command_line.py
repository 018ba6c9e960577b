"""The command line of a service: every setting is an option."""

from __future__ import annotations

import argparse
from typing import Any

from pydantic_settings import BaseSettings, CliSettingsSource


class SettingsHelp(argparse.RawDescriptionHelpFormatter):
    """Leaves out pydantic's remark on a default if there is none, or if the description names it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        for remark in (" (default: null)", " (default: False)", " (default: [])"):
            text = text.removesuffix(remark)
        return text.removesuffix(" (required)") if "default:" in text else text


def given_settings(
    settings: type[BaseSettings], program: str, arguments: list[str] | None = None, epilog: str | None = None
) -> dict[str, Any]:
    """The settings that ``arguments`` (default: the process's) give, by name; ``--help`` and errors end the process.

    ``epilog``: the end of the help.
    """
    source: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        settings,
        cli_prog_name=program,
        cli_implicit_flags=True,
        cli_kebab_case=True,
        formatter_class=SettingsHelp,
    )
    source.root_parser.epilog = epilog
    source.env_ignore_empty = False  # An option without a value is given, unlike an empty variable.
    return source(args=True if arguments is None else arguments)()
