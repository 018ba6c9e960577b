"""The state folder of a client: its secret, its private tensors, and an update until it is settled.

Layout of the state folder (mode 0700):
    lock                     held while a client runs
    identity.json            name, role, secret, federation and client id (mode 0600)
    data.json                the classes, numbers and digests of the data that the client has started with
    enrolment.json           what the coordinator said of the federation; coordinators.json: its addresses
    committed.safetensors    private tensors after the last update that the coordinator accepted
    pending/                 an update and the private tensors that belong to it, written before the first sending
    answered/                the update that was accepted last, in case the coordinator's disk loses it
    serving.json             the last evaluation's task, and serving-*.safetensors, the payload that came with it
    last-refusal.json        the last refusal, for people
    consent.json             what the owner agreed to, answers.json what was sent since; withdrawn: it was withdrawn
    trained-images.txt       digests of the images that were trained on (`trained_images`)
    site-log.*               what was asked, agreed, computed and sent (`site_log`)

Every other file appears by rename after fsync. Accepting an update is one rename (pending's private tensors over the
committed ones), so that a kill at any instant leaves either the state before or the state after.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.bodies import Body, sha256_of
from promptfed.client_service.state.durable_files import Disk
from promptfed.shared import machine
from promptfed.shared.messages import EnrolmentInfo, Role, TaskConfig
from promptfed.shared.service.reasons import why
from promptfed.shared.tensors import TensorError, Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode

ENROLMENT = "enrolment.json"
DATA = "data.json"
PENDING = "pending"
ANSWERED = "answered"
COMMITTED = "committed.safetensors"
PAYLOADS = "payloads"
FORM = 1  # of the files here; a folder of promptfed before 0.4.0 says none
READS_OLDER = "7368013d"  # the last commit that reads folders of promptfed before 0.4.0
LARGE = 16 << 20  # bytes from which a payload is mapped and not read
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)
Kept = TypeVar("Kept")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)  # making one takes milliseconds: it builds a schema


@dataclass(frozen=True)
class Identity:
    """Who this client is to the coordinator. ``secret`` (256 bits, hex) is its bearer token.

    ``form``: of the files in its state folder; 0: of promptfed before 0.4.0.
    """

    name: str
    role: Role
    secret: str
    federation_id: str | None = None
    client_id: str | None = None
    form: int = 0


@dataclass(frozen=True)
class TensorOrigin:
    """Where private tensors come from: the task that made them, and the peers for which they were prepared."""

    task_id: str | None = None
    round: int = 0
    phase: str = ""
    peers: str | None = None
    privacy: str = "none"  # sample: trained under differential privacy


@dataclass(frozen=True)
class Pending:
    """An update that is ready to be sent. It is sent with the same bytes every time."""

    task_id: str
    round: int
    phase: str
    update: Body


@dataclass(frozen=True)
class Serving:
    """The last evaluation's payload, from which predictions are made."""

    round: int
    phase: str
    config: TaskConfig
    payload: bytes | Path


class PrivateState:
    """The state folder of one client, locked against a second process.

    An ``ephemeral`` one is for a client that is not restarted after a crash: neither locked nor synced, so that one
    process can hold a thousand of them. With ``synced`` another process can go on all the same: it is ``resumable``.
    Where none can, notes stay in memory.

    Raises:
        ClientError: STATE where the folder is in use, unusable or damaged.
    """

    def __init__(self, folder: Path, ephemeral: bool = False, synced: bool = False):
        self.folder = folder
        self.resumable = synced or not ephemeral
        self._disk = Disk(synced=self.resumable)
        self._notes: dict[str, bytes] | None = None if self.resumable else {}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)  # also where it was there before: nobody else reads a client's private state
            self._lock = (
                None if ephemeral else os.open(folder / "lock", os.O_RDWR | os.O_CREAT | machine.O_CLOEXEC, 0o600)
            )
        except OSError as error:
            raise ClientError(Exit.STATE, f"the state folder {folder} cannot be used: {why(error)}") from None
        if self._lock is not None:
            self._take_lock(self._lock)
        self._recover()

    def _take_lock(self, handle: int) -> None:
        if not machine.try_lock(handle):
            os.close(handle)
            text = f"the state folder {self.folder} is in use by another client process"
            raise ClientError(Exit.STATE, f"{text}: give each client its own --state-dir") from None

    @property
    def ephemeral(self) -> bool:
        """Whether this client is not restarted after a crash."""
        return self._lock is None

    def close(self) -> None:
        """Release the folder for another process."""
        if self._lock is not None:
            os.close(self._lock)

    # Identity

    def identity(self, name: str, role: Role, secret: str | None = None) -> Identity:
        """The identity that the folder holds, or a new one (with ``secret``), on disk before it is returned.

        Raises:
            ClientError: STATE where the folder belongs to another name or role, or is of another version's form.
        """
        identity = self.read_as("identity.json", Identity)
        if identity is None:
            return self._write_identity(Identity(name, role, secret or secrets.token_hex(32), form=FORM))
        if identity.form != FORM:
            text = (
                f"the state folder {self.folder} was written by another version of promptfed, which this one does not"
            )
            older = f"go on with commit {READS_OLDER}" if identity.form < FORM else "go on with that version"
            raise ClientError(Exit.STATE, f"{text} read: {older}, or give another --state-dir and enrol anew")
        if (identity.name, identity.role) != (name, role):
            text = f"the state folder {self.folder} belongs to the {identity.role} {identity.name!r}"
            raise ClientError(Exit.STATE, f"{text}, not to the {role} {name!r}: give another --state-dir")
        return identity

    def bind(self, identity: Identity, federation_id: str, client_id: str | None = None) -> Identity:
        """Note the federation, and the client id once enrolled.

        Raises:
            ClientError: STATE where the folder belongs to another federation.
        """
        if identity.federation_id not in (None, federation_id):
            bound_to = identity.federation_id
            text = f"the state folder {self.folder} belongs to federation {bound_to}, not to {federation_id}"
            raise ClientError(Exit.STATE, f"{text}: give another --state-dir")
        bound = replace(identity, federation_id=federation_id, client_id=client_id or identity.client_id)
        return bound if bound == identity else self._write_identity(bound)

    def _write_identity(self, identity: Identity) -> Identity:
        self.write_as("identity.json", identity)
        return identity

    def enrolment(self) -> EnrolmentInfo | None:
        """What the coordinator said when the client enrolled: a restart may come with a token that has expired."""
        return self.read_as(ENROLMENT, EnrolmentInfo)

    # Private tensors

    def committed(self, name: str = COMMITTED) -> tuple[Tensors, TensorOrigin]:
        """The private tensors from which training starts, or those kept as ``name``; none if no file."""
        path = self.folder / name
        if not path.exists():
            return {}, TensorOrigin()
        try:
            tensors, metadata = decode(path.read_bytes())
            return tensors, TensorOrigin(**metadata)  # type: ignore[arg-type]  # TypeError where it is no mapping
        except (TensorError, TypeError):
            raise self.damaged(path.name) from None

    def commit_prepared(self, private: Tensors, provenance: TensorOrigin, name: str = COMMITTED) -> None:
        """Commit private tensors that belong to no pending update, or keep them as ``name``."""
        self.write_file(name, _encode(private, provenance))

    def reset_private(self) -> None:
        """Forget the committed private tensors, and an update that was made from them and is not sent yet."""
        if self._pending.exists():
            self.discard()
        (self.folder / COMMITTED).unlink(missing_ok=True)
        self._disk.sync_folder(self.folder)

    def write_pending(self, update: bytes, private: Tensors, provenance: TensorOrigin) -> None:
        """Make an update and its private tensors durable together; from now on only these bytes are sent."""
        draft = self.folder / "pending.tmp"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        about = {
            "task_id": provenance.task_id,
            "round": provenance.round,
            "phase": provenance.phase,
            "sha256": hashlib.sha256(update).hexdigest(),
        }
        self._disk.write(draft / "update.safetensors", update)
        self._disk.write(draft / "private.safetensors", _encode(private, provenance))
        self._disk.write(draft / "about.json", json.dumps(about).encode())
        self._disk.sync_folder(draft)
        os.rename(draft, self._pending)
        self._disk.sync_folder(self.folder)

    def pending(self) -> Pending | None:
        """The update that is neither accepted nor refused yet."""
        if not self._pending.exists():
            return None
        try:
            return _update_in(self._pending)
        except UNREADABLE:
            raise self.damaged(PENDING) from None

    def commit(self) -> None:
        """The coordinator has the pending update: its private tensors become the committed ones."""
        self._disk.move(self._pending / "private.safetensors", self.folder / COMMITTED)
        self._disk.sync_folder(self.folder)
        self._keep_answered()

    def answered(self) -> Pending | None:
        """The update that was accepted last, as it was sent; None if there is none, or if it is damaged."""
        try:
            return _update_in(self.folder / ANSWERED)
        except UNREADABLE:
            return None

    def _keep_answered(self) -> None:
        """Keep the sent part of the pending update, whose private tensors are committed."""
        shutil.rmtree(self.folder / ANSWERED, ignore_errors=True)
        os.rename(self._pending, self.folder / ANSWERED)
        self._disk.sync_folder(self.folder)

    def discard(self) -> None:
        """Forget the pending update and its private tensors."""
        trash = self.folder / "discarded"
        shutil.rmtree(trash, ignore_errors=True)
        os.rename(self._pending, trash)
        self._disk.sync_folder(self.folder)
        shutil.rmtree(trash, ignore_errors=True)

    @property
    def _pending(self) -> Path:
        return self.folder / PENDING

    def _recover(self) -> None:
        """Finish what a kill interrupted."""
        for leftover in ("pending.tmp", "discarded"):
            shutil.rmtree(self.folder / leftover, ignore_errors=True)
        if self._pending.exists() and not (self._pending / "private.safetensors").exists():
            self._keep_answered()  # killed in the middle of `commit`, after its rename

    # For predictions and for people

    def save_serving(self, serving: Serving) -> None:
        """Keep the payload of an evaluation, so that predictions survive a restart and the federation's end."""
        payload = serving.payload
        digest = hashlib.sha256(payload).hexdigest() if isinstance(payload, bytes) else sha256_of(payload)
        file = f"serving-{digest}.safetensors"
        if isinstance(payload, bytes):
            self.write_file(file, payload)
        else:
            self._disk.adopt(payload, self.folder / file)
        about = {"round": serving.round, "phase": serving.phase, "payload": file}
        self.write_file("serving.json", json.dumps(about | {"config": serving.config.model_dump(mode="json")}).encode())
        for old in self.folder.glob("serving-*.safetensors"):
            if old.name != file:
                old.unlink(missing_ok=True)

    def serving(self) -> Serving | None:
        """What `save_serving` kept."""
        raw = self.read_as("serving.json", dict[str, Any])
        if raw is None:
            return None
        try:
            config = TaskConfig.model_validate(raw["config"])
            path = self.folder / raw["payload"]
            payload = path if path.stat().st_size >= LARGE else path.read_bytes()
            return Serving(raw["round"], raw["phase"], config, payload)
        except UNREADABLE:
            raise self.damaged("serving.json") from None

    def write_note(self, name: str, text: str) -> None:
        """A file of text, such as the address of the client's API for other programs."""
        self._write_note(name, text.encode())

    def read_note(self, name: str) -> str | None:
        """A file that `write_note` wrote. Raises ClientError: STATE if it cannot be read."""
        content = self._read_note(name)
        try:
            return None if content is None else content.decode()
        except UnicodeDecodeError:
            raise self.damaged(name) from None

    def _write_note(self, name: str, content: bytes) -> None:
        if self._notes is None:
            self.write_file(name, content)
        else:
            self._notes[name] = content

    def _read_note(self, name: str) -> bytes | None:
        return self.read_file(name) if self._notes is None else self._notes.get(name)

    def read_file(self, name: str) -> bytes | None:
        """What `write_file` wrote; None if there is nothing. Raises ClientError: STATE if it cannot be read."""
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError:
            raise self.damaged(name) from None

    def write_as(self, name: str, value: object) -> None:
        """A file of JSON, on the disk when this returns: of a model, a dataclass or a mapping."""
        self._write_note(name, _adapter(type(value)).dump_json(value))

    def read_as(self, name: str, kind: type[Kept]) -> Kept | None:
        """What `write_as` wrote, as ``kind``; None if there is nothing.

        Raises:
            ClientError: STATE where it cannot be read, or is nothing of this kind.
        """
        content = self._read_note(name)
        try:
            return None if content is None else cast(Kept, _adapter(kind).validate_json(content))
        except ValidationError:
            raise self.damaged(name) from None

    def remove_note(self, name: str) -> None:
        """Delete a file, or what `write_note` wrote, if it exists."""
        if self._notes is not None:
            self._notes.pop(name, None)
        (self.folder / name).unlink(missing_ok=True)
        self._disk.sync_folder(self.folder)

    def delete_private(self) -> None:
        """Delete private tensors, pending updates, prompts for predictions and features. The identity stays."""
        for name in (PENDING, ANSWERED, "pending.tmp", "discarded", "features", PAYLOADS):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        secure = ("secure-work*", "secure-attempt*", "secure-masked*")
        for pattern in (f"{COMMITTED}*", "round-*", "serving*", "last-refusal.json*", DATA, *secure):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)
        self._disk.sync_folder(self.folder)

    # Files

    def write_file(self, name: str, content: bytes) -> None:
        """A file of bytes, on the disk when this returns."""
        draft = self.folder / f"{name}.tmp"
        self._disk.write(draft, content)
        self._disk.move(draft, self.folder / name)
        self._disk.sync_folder(self.folder)

    def damaged(self, name: str) -> ClientError:
        """The error that ends a client whose file ``name`` cannot be understood."""
        text = f"{self.folder / name} is damaged: restore it, or enrol anew with another --state-dir and --name"
        return ClientError(Exit.STATE, text)


def _update_in(folder: Path) -> Pending:
    """The update that lies in a folder. Raises one of UNREADABLE, also where its bytes have changed."""
    about = json.loads((folder / "about.json").read_bytes())
    path = folder / "update.safetensors"
    digest = sha256_of(path)
    if digest != about["sha256"]:
        raise ValueError("it has changed")
    return Pending(about["task_id"], about["round"], about["phase"], Body(path, path.stat().st_size, digest))


def _encode(private: Tensors, provenance: TensorOrigin) -> bytes:
    # Clones, since safetensors refuses tensors that share memory, as views of one parameter do.
    return encode({name: tensor.detach().clone() for name, tensor in private.items()}, asdict(provenance))


def keep_round(state: PrivateState, round: int) -> None:
    """Keep the committed private tensors as those of ``round``; before the first training these are none."""
    state.commit_prepared(*state.committed(), f"round-{round}.safetensors")


def select_round(state: PrivateState, round: int) -> None:
    """Commit the private tensors that were kept of ``round``, and forget those of other rounds.

    A client that was away then takes those of the last round before; one that joined later has none.
    """
    kept = {int(path.stem.removeprefix("round-")): path for path in state.folder.glob("round-*.safetensors")}
    last = max((number for number in kept if number <= round), default=None)
    state.commit_prepared(*({}, TensorOrigin()) if last is None else state.committed(kept[last].name))
    for number, path in kept.items():
        if number != last:
            path.unlink(missing_ok=True)
