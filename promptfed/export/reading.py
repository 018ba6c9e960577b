"""Reading an export: first the coordinator's signature if its key is known, then the card, then the state.

The folder, or the archive that the page gives, is not trusted. The bytes that are used are the bytes that were
checked: each file is read once, links are not followed, and with a key there must be no file that the signed card does
not name.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path

from pydantic import ValidationError

from promptfed.export.adapted_model import AdaptedModel
from promptfed.shared import machine
from promptfed.shared.api.export_card import (
    BACKBONE_FOLDER,
    FORMAT,
    JSON_FILE,
    LISTED,
    MARKDOWN_FILE,
    MOST_CARD_BYTES,
    SIGNATURE_FILE,
    STATE_FILE,
    Card,
)
from promptfed.shared.canonical import export_statement, is_signed, parse_json
from promptfed.shared.cards.card_text import described
from promptfed.shared.errors import BadInput, PromptfedError, Refused
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import TensorError, Tensors
from promptfed.shared.tensors.torch_tensors import decode, state_hash

UNSIGNED_FILE = "audit.json"  # lies beside some exports of 0.3.0, not signed and not read
PIECE = 1 << 20
LEAST_ROOM, MOST_GROWTH = 64 << 20, 20  # what of an archive may come to be: bytes, and times its own


@dataclass(frozen=True)
class OpenedExport:
    """An export that was read. With a key, its card and files are those that the coordinator signed."""

    folder: Path
    card: Card
    state: Tensors
    digest: str  # SHA-256 of the card's bytes, in hex

    @property
    def model(self) -> AdaptedModel:
        """The adapted model of the export."""
        return AdaptedModel.of(self.card, self.state)


def open_export(folder: Path, key: str | None = None, whole: bool = False) -> OpenedExport:
    """Read an export.

    Args:
        folder: a folder that `promptfed export` wrote, or the archive (.zip) of the page.
        key: the coordinator's public key. With it the signature is checked before anything is parsed.
        whole: check all files even without a key.

    Raises:
        PromptfedError: the folder is not an export, has a later version, is damaged, or is not signed with this key.
    """
    body = read_file(folder, JSON_FILE, MOST_CARD_BYTES)
    if key is not None:
        _expect_signature(folder, body, key)
    card = _card(folder, body)
    if key is not None or whole:
        _expect_listed(folder, card, BadInput if key is None else Refused)
    return OpenedExport(folder, card, _state(folder, card), hashlib.sha256(body).hexdigest())


def read_export(folder: Path, key: str | None = None) -> tuple[AdaptedModel, tuple[str, ...] | None]:
    """Read an export: the adapted model, and its class names if it has any.

    Raises:
        PromptfedError: as `open_export`.
    """
    opened = open_export(folder, key)
    return opened.model, tuple(opened.card.class_names) if opened.card.class_names else None


def read_file(folder: Path, name: str, most: int) -> bytes:
    """The bytes of one file, up to a maximum size.

    Raises:
        PromptfedError: the file is missing, too large, or not a regular file.
    """
    return b"".join(_pieces(folder, name, most))


def _pieces(folder: Path, name: str, most: int) -> Iterator[bytes]:
    """A file's bytes in chunks. Links are not followed, and pipes and devices do not block."""
    read = 0
    for piece in _unbounded(folder, name):
        read += len(piece)
        if read > most:
            listed = f"not the one that {JSON_FILE} names: it is " if name in LISTED else ""
            raise BadInput(f"{folder}: {name} is {listed}longer than {most} bytes")
        yield piece


def _unbounded(folder: Path, name: str) -> Iterator[bytes]:
    path = folder / name
    try:
        if folder.is_file():
            with zipfile.ZipFile(folder) as archive, archive.open(name) as member:
                _expect_packed(folder, name, archive.getinfo(name))
                while piece := member.read(PIECE):
                    yield piece
            return
        handle = os.open(path, os.O_RDONLY | machine.O_NOFOLLOW | machine.O_NONBLOCK | machine.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise BadInput(f"{folder}: {name} is not a regular file")
            while piece := file.read(PIECE):
                yield piece
    except KeyError:
        raise _no_export(folder, name, "it is not in the archive") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:  # encrypted, unknown
        raise _no_export(folder, name, f"no archive that can be read: {error}") from None
    except OSError as error:
        raise _no_export(folder, name, why(error)) from None


def _expect_packed(folder: Path, name: str, about: zipfile.ZipInfo) -> None:
    """Refuse a member that grows far beyond its bytes: tensors hardly compress, and a card's text a little."""
    if about.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others take memory as a member asks
        raise _no_export(folder, name, "it is packed by another method than stored or deflated: pack it anew")
    most = LEAST_ROOM + MOST_GROWTH * about.compress_size
    if about.file_size > most:
        raise _no_export(folder, name, f"{about.compress_size:,} bytes of the archive become {about.file_size:,}")


def _no_export(folder: Path, name: str, reason: str) -> PromptfedError:
    text = f"{folder} is not a promptfed export ({name}: {reason})"
    return BadInput(f"{text}: give a folder that `promptfed export` has written, or the page's .zip")


def _has(folder: Path, name: str) -> bool:
    return name in _names(folder) if folder.is_file() else os.path.lexists(folder / name)


def _expect_signature(folder: Path, body: bytes, key: str) -> None:
    if not _has(folder, SIGNATURE_FILE):
        raise Refused(f"{folder} is not signed: {_why_unsigned(folder, body)}")
    signature = read_file(folder, SIGNATURE_FILE, 1000).decode("ascii", "replace").strip()
    if not is_signed(key, signature, export_statement(body)):
        text = f"{folder}: {JSON_FILE} is not signed by the key {key[:200]}: it was changed, or comes from elsewhere"
        raise Refused(text)


def _why_unsigned(folder: Path, body: bytes) -> str:
    if _card(folder, body).signature is not None:
        return (
            "the signature in its card covers only the state, not the card and the other files; "
            "an operator exports it again with this version"
        )
    return "it was exported from a simulation, by a viewer, or from an earlier coordinator"


def _card(folder: Path, body: bytes) -> Card:
    try:
        raw = parse_json(body)
    except ValueError as error:
        reason = why(error) if isinstance(error, JSONDecodeError | UnicodeDecodeError) else error
        text = f"{folder} is not a promptfed export ({JSON_FILE} cannot be read: {reason}): export it again"
        raise BadInput(text) from None
    version = raw.get("format") if isinstance(raw, dict) else None
    if version is not None and version != FORMAT:
        text = f"{folder} is an export of format {str(version)[:100]}, this promptfed reads {FORMAT}: export it again"
        raise BadInput(text)
    try:
        return Card.model_validate(raw, extra="ignore")
    except ValidationError as error:
        text = f"{folder}: {JSON_FILE} is damaged: {SpecError.from_validation(error)}"
        raise BadInput(text) from None


def _state(folder: Path, card: Card) -> Tensors:
    listed = card.files.get(STATE_FILE)
    if listed is None:
        raise BadInput(f"{folder}: {JSON_FILE} is damaged: it names no {STATE_FILE}")
    body = read_file(folder, STATE_FILE, listed.bytes)
    try:
        state, _ = decode(body)
    except TensorError as error:
        raise BadInput(f"{folder}: {STATE_FILE} is damaged: {error}") from None
    if described(body, None).sha256 != listed.sha256 or state_hash(state) != card.hashes.state:
        raise BadInput(f"{folder}: {STATE_FILE} is not the one that {JSON_FILE} names")
    return state


def _expect_listed(folder: Path, card: Card, refusal: type[PromptfedError]) -> None:
    """Raise ``refusal`` if a file is missing, changed, not a regular file, or not listed."""
    unknown = sorted(card.files.keys() - LISTED)
    if unknown:
        raise refusal(f"{folder}: {JSON_FILE} names {unknown[0][:200]!r}, which no export holds")
    beside = {JSON_FILE, SIGNATURE_FILE, UNSIGNED_FILE}
    if not _has(folder, SIGNATURE_FILE):
        beside.add(MARKDOWN_FILE)  # older, unsigned cards did not name these files
    for name in _names(folder):
        if name not in card.files and name not in beside:
            text = f"{folder}: {name[:200]!r} is not named in {JSON_FILE}: it is no part of the export, remove it"
            raise refusal(text)
    for name, file in card.files.items():
        digest = hashlib.sha256()
        for piece in _pieces(folder, name, file.bytes):
            digest.update(piece)
        if digest.hexdigest() != file.sha256:
            raise refusal(f"{folder}: {name} is not the one that {JSON_FILE} names")


def _names(folder: Path) -> Iterator[str]:
    """All names in the folder and in the backbone's folder. Other folders and links count as files."""
    if folder.is_file():
        with zipfile.ZipFile(folder) as archive:
            names = archive.namelist()
        if len(set(names)) < len(names):
            raise BadInput(f"{folder}: the archive has a name twice: download it again")
        yield from (name for name in sorted(names) if name != f"{BACKBONE_FOLDER}/")
        return
    try:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.name == BACKBONE_FOLDER and entry.is_dir(follow_symlinks=False):
                yield from (f"{BACKBONE_FOLDER}/{name}" for name in sorted(os.listdir(entry.path)))
            else:
                yield entry.name
    except OSError as error:
        raise BadInput(f"{folder} cannot be read: {why(error)}") from None
