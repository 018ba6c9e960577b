"""The coordinator's signature, and its key in the data folder."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from promptfed.coordinator.store.backend import CannotOpen
from promptfed.shared.files import write_whole

KEY_FILE = "signing.key"


class Signer:
    """Signs with the key of a data folder, which the first start creates, or with the one of a ``file``.

    Raises:
        CannotOpen: the file holds no Ed25519 key, or the given file does not exist.
    """

    def __init__(self, data_dir: Path, file: Path | None = None):
        path = file or data_dir / KEY_FILE
        if file is not None and not file.exists():
            raise CannotOpen(f"--signing-key-file {file} is missing: openssl genpkey -algorithm ed25519 -out {file}")
        if not path.exists():
            made = Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            write_whole(path, made, mode=0o600)
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except (ValueError, TypeError):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise CannotOpen(f"{path} holds no Ed25519 key: put back the one that was there, or delete it for another")
        self._key = key
        raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.public_key = raw.hex()

    def sign(self, message: bytes) -> str:
        """The signature, in hexadecimal."""
        return self._key.sign(message).hex()
