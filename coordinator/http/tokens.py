"""Who may do what: bearer tokens, kept as SHA-256 hashes and compared in constant time."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from hmac import compare_digest
from pathlib import Path

from promptfed.coordinator.domain.federation import Client, Live
from promptfed.coordinator.problems import TokenExpired, Unauthorized

OPERATOR_FILE = "operator.token"


@dataclass(frozen=True)
class Operator:
    """Whoever holds the operator token."""


@dataclass(frozen=True)
class Enrolling:
    """Whoever holds an enrolment token of a federation."""

    federation: str


@dataclass(frozen=True)
class ClientCaller:
    """A client of a federation."""

    federation: str
    client: Client
    active: bool


Caller = Operator | Enrolling | ClientCaller


def digest(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """256 random bits as text."""
    return secrets.token_hex(32)


def operator_token(data_dir: Path) -> str:
    """The operator token of a data folder, made at its first start. Only the folder's owner can read it."""
    path = data_dir / OPERATOR_FILE
    if path.exists():
        return path.read_text().strip()
    token = new_token()
    write_secret(path, token, 0o600)
    return token


def write_secret(path: Path, text: str, mode: int) -> None:
    """Write ``text`` so that a reader finds all of it or no file, and never one with a wider mode."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "w") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def identify(found: str, operator_digest: str, lives: Iterable[Live]) -> Caller:
    """Whose token it is that has the digest ``found``.

    Raises:
        Unauthorized, TokenExpired: nobody's, or no longer anybody's.
    """
    if compare_digest(found, operator_digest):
        return Operator()
    for live in lives:
        expires = next((end for known, end in live.tokens.items() if compare_digest(known, found)), None)
        if expires is not None:
            if expires <= datetime.now(UTC):
                raise TokenExpired("this enrolment token has expired: ask the operator for another")
            return Enrolling(live.id)
        client = live.by_secret.get(found)
        if client is not None and compare_digest(client.secret_digest or "", found):
            return ClientCaller(live.id, client, live.run.members[client.name].active)
    raise Unauthorized("this token is not known here")
