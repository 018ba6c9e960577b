"""A self-signed certificate for the coordinator of one run, so that crews on other machines can reach it by TLS."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from promptfed.shared.files import write_whole

DAYS = 365


def make_certificate(address: str, folder: Path) -> tuple[Path, Path]:
    """New PEM files in ``folder``: a self-signed certificate for the IP ``address``, and its key.

    Only the owner can read the key.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coordinator of a promptfed run")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks of a cluster may differ
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / "coordinator.pem", folder / "coordinator.key"
    write_whole(certificate_file, made.public_bytes(Encoding.PEM), synced=False)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_whole(key_file, private, mode=0o600, synced=False)
    return certificate_file, key_file
