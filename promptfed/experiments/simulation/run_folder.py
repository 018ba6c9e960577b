"""The folder of a simulation: the state of its coordinator and clients, and the run's identity.

If the command is interrupted, or its machine is lost, the run continues from this folder with the coordinator's state
and the same clients.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from promptfed.runtime.processes import Site
from promptfed.shared import machine
from promptfed.shared.canonical import canonical_json
from promptfed.shared.data import DataError, Source
from promptfed.shared.data.identity import DataIdentity, identity_of
from promptfed.shared.errors import BadInput, PromptfedError
from promptfed.shared.files import write_whole
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import FederationSpec

log = logging.getLogger("promptfed.simulation")

FORMAT = 1
RUN_FILE, KEY_FILE, CLIENTS, DATA = "run.json", "run.key", "clients", "data-of-clients"
NAMED = 3  # clients whose changes are told


@dataclass(frozen=True)
class RunFolder:
    """``key`` (256 bits, hex): the source of all clients' secrets. ``lasting``: the folder stays after the command.

    ``new_data``: who goes on with it accepts that the data have changed.
    """

    path: Path
    key: str = field(repr=False)
    lasting: bool
    new: bool = True
    new_data: bool = False

    def secret(self, name: str) -> str:
        """The secret of a run's client (256 bits, hex): who continues the run has the same one."""
        return hmac.new(bytes.fromhex(self.key), name.encode(), hashlib.sha256).hexdigest()

    def expect_data(self, clients: Iterable[tuple[str, Source, Mapping[str, Source]]]) -> None:
        """Refuse other data than those that the run's clients (name, source, test sets) began with.

        A run that does not know them takes these.

        Raises:
            PromptfedError: they differ, and ``new_data`` does not accept it.
        """
        if not self.lasting:
            return
        found, changed, unknown = {}, [], 0
        try:
            for client, source, tests in clients:
                file = self.path / DATA / f"{client}.json"
                now = identity_of(source, tests)
                before = DataIdentity.model_validate_json(file.read_bytes()) if file.exists() else None
                if before != now:
                    found[file] = now
                    unknown += before is None
                if before is not None and (change := before.changes(now)):
                    changed.append(f"client {client}: {change}")
            if changed and not self.new_data:
                more = f"; and {len(changed) - NAMED} clients more" if len(changed) > NAMED else ""
                text = f"the data have changed since the run in {self.path} began: {'; '.join(changed[:NAMED])}{more}"
                raise BadInput(f"{text}; give --new-data to go on with them, or a new folder")
            if unknown and not self.new:
                log.warning("the run in %s did not know its data: it takes those of today", self.path)
            for file, now in found.items():
                file.parent.mkdir(mode=0o700, exist_ok=True)
                write_whole(file, now.model_dump_json().encode(), mode=0o600)
        except DataError:
            raise
        except (OSError, ValueError) as error:
            raise BadInput(f"the data of the run in {self.path}: {why(error)}") from None

    def forget_clients(self) -> None:
        """Remove the clients' state, for a federation that never started."""
        shutil.rmtree(self.path / CLIENTS, ignore_errors=True)


def identity(spec: FederationSpec, sites: Sequence[Site]) -> str:
    """The hash of everything that must be the same to continue a run."""
    parts = [FORMAT, spec.model_dump(mode="json"), [asdict(site) for site in sites]]
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


@contextmanager
def run_folder(
    storage: Path | None, run: str, option: str = "--storage", new_data: bool = False
) -> Iterator[RunFolder]:
    """The folder ``storage``, which is new or belongs to ``run``; if None, a temporary one for the block.

    A new folder in which a refused command has left nothing belongs to no run: the corrected command can have it.

    Raises:
        PromptfedError: it cannot be used, belongs to something else, or another command uses it.
    """
    if storage is None:
        with tempfile.TemporaryDirectory(prefix="promptfed-", ignore_cleanup_errors=True) as temporary:
            yield RunFolder(Path(temporary), secrets.token_hex(32), lasting=False)
        return
    path = storage.expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = _claim(path, run, option)
        key = (path / KEY_FILE).read_text().strip()
        lock = (path / RUN_FILE).open("r+")
    except OSError as error:
        raise BadInput(f"cannot use {option} {storage}: {why(error)}") from None
    with lock:
        if not machine.try_lock(lock.fileno()):
            text = f"another command runs with {option} {storage}"
            raise BadInput(f"{text}: wait for its end, or give another folder")
        try:
            yield RunFolder(path, key, True, new, new_data)
        except PromptfedError:
            if new and {entry.name for entry in path.iterdir()} - {DATA} == {RUN_FILE, KEY_FILE}:
                shutil.rmtree(path / DATA, ignore_errors=True)
                (path / RUN_FILE).unlink()
            raise


def _claim(path: Path, run: str, option: str) -> bool:
    """Make ``path`` the folder of ``run``; whether it was nobody's before."""
    about = path / RUN_FILE
    if about.exists():
        if _run_in(about, option) != run:
            text = f"{option} {path} holds another run (another spec, or other clients)"
            raise BadInput(f"{text}: give a new folder, or that run's file")
        return False
    if any(entry.name != KEY_FILE for entry in path.iterdir()):
        raise BadInput(f"{option} {path} is not empty, and holds no run: give a new folder")
    write_whole(path / KEY_FILE, (secrets.token_hex(32) + "\n").encode(), mode=0o600)
    write_whole(about, (json.dumps({"format": FORMAT, "run": run}) + "\n").encode())
    return True


def _run_in(about: Path, option: str) -> str | None:
    try:
        said = json.loads(about.read_text())
        return str(said["run"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadInput(f"{about} cannot be read: give {option} a new folder") from None
