"""Tokens: how they are made and digested, and the first admin's, which lies in the data folder."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from promptfed.coordinator.store.backend import CannotOpen
from promptfed.shared.files import write_whole
from promptfed.shared.service.reasons import why

OPERATOR_FILE = "operator.token"
SHORTEST = 32


def digest(token: str) -> str:
    """SHA-256 of a token in hexadecimal."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """256 random bits as text."""
    return secrets.token_hex(32)


def operator_token(data_dir: Path) -> str:
    """The operator token of a data folder, created at the first start. Only the folder's owner can read it."""
    path = data_dir / OPERATOR_FILE
    if path.exists():
        return path.read_text().strip()
    token = new_token()
    write_secret(path, token)
    return token


def given_operator_token(path: Path) -> str:
    """The operator token in a file that several coordinators share. Raises CannotOpen."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotOpen(f"--operator-token-file {path} cannot be read: {why(error)}") from None
    if len(token) < SHORTEST:
        raise CannotOpen(f"--operator-token-file {path} holds no token of {SHORTEST} characters: openssl rand -hex 32")
    return token


def write_secret(path: Path, text: str) -> None:
    """Write ``text`` atomically to a file that only its owner can read."""
    write_whole(path, f"{text}\n".encode(), mode=0o600)
