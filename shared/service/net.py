"""Connections of both services: whom TLS trusts, proxies, and why a connection does not come about."""

from __future__ import annotations

import hashlib
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

from promptfed.shared.service.addresses import addresses_of, is_loopback
from promptfed.shared.service.reasons import why

CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
PROBE_SECONDS = 3.0
PROXY_LOGIN = 407

# X.509 verification results of OpenSSL
NOT_YET_VALID, EXPIRED, OTHER_HOST, OTHER_ADDRESS = 9, 10, 62, 64

NO_PROXY = "none"
"""The value of a proxy setting that ignores the proxies of the environment."""


def certificates_in(text: str) -> list[str]:
    """The certificates of a PEM text, in order."""
    return CERTIFICATE.findall(text)


def certificate_hash(certificate: str) -> str:
    """SHA-256 of a PEM certificate's DER form in hexadecimal. Raises ValueError."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()


def trusting(ca_file: Path) -> ssl.SSLContext:
    """Trusts the certificates in ``ca_file`` alone, authorities or not.

    Raises:
        ValueError: it cannot be read or holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        text = f"--ca-file {ca_file} cannot be used: {why(error)}"
        raise ValueError(f"{text}; give the PEM file of the coordinator's authority") from None
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the default of Python 3.13
    return context


def is_certificate_error(error: BaseException) -> bool:
    """Whether the other side's certificate was refused."""
    return any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _causes(error))


def explained(error: BaseException, address: str) -> str | None:
    """Why no connection to ``address`` comes about and what to do, if TLS or a proxy's refusal is the reason.

    It opens a connection of its own where an ``http://`` address was answered with nothing.
    """
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _refused(cause, address)
        if isinstance(cause, ssl.SSLError) and cause.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return f"{address} does not speak TLS: use http:// if nobody else can read the connection"
    import httpx  # the coordinator, which has none, only reads certificates here

    if isinstance(error, httpx.ProxyError):
        return refused_by_proxy(int(str(error)[:3]) if str(error)[:3].isdecimal() else 0, address)
    broken = isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError))
    if broken and address.startswith("http://") and _speaks_tls(address):
        return f"{address} speaks TLS: use https://{address.removeprefix('http://')}"
    return None


def refused_by_proxy(status: int, address: str) -> str | None:
    """What a proxy's refusal means; None if it may pass, as where the coordinator is away."""
    if status == PROXY_LOGIN:
        return (
            f"the proxy wants a login before it connects to {address}: give it as http://USER:PASSWORD@HOST:PORT, or "
            "use a local helper for Kerberos and NTLM"
        )
    if 400 <= status < 500:
        return f"the proxy refuses to connect to {address} ({status}): ask your network team to allow it"
    return None


def _refused(error: ssl.SSLCertVerificationError, address: str) -> str:
    code = getattr(error, "verify_code", None)  # which TLS sets, and no constructor
    if code == EXPIRED:
        return f"the certificate of {address} has expired: ask its operator to renew it, or check this machine's clock"
    if code == NOT_YET_VALID:
        return f"the certificate of {address} is not valid yet: check this machine's clock"
    if code in (OTHER_HOST, OTHER_ADDRESS):
        return f"the certificate of {address} is for another host name: use the address that the operator gave"
    text = f"the certificate of {address} is not signed by an authority that this machine trusts"
    return f"{text}: give the authority's certificate with --ca-file"


def _speaks_tls(address: str) -> bool:
    parts = urlsplit(address)
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    try:
        place = (parts.hostname or "", parts.port or 80)
        with socket.create_connection(place, PROBE_SECONDS) as line, anybody.wrap_socket(line):
            return True
    except OSError:
        return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def trust(ca_file: Path | None) -> ssl.SSLContext:
    """Trusts the certificates in ``ca_file`` alone, or without one the authorities that this machine's system trusts.

    Raises:
        ValueError: the file cannot be read or holds no certificate.
    """
    if ca_file is not None:
        return trusting(ca_file)
    import truststore  # the coordinator, which calls nobody by httpx, has none

    return truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def http_options(coordinators: str, verify: ssl.SSLContext, proxy: str | None) -> dict[str, Any]:
    """Options of an httpx client for ``coordinators``.

    Args:
        coordinators: addresses, separated by commas.
        verify: the trusted authorities.
        proxy: its URL, `NO_PROXY`, or None for those of the environment, which loopback is not asked through: a proxy
            could not reach it.

    Raises:
        ValueError: a proxy that would be used cannot be.
    """
    options: dict[str, Any] = {"verify": verify, "follow_redirects": False, "http2": False, "trust_env": False}
    if proxy is None and not all(is_loopback(_host(address)) for address in addresses_of(coordinators)):
        for kind in {"http", "https", "all"} & (proxies := getproxies()).keys():
            proxy_parts(proxies[kind])
        options["trust_env"] = True
    elif proxy not in (None, NO_PROXY):
        import httpx  # see `trust`

        parts = proxy_parts(proxy)
        options["proxy"] = httpx.Proxy(parts.geturl(), ssl_context=verify if parts.scheme == "https" else None)
    return options


def proxy_parts(url: str) -> SplitResult:
    """The parts of a proxy's URL; ``http://`` may be left out. Raises ValueError if it cannot be used."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    shown = f"the proxy {parts.scheme}://{parts.netloc.rpartition('@')[2]}"  # without its password
    if parts.scheme.startswith("socks"):
        raise ValueError(f"{shown} speaks SOCKS, which promptfed does not: give an HTTP proxy with --proxy")
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"{shown} cannot be used: write http://HOST:PORT or http://USER:PASSWORD@HOST:PORT")
    return parts


def _host(address: str) -> str:
    return urlsplit(address).hostname or ""
