"""The first admin's token and the key that signs: made once, for their owner alone, or given and checked."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from promptfed.coordinator.store import tokens
from promptfed.coordinator.store.backend import CannotOpen
from promptfed.coordinator.store.signing import KEY_FILE, Signer


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"), (b"\xff\xfe", "cannot be read"), (b"", "holds no token of 32 characters"),
        (b"x" * 31 + b"\n", "holds no token of 32 characters"), (b" " + b"x" * 32 + b"\n", None),
    ],
)  # fmt: skip
def test_a_given_token_is_long_enough(content: bytes | None, why: str | None, tmp_path: Path) -> None:
    place = tmp_path / "token"
    if content is not None:
        place.write_bytes(content)
    if why is None:
        assert tokens.given_operator_token(place) == "x" * 32
    else:
        with pytest.raises(CannotOpen, match=f"--operator-token-file .*token {why}"):
            tokens.given_operator_token(place)


def test_a_folder_s_token_and_key_are_made_once(tmp_path: Path) -> None:
    token, signer = tokens.operator_token(tmp_path), Signer(tmp_path)
    assert (tokens.operator_token(tmp_path), Signer(tmp_path).public_key) == (token, signer.public_key)
    assert len(token) >= tokens.SHORTEST
    assert len(bytes.fromhex(tokens.new_token())) == 32
    for name in (tokens.OPERATOR_FILE, KEY_FILE):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer.public_key))
    key.verify(bytes.fromhex(signer.sign(b"message")), b"message")
    given = tmp_path / "given.pem"
    with pytest.raises(CannotOpen, match=r"given\.pem is missing: openssl genpkey"):
        Signer(tmp_path, given)
    given.write_bytes((tmp_path / KEY_FILE).read_bytes())
    (tmp_path / KEY_FILE).write_text("no key")
    assert Signer(tmp_path, given).public_key == signer.public_key
    with pytest.raises(CannotOpen, match="holds no Ed25519 key: put back the one that was there"):
        Signer(tmp_path)
