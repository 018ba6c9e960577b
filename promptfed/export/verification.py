"""Reading an export: first the coordinator's signature if its key is known, then the card, then the state.

The folder, or the archive that the page gives, is not trusted. The bytes that are used are the bytes that were
checked: each file is read once, links are not followed, and with a key there must be no file that the signed card does
not name. `promptfed verify` also recomputes what can be recomputed, and federations start from what was read.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from promptfed.export.adapted_model import AdaptedModel, weights_of
from promptfed.export.export import open_backbone_of
from promptfed.export.model_card import backbone_files, carries_backbone, described, markdown, snippet, version
from promptfed.sdk.backbone import resolve
from promptfed.sdk.client import CommandError, Exit
from promptfed.shared import machine
from promptfed.shared.api.export_card import (
    BACKBONE_CONFIG,
    BACKBONE_FOLDER,
    BACKBONE_WEIGHTS,
    FORMAT,
    GIVEN_NAMES,
    JSON_FILE,
    LISTED,
    MARKDOWN_FILE,
    MERGED_FILE,
    MOST_CARD_BYTES,
    SIGNATURE_FILE,
    STATE_FILE,
    WEIGHTS_FILE,
    Card,
)
from promptfed.shared.canonical import export_statement, is_signed, parse_json
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import TASK, method_for
from promptfed.shared.methods.core.interface import MethodError, ServerContext
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import AllowedBackbones, FederationSpec, Origin, SpecError, merged
from promptfed.shared.tensors import TensorError, Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode, state_hash

UNSIGNED_FILE = "audit.json"  # lies beside some exports of 0.3.0, not signed and not read
PIECE = 1 << 20


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
        return AdaptedModel.of_card(self.card, self.state)


def open_export(folder: Path, key: str | None = None, whole: bool = False) -> OpenedExport:
    """Read an export.

    Args:
        folder: a folder that `promptfed export` wrote, or the archive (.zip) of the page.
        key: the coordinator's public key. With it the signature is checked before anything is parsed.
        whole: check all files even without a key.

    Raises:
        CommandError: the folder is not an export, has a later version, is damaged, or is not signed with this key.
    """
    body = read_file(folder, JSON_FILE, MOST_CARD_BYTES)
    if key is not None:
        _expect_signature(folder, body, key)
    card = _card(folder, body)
    if key is not None or whole:
        _expect_listed(folder, card, Exit.BAD_INPUT if key is None else Exit.REFUSED)
    return OpenedExport(folder, card, _state(folder, card), hashlib.sha256(body).hexdigest())


def read_export(folder: Path, key: str | None = None) -> tuple[AdaptedModel, tuple[str, ...] | None]:
    """Read an export: the adapted model, and its class names if it has any.

    Raises:
        CommandError: as `open_export`.
    """
    opened = open_export(folder, key)
    return opened.model, tuple(opened.card.class_names) if opened.card.class_names else None


def read_file(folder: Path, name: str, most: int) -> bytes:
    """The bytes of one file, up to a maximum size.

    Raises:
        CommandError: the file is missing, too large, or not a regular file.
    """
    return b"".join(_pieces(folder, name, most))


def _pieces(folder: Path, name: str, most: int) -> Iterator[bytes]:
    """A file's bytes in chunks. Links are not followed, and pipes and devices do not block."""
    read = 0
    for piece in _unbounded(folder, name):
        read += len(piece)
        if read > most:
            known = f"not the one that {JSON_FILE} names: it is " if name in LISTED else ""
            raise CommandError(f"{folder}: {name} is {known}longer than {most} bytes", Exit.BAD_INPUT)
        yield piece


def _unbounded(folder: Path, name: str) -> Iterator[bytes]:
    path = folder / name
    try:
        if folder.is_file():
            with zipfile.ZipFile(folder) as archive, archive.open(name) as member:
                while piece := member.read(PIECE):
                    yield piece
            return
        handle = os.open(path, os.O_RDONLY | machine.O_NOFOLLOW | machine.O_NONBLOCK | machine.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise CommandError(f"{folder}: {name} is not a regular file", Exit.BAD_INPUT)
            while piece := file.read(PIECE):
                yield piece
    except KeyError:
        raise _no_export(folder, name, "it is not in the archive") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:  # encrypted, unknown
        raise _no_export(folder, name, f"no archive that can be read: {error}") from None
    except OSError as error:
        raise _no_export(folder, name, why(error)) from None


def _no_export(folder: Path, name: str, reason: str) -> CommandError:
    text = f"{folder} is not a promptfed export ({name}: {reason})"
    return CommandError(
        f"{text}: give a folder that `promptfed export` has written, or the page's .zip", Exit.BAD_INPUT
    )


def _has(folder: Path, name: str) -> bool:
    return name in _names(folder) if folder.is_file() else os.path.lexists(folder / name)


def _expect_signature(folder: Path, body: bytes, key: str) -> None:
    if not _has(folder, SIGNATURE_FILE):
        raise CommandError(f"{folder} is not signed: {_why_unsigned(folder, body)}", Exit.REFUSED)
    signature = read_file(folder, SIGNATURE_FILE, 1000).decode("ascii", "replace").strip()
    if not is_signed(key, signature, export_statement(body)):
        text = f"{folder}: {JSON_FILE} is not signed by the key {key[:200]}: it was changed, or comes from elsewhere"
        raise CommandError(text, Exit.REFUSED)


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
        raise CommandError(text, Exit.BAD_INPUT) from None
    given = raw.get("format") if isinstance(raw, dict) else None
    if given is not None and given != FORMAT:
        text = f"{folder} is an export of format {str(given)[:100]}, this promptfed reads {FORMAT}: export it again"
        raise CommandError(text, Exit.BAD_INPUT)
    try:
        return Card.model_validate(raw, extra="ignore")
    except ValidationError as error:
        text = f"{folder}: {JSON_FILE} is damaged: {SpecError.from_validation(error)}"
        raise CommandError(text, Exit.BAD_INPUT) from None


def _state(folder: Path, card: Card) -> Tensors:
    listed = card.files.get(STATE_FILE)
    if listed is None:
        raise CommandError(f"{folder}: {JSON_FILE} is damaged: it names no {STATE_FILE}", Exit.BAD_INPUT)
    body = read_file(folder, STATE_FILE, listed.bytes)
    try:
        state, _ = decode(body)
    except TensorError as error:
        raise CommandError(f"{folder}: {STATE_FILE} is damaged: {error}", Exit.BAD_INPUT) from None
    if described(body, None).sha256 != listed.sha256 or state_hash(state) != card.hashes.state:
        raise CommandError(f"{folder}: {STATE_FILE} is not the one that {JSON_FILE} names", Exit.BAD_INPUT)
    return state


def _expect_listed(folder: Path, card: Card, exit: Exit) -> None:
    """Raise CommandError if a file is missing, changed, not a regular file, or not listed."""
    unknown = sorted(card.files.keys() - LISTED)
    if unknown:
        raise CommandError(f"{folder}: {JSON_FILE} names {unknown[0][:200]!r}, which no export holds", exit)
    beside = {JSON_FILE, SIGNATURE_FILE, UNSIGNED_FILE}
    if not _has(folder, SIGNATURE_FILE):
        beside.add(MARKDOWN_FILE)  # older, unsigned cards did not name these files
    for name in _names(folder):
        if name not in card.files and name not in beside:
            text = f"{folder}: {name[:200]!r} is not named in {JSON_FILE}: it is no part of the export, remove it"
            raise CommandError(text, exit)
    for name, file in card.files.items():
        digest = hashlib.sha256()
        for piece in _pieces(folder, name, file.bytes):
            digest.update(piece)
        if digest.hexdigest() != file.sha256:
            raise CommandError(f"{folder}: {name} is not the one that {JSON_FILE} names", exit)


def _names(folder: Path) -> Iterator[str]:
    """All names in the folder and in the backbone's folder. Other folders and links count as files."""
    if folder.is_file():
        with zipfile.ZipFile(folder) as archive:
            names = archive.namelist()
        if len(set(names)) < len(names):
            raise CommandError(f"{folder}: the archive has a name twice: download it again", Exit.BAD_INPUT)
        yield from (name for name in sorted(names) if name != f"{BACKBONE_FOLDER}/")
        return
    try:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.name == BACKBONE_FOLDER and entry.is_dir(follow_symlinks=False):
                yield from (f"{BACKBONE_FOLDER}/{name}" for name in sorted(os.listdir(entry.path)))
            else:
                yield entry.name
    except OSError as error:
        raise CommandError(f"{folder} cannot be read: {why(error)}", Exit.BAD_INPUT) from None


TOLERANCE = 1e-5  # tolerance between two machines that compute the same in float32


@dataclass(frozen=True)
class Verification:
    """A verified export; ``remarks`` list the further checks, and the checks that were not possible."""

    card: Card
    remarks: tuple[str, ...]


def verify_export(
    folder: Path | str,
    key: str | None,
    *,
    recompute: bool = True,
    allow_backbone: AllowedBackbones = False,
    backbone: Backbone | None = None,
) -> Verification:
    """Check an export against a coordinator's public key, and recompute the parts that can be recomputed.

    Args:
        folder: a folder that `promptfed export` wrote, or the archive (.zip) of the page.
        key: the public key in hexadecimal, from ``GET /v1/signing-key``. Without it the signature is not checked.
        recompute: load the backbone and recompute the class weights and the merged model.
        allow_backbone: names of a model or checkpoint outside open_clip's registry that may be loaded; True: any.
        backbone: the backbone, if it is loaded already.

    Raises:
        CommandError: the signature, a file or a recomputed part does not match the card.
    """
    opened = open_export(Path(folder), key, whole=True)
    files = {
        name: _tensors(opened, name)
        for name in (WEIGHTS_FILE, MERGED_FILE, BACKBONE_WEIGHTS)
        if name in opened.card.files
    }
    weights = files.get(WEIGHTS_FILE)
    remarks = [_names_remark(opened.card), _text_remark(opened, weights)]
    if files:
        remarks.append(
            _recomputed(opened, files, backbone, allow_backbone) if recompute else f"{_not(files)}: not asked for"
        )
    return Verification(opened.card, tuple(remark for remark in remarks if remark is not None))


def _tensors(opened: OpenedExport, name: str) -> Tensors:
    listed = opened.card.files[name]
    body = read_file(opened.folder, name, listed.bytes)
    try:
        tensors, _ = decode(body)
    except TensorError as error:
        raise CommandError(f"{opened.folder}: {name} is damaged: {error}", Exit.REFUSED) from None
    if described(body, tensors if listed.tensors is not None else None) != listed:
        raise CommandError(f"{opened.folder}: {name} is not the one that the card names", Exit.REFUSED)
    return tensors


def _names_remark(card: Card) -> str | None:
    """A remark on the origin of the class names."""
    return "the class names are the exporter's, not the federation's" if card.class_names_from == GIVEN_NAMES else None


def _text_remark(opened: OpenedExport, weights: Tensors | None) -> str | None:
    """Compare ``card.md`` with the text made from the signed card; None if they are equal."""
    card, name = opened.card, opened.card.method["name"]
    if card.made.promptfed != version():
        return f"{MARKDOWN_FILE} was written by {card.made.promptfed}, this is {version()}: its text was not compared"
    try:
        opened.model.make_method()
    except CommandError:
        return f"{MARKDOWN_FILE} was not compared with the card: this promptfed has no method {name}"
    text = markdown(card, snippet(card.backbone, weights) if weights is not None else None)
    if described(text.encode(), None) != card.files[MARKDOWN_FILE]:
        text = "it was changed before it was signed"
        raise CommandError(f"{opened.folder}: {MARKDOWN_FILE} does not match the card: {text}", Exit.REFUSED)
    return None


def _not(files: dict[str, Tensors]) -> str:
    return f"{', '.join(sorted(files))} not computed again"


def _recomputed(
    opened: OpenedExport, files: dict[str, Tensors], given: Backbone | None, allow: AllowedBackbones
) -> str:
    """Compare files with results recomputed by the backbone; a sentence that states the outcome."""
    model, names = opened.model, tuple(opened.card.class_names or ())
    try:
        backbone = given or open_backbone_of(model, allow)
        again = _computed(model, backbone, names, files)
    except CommandError as error:
        return f"{_not(files)}: {error}"
    for name, tensors in files.items():
        _expect_equal(opened, name, tensors, again[name])
    if BACKBONE_CONFIG in opened.card.files:
        body = read_file(opened.folder, BACKBONE_CONFIG, opened.card.files[BACKBONE_CONFIG].bytes)
        if parse_json(body) != parse_json(backbone_files(backbone)[BACKBONE_CONFIG]):
            raise CommandError(f"{opened.folder}: {BACKBONE_CONFIG} is not the backbone's", Exit.REFUSED)
    return f"{', '.join(sorted(files))} computed again with the backbone: the same"


def _computed(
    model: AdaptedModel, backbone: Backbone, names: tuple[str, ...], files: dict[str, Tensors]
) -> dict[str, Tensors | None]:
    """The recomputed tensors of each file; None if there are none."""
    weights = weights_of(model.serve(backbone, names)) if WEIGHTS_FILE in files else None
    merged = model.merged(backbone, names) if MERGED_FILE in files else None
    carried = None
    if BACKBONE_WEIGHTS in files and carries_backbone(model.terms.backbone):
        carried, _ = decode(backbone_files(backbone)[BACKBONE_WEIGHTS])
    return {WEIGHTS_FILE: weights, MERGED_FILE: merged, BACKBONE_WEIGHTS: carried}


def _expect_equal(opened: OpenedExport, name: str, given: Tensors, again: Tensors | None) -> None:
    if again is None or given.keys() != again.keys() or not all(_equal(given[key], again[key]) for key in given):
        text = "they are not what the state and the backbone give"
        raise CommandError(f"{opened.folder}: {name}: {text}", Exit.REFUSED)


def _equal(given: torch.Tensor, again: torch.Tensor) -> bool:
    if given.shape != again.shape or given.dtype != again.dtype:
        return False
    if not given.numel():
        return True
    apart = (given.double() - again.double()).abs().max()
    return bool(apart <= TOLERANCE * max(1.0, float(again.double().abs().max())))


FORMER_SUMS = ("class_counts", "calibration", "calibration_sites")
"""Tensors that promptfed 0.3.0 added to a state beside the method's own: sums over the clients, which nothing reads."""


def continued(folder: Path, given: Mapping[str, Any], key: str | None = None) -> tuple[dict[str, Any], bytes]:
    """The spec of the export in ``folder`` under the fields that are ``given``, and its state as safetensors.

    What each client keeps private is not part of an export: clients of personalised methods begin anew with it. Such an
    export is not for 0 rounds.

    Raises:
        CommandError: it is no export, ``key`` has not signed it, its state does not fit the given method, or its
            training was protected and ``given`` does not say how this one is.
    """
    opened = open_export(folder, key)
    has, wanted = opened.card.method["name"], dict(given.get("method") or {}).get("name")
    if wanted not in (None, has):
        text = (
            f"the export in {folder} is of {has}, the spec names {wanted}: a federation continues with the same method"
        )
        raise CommandError(text, Exit.BAD_INPUT)
    if given.get("rounds") == 0:
        missing = opened.model.missing()
        if missing is not None:
            raise CommandError(f"the export in {folder} cannot be evaluated: {missing}", Exit.BAD_INPUT)
    else:
        _expect_protection(opened, given)
    state = {name: tensor for name, tensor in opened.state.items() if name not in FORMER_SUMS}
    own = {"continues": state_hash(state), "origin": _origin(opened)}
    raw = merged(_spec(opened), dict(given)) | own
    _expect_fit(resolve(raw), state)
    return raw, encode(state)


def _expect_protection(opened: OpenedExport, given: Mapping[str, Any]) -> None:
    """Raise CommandError if protection, which a card does not hold as settings, would end unsaid."""
    card = opened.card
    without = {"privacy": (card.privacy, "{level: none}"), "secure_aggregation": (card.secure_aggregation, "null")}
    for section, (had, none) in without.items():
        if had is not None and section not in given:
            text = f"the export in {opened.folder} was trained with {section}, and the spec says nothing of it"
            raise CommandError(f"{text}: give {section}, or {section}: {none} to train without", Exit.BAD_INPUT)


def _origin(opened: OpenedExport) -> dict[str, Any]:
    card = opened.card
    origin = Origin(card=f"sha256:{opened.digest}", federation=card.federation.name, licence=card.licence)
    return origin.model_dump(mode="json")


def _spec(opened: OpenedExport) -> dict[str, Any]:
    card = opened.card
    fields = {
        "method",
        "backbone",
        "template",
        "class_names",
        "rounds",
        "training",
        "seed",
        "licence",
    }
    known = card.model_dump(mode="json", include=fields, exclude_none=True, exclude_unset=True)
    task = {TASK: card.method[TASK]} if TASK in card.method else {}
    return {"name": card.federation.name} | known | task


def _expect_fit(spec: FederationSpec, state: Tensors) -> None:
    """Raise CommandError for a tensor that is missing, not the method's, or of another shape."""
    method = method_for(spec)
    expected = {each.name: each for each in method.state_tensors()}
    dims: Mapping[str, int] = {}
    if spec.backbone.shape is not None:
        names = tuple(spec.class_names) if spec.class_names is not None else None
        try:
            dims = method.dims(ServerContext(spec.training, spec.backbone.shape, names, (), spec.seed, spec.rounds))
        except MethodError as error:
            raise CommandError(str(error), Exit.BAD_INPUT) from None
    wrong = sorted(expected.keys() ^ state.keys())
    for name in expected.keys() & state.keys():
        has = tuple(state[name].shape)
        sizes = [dims.get(size) if isinstance(size, str) else size for size in expected[name].shape]
        # Some sizes, such as the number of clients, are known to the coordinator only.
        if len(has) != len(sizes) or any(size not in (None, found) for size, found in zip(sizes, has, strict=True)):
            wrong.append(name)
    if wrong:
        text = f"the export's state does not fit {method.name} with these settings ({', '.join(wrong)})"
        raise CommandError(f"{text}: keep the export's method and its settings", Exit.BAD_INPUT)
