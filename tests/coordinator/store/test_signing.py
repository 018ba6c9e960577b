"""States are signed by a key of the coordinator's own."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from promptfed.coordinator.store.database import CannotOpen
from promptfed.coordinator.store.opening import Signer
from promptfed.shared.canonical import is_signed, statement
from promptfed.testing.clients import drive
from tests.support.coordinators import InThread


def test_a_state_is_signed_by_the_key_that_is_shown(coordinator_with: Callable[..., InThread]) -> None:
    coordinator = coordinator_with()
    federation = coordinator.create(rounds=1)
    clients = coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    drive(clients)
    key = coordinator.http.get("/v1/signing-key").json()
    assert key["algorithm"] == "ed25519"
    signatures = set()
    for round in (0, 1):
        for accept in ("application/json", "application/octet-stream"):
            headers = coordinator.operator | {"Accept": accept}
            answer = coordinator.http.get(f"/v1/federations/{federation}/prompts?round={round}", headers=headers)
            signature, state_hash = answer.headers["promptfed-signature"], answer.headers["etag"].strip('"')
            signatures.add(signature)
            assert is_signed(key["public_key"], signature, statement(federation, round, state_hash))
            for other in (
                statement("fed-0", round, state_hash),
                statement(federation, round + 1, state_hash),
                statement(federation, round, "sha256:" + "0" * 64),
            ):
                assert not is_signed(key["public_key"], signature, other)
    assert len(signatures) == 2
    coordinator.stop()
    assert coordinator_with().http.get("/v1/signing-key").json() == key, "the same after a restart"


def test_the_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    assert stat.S_IMODE((tmp_path / "signing.key").stat().st_mode) == 0o600
    assert Signer(tmp_path).public_key == signer.public_key
    said = statement("fed-1", 3, "sha256:ab")
    assert is_signed(signer.public_key, signer.sign(said), said)
    for key, signature in (("", ""), ("zz", "00"), (signer.public_key, "00"), ("00" * 32, signer.sign(said))):
        assert not is_signed(key, signature, said)
    (tmp_path / "signing.key").write_text("no key")
    with pytest.raises(CannotOpen, match="holds no Ed25519 key"):
        Signer(tmp_path)
