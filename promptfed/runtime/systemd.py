"""Units of systemd that run a coordinator or a client."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from promptfed.sdk.errors import CommandError, Exit

STATE = {"coordinator": "--data-dir", "client": "--state-dir"}
# Errors of a client that starting it again does not mend.
FINAL = (
    Exit.USAGE, Exit.BAD_INPUT, Exit.NOT_ALLOWED, Exit.REFUSED, Exit.NAME_TAKEN, Exit.BACKBONE, Exit.WITHDRAWN,
    Exit.STATE, Exit.PROTOCOL, Exit.DECLINED, Exit.POLICY, Exit.LEDGER,
)  # fmt: skip
UNIT = """\
[Unit]
Description=promptfed {service}
Wants=network-online.target
After=network-online.target

[Service]
{account}WorkingDirectory={folder}
StateDirectory={name}
StateDirectoryMode=0700
ExecStart={command}
Restart=on-failure
RestartSec=5
{final}LimitNOFILE=65536
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=full

[Install]
WantedBy={wanted_by}
"""


@dataclass(frozen=True)
class Unit:
    """A service with the options of its command; ``account`` is None for one of the user who installs it."""

    service: str
    options: Sequence[str]
    name: str
    account: str | None

    def __str__(self) -> str:
        """The unit's file. State is kept where systemd makes a folder for it, unless the options say where."""
        command = [*map(quote, [sys.executable, "-m", "promptfed", self.service, *self.options])]
        if not any(option.partition("=")[0] == STATE[self.service] for option in self.options):
            command.append(f"{STATE[self.service]}=%S/{self.name}")
        final = " ".join(str(int(code)) for code in FINAL)
        return UNIT.format(
            service=self.service,
            account=f"User={self.account}\n" if self.account else "",
            folder=str(Path.cwd()).replace("%", "%%"),
            name=self.name,
            command=" ".join(command),
            final=f"RestartPreventExitStatus={final}\n" if self.service == "client" else "",
            wanted_by="multi-user.target" if self.account else "default.target",
        )

    def write(self, folder: Path | None) -> Path:
        """Write the file into ``folder``, by default where systemd looks, and return its path.

        Raises:
            CommandError: the name is no name of a unit, another file is there, or it cannot be written.
        """
        for option, name in (("--name", self.name), ("--account", self.account)):
            if name is not None and not re.fullmatch(r"[\w.-]+", name, re.ASCII):
                raise CommandError(
                    f"{option} {name!r}: use letters, digits, hyphens, dots and underscores", Exit.BAD_INPUT
                )
        where = folder if folder is not None else self._folder()
        file = where / f"{self.name}.service"
        text = str(self)
        if file.exists() and file.read_text() != text:
            raise CommandError(f"{file} exists and is another one: remove it, or give --name", Exit.BAD_INPUT)
        try:
            where.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        except OSError as error:
            advice = "run it as root, or give --user or --folder"
            raise CommandError(f"{file} cannot be written ({error.strerror}): {advice}", Exit.BAD_INPUT) from None
        return file

    def _folder(self) -> Path:
        if self.account:
            return Path("/etc/systemd/system")
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"

    def starting(self) -> list[list[str]]:
        """The commands that start it, now and with the machine."""
        systemctl = ["systemctl"] if self.account else ["systemctl", "--user"]
        return [[*systemctl, "daemon-reload"], [*systemctl, "enable", "--now", self.name]]


def quote(argument: str) -> str:
    """An argument as ExecStart takes it: ``%`` and ``$`` mean themselves."""
    escaped = (
        argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$").replace("\n", "\\n")
    )
    return (
        f'"{escaped}"'
        if not argument or any(letter.isspace() or letter in "\"';\\" for letter in argument)
        else escaped
    )


def run(command: list[str]) -> None:
    """Run ``systemctl``. Raises CommandError with what it says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
    except FileNotFoundError:
        raise CommandError(f"{command[0]} is not installed: this system has no systemd", Exit.BAD_INPUT) from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise CommandError(f"{' '.join(command)}: {said[-1] if said else 'failed'}", Exit.FAILED)
