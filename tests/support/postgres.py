"""A PostgreSQL server of the tests' own: in a temporary folder, on a free loopback port, gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from glob import glob
from itertools import count
from pathlib import Path

import psycopg

from tests.support.ports import free_port

USER, PASSWORD = "promptfed", "s3cret/of:the@tests"
SECONDS = 300


class NoServer(Exception):
    """There can be no server here; the text says why."""


class PostgresServer:
    """One cluster. Passwords are asked for, and text sorts as in English unless a column says otherwise.

    Without ``fsync`` a crash of the machine costs data; a crash of the server does not.
    """

    def __init__(self, fsync: bool = False) -> None:
        self._fsync = "on" if fsync else "off"
        self._bin = _binaries()
        self._as = _as_somebody_else()
        self.folder = Path(tempfile.mkdtemp(prefix="promptfed-postgres-"))
        self._numbers = count()
        self._guard = self._watch_us()
        try:
            self._make()
            self.start()
        except BaseException:
            self.remove()
            raise

    def _watch_us(self) -> subprocess.Popen[bytes]:
        """Stops the server and removes its folder once we hang up, or die, however that happens."""
        stop = self._command("pg_ctl", "-D", str(self.folder / "data"), "-w", "-m", "immediate", "stop")
        script = 'cat > /dev/null; folder="$1"; shift; cd /; "$@"; rm -rf "$folder"'
        return subprocess.Popen(
            ["sh", "-c", script, "guard", str(self.folder), *stop],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def _make(self) -> None:
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        if self._as:
            account = pwd.getpwnam(self._as)
            for path in (self.folder, secret):
                os.chown(path, account.pw_uid, account.pw_gid)
        who = ["-U", USER, "--pwfile", str(secret), "-A", "scram-sha-256", "-E", "UTF8", "--no-sync"]
        command = ["initdb", "-D", str(self.folder / "data"), *who, "--locale=C"]
        try:
            self._run(*command, "--locale-provider=icu", "--icu-locale=en-US")
        except NoServer:
            self._run(*command)  # Built without ICU, or before version 15.

    def start(self) -> None:
        """Start, on the port of before if there was one."""
        if not hasattr(self, "port"):
            self.port = free_port()
        options = f"-p {self.port} -h 127.0.0.1 -k '' -c fsync={self._fsync} -c max_connections=200"
        log = self.folder / "log"
        self._run(
            "pg_ctl", "-D", str(self.folder / "data"), "-w", "-t", str(SECONDS), "-o", options, "-l", str(log), "start"
        )

    def stop(self, mode: str = "immediate") -> None:
        """Stop; ``immediate`` is a crash: nobody is told, and the next start recovers."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-t", str(SECONDS), "-m", mode, "stop")

    def remove(self) -> None:
        """Stop and remove all of it."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(SECONDS)

    def schema(self) -> str:
        """The URL of a fresh, empty schema: to a coordinator a database, and made in no time."""
        name = f"schema{next(self._numbers)}"
        self.execute(f"CREATE SCHEMA {name}")
        return f"{self.url('postgres')}?options=-csearch_path%3D{name}"

    def database(self) -> str:
        """The URL of a fresh, empty database."""
        name = f"db{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def url(self, name: str) -> str:
        """The URL of a database."""
        password = PASSWORD.replace("/", "%2F").replace(":", "%3A").replace("@", "%40")
        return f"postgresql+psycopg://{USER}:{password}@127.0.0.1:{self.port}/{name}"

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run a statement as the superuser; its rows."""
        where = {"host": "127.0.0.1", "port": self.port, "user": USER, "password": PASSWORD, "dbname": database}
        with psycopg.connect(**where, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _command(self, program: str, *arguments: str) -> list[str]:
        command = [str(self._bin / program), *arguments]
        if self._as is None:
            return command
        account = pwd.getpwnam(self._as)
        return ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups", *command]

    def _run(self, program: str, *arguments: str) -> None:
        command = self._command(program, *arguments)
        environment = {**os.environ, "LC_ALL": "C", "HOME": str(self.folder)}
        # The server inherits what pg_ctl writes to: a pipe would stay open as long as it runs.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=self.folder, env=environment,
                timeout=2 * SECONDS, check=False,
            )  # fmt: skip
            output.seek(0)
            if done.returncode != 0:
                raise NoServer(f"{program} failed: {output.read().decode(errors='replace')[-2000:]}")


def _binaries() -> Path:
    places = [*os.environ.get("PATH", "").split(os.pathsep), *sorted(glob("/usr/lib/postgresql/*/bin"), reverse=True)]
    for place in places:
        if all(os.access(Path(place) / name, os.X_OK) for name in ("initdb", "pg_ctl")):
            return Path(place)
    raise NoServer("apt-get install postgresql; no initdb and pg_ctl on the path or under /usr/lib/postgresql")


def _as_somebody_else() -> str | None:
    """The server refuses to run as root: the account to run it as then."""
    if os.geteuid() != 0:
        return None
    if shutil.which("setpriv") is None:
        raise NoServer("the server does not run as root, and there is no setpriv to run it as somebody else")
    known = {account.pw_name for account in pwd.getpwall()}
    for name in ("postgres", "nobody"):
        if name in known:
            return name
    raise NoServer("the server does not run as root, and there is neither an account postgres nor nobody")
