"""A certificate authority for tests."""

from __future__ import annotations

import datetime
import ipaddress
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


class Authority:
    """Signs certificates, which it writes with their keys into one file each."""

    def __init__(self, folder: Path, name: str):
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = self._write(name, None, self._key, is_authority=True)

    def sign(self, name: str, *hosts: str, begins: timedelta = -DAY, ends: timedelta = DAY) -> Path:
        """A certificate for ``name``, and for host names and addresses, that is valid between two times from now."""
        return self._write(name, hosts, ec.generate_private_key(ec.SECP256R1()), begins=begins, ends=ends)

    def _write(
        self,
        name: str,
        hosts: tuple[str, ...] | None,
        key: ec.EllipticCurvePrivateKey,
        is_authority: bool = False,
        begins: timedelta = -DAY,
        ends: timedelta = DAY,
    ) -> Path:
        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder() .subject_name(subject)
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)]))
            .public_key(key.public_key()) .serial_number(x509.random_serial_number()) .not_valid_before(now + begins)
            .not_valid_after(now + ends)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )  # fmt: skip
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), False)
        signed = builder.sign(self._key, hashes.SHA256())
        path = self._folder / f"{self._name}-{name}.pem"
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(signed.public_bytes(serialization.Encoding.PEM) + pem)
        return path


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
