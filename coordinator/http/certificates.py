"""Certificates: the names in a caller's, and the coordinator's own authority."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from promptfed.coordinator.problems import OtherCertificate
from promptfed.coordinator.settings import Settings
from promptfed.shared.service.net import certificate_hash, certificates_in

SHOWN = "promptfed.certificate_names"


def names_shown(transport: asyncio.BaseTransport) -> frozenset[str]:
    """The common name and the DNS names of the caller's certificate, which TLS has verified; empty without one."""
    ssl_object: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    certificate: dict[str, Any] | None = ssl_object.getpeercert() if ssl_object is not None else None
    if not certificate:
        return frozenset()
    common = {value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"}
    others = {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}
    return frozenset(common | others)


def with_certificate(app: ASGIApp, names: frozenset[str]) -> ASGIApp:
    """The application for one connection: adds the certificate's names to each request."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SHOWN] = names
        await app(scope, receive, send)

    return call


def check_certificate(connection: HTTPConnection, name: str | None) -> None:
    """Refuse a client without a certificate for ``name`` (None: any), if the settings require certificates.

    Raises:
        OtherCertificate: it has not.
    """
    settings: Settings = connection.app.state.settings
    if settings.tls_client_ca is None:
        return
    shown: frozenset[str] = connection.scope.get(SHOWN, frozenset())
    if not shown:
        raise OtherCertificate("clients show a certificate here: give --client-cert and --client-key")
    if name is not None and name not in shown:
        raise OtherCertificate(f"the certificate is for {', '.join(sorted(shown))[:200]}, not for the client {name!r}")


def authority(settings: Settings) -> str | None:
    """The last certificate of the coordinator's chain, in PEM: its authority's if the chain is complete.

    None where the coordinator serves no TLS.
    """
    if settings.tls_cert is None:
        return None
    chain = certificates_in(settings.tls_cert.read_text())
    return chain[-1] if chain else None


def fingerprint(settings: Settings) -> str | None:
    """The SHA-256 of `authority`, in hexadecimal."""
    certificate = authority(settings)
    return certificate_hash(certificate) if certificate is not None else None
