"""Bearer tokens: of each only the SHA-256 is kept, but for the operator's, which lies in the data folder."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

OPERATOR_FILE = "operator.token"


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
