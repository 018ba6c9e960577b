"""Networking of both services: addresses, TLS, proxies, and how many files may be open."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

from promptfed.shared import machine
from promptfed.shared.service.reasons import why

CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
PROBE_SECONDS = 3.0
PROXY_LOGIN = 407

# X.509 verification results of OpenSSL
NOT_YET_VALID, EXPIRED, OTHER_HOST, OTHER_ADDRESS = 9, 10, 62, 64

NO_PROXY = "none"
"""The value of a proxy setting that ignores the proxies of the environment."""

QUIET_SECONDS = 3.0  # without a byte, after which a caller asks ``/readyz`` whether the coordinator is there
GONE_SECONDS = 5.0  # without a byte and without an answer to that: the caller moves on to the next address
ENOUGH_FILES = 65_536  # where the system names no limit
KEPT_FILES = 400  # for the database's connections, blobs, uploads and the process itself
HOW_TO_RAISE = "raise it: ulimit -n, LimitNOFILE= of the systemd unit, or ulimits of the container"


def is_loopback(host: str) -> bool:
    """Whether nothing outside this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound to ``host`` and ``port`` (0: any free one). Raises OSError where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio switches Nagle's algorithm off; without, every answer would wait 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError:
        listening.close()
        raise
    return listening


def url_of(listening: socket.socket, host: str, scheme: str = "http") -> str:
    """The address of what listens on ``host``."""
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{listening.getsockname()[1]}"


def address_parts(address: str) -> SplitResult:
    """The parts of a service's address. Raises ValueError if it is none."""
    try:
        parts = urlsplit(address)
        is_address = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
    except ValueError:  # a port beyond 65535, a bracket that is not closed
        is_address = False
    if not is_address or not address.isprintable() or " " in address:
        raise ValueError(f"{address!r} is not an address: write http://host:port or https://host")
    return parts


def addresses_of(text: str) -> list[str]:
    """The addresses that a setting names, separated by commas, each once and without a slash at its end."""
    return list(dict.fromkeys(part.strip().rstrip("/") for part in text.split(",") if part.strip()))


def check_addresses(text: str) -> str:
    """The addresses of ``text``, separated by commas. Raises ValueError unless each has a scheme and a host alone."""
    for address in addresses_of(text) or [text]:
        parts = address_parts(address)
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("must hold scheme, host, port and path only: credentials go into files")
    return ",".join(addresses_of(text))


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
        for kind in {"http", "https", "all"} & (known := getproxies()).keys():
            proxy_parts(known[kind])
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


class Addresses:
    """Which coordinator to ask next, of several that wait for each other: one of those ``given``, by commas."""

    def __init__(self, given: str):
        self.all = addresses_of(given)
        self.current = self.all[0]
        self._silent: dict[str, float] = {}

    @property
    def several(self) -> bool:
        """Whether there is another one to go to."""
        return len(self.all) > 1

    def note_silent(self, address: str) -> None:
        """This one does not answer: others come first for a while."""
        self._silent[address] = time.monotonic() + GONE_SECONDS

    def move_on(self) -> None:
        """Make the next address the current one, of those that have not been silent a moment ago if there are any."""
        at = self.all.index(self.current)
        following = [*self.all[at + 1 :], *self.all[: at + 1]]
        now = time.monotonic()
        self.current = next((one for one in following if self._silent.get(one, 0.0) <= now), following[0])


def raise_open_files() -> None:
    """Allow this process as many open files as the system lets it have: the usual 1,024 do not do for 1,000 clients."""
    if (limits := machine.file_limits()) is not None:
        machine.raise_file_limit(max(limits[0], open_files()))


def open_files() -> int:
    """The limit on open files that `raise_open_files` reaches."""
    limits = machine.file_limits()
    # Where nothing is the limit (macOS says so), the kernel still has one, and refuses to be asked for more.
    return ENOUGH_FILES if limits is None or limits[1] == machine.UNLIMITED else limits[1]


def most_connections() -> int:
    """How many connections leave enough open files for everything else."""
    limits = machine.file_limits()
    return ENOUGH_FILES if limits is None or limits[0] == machine.UNLIMITED else connections_of(limits[0])


def connections_of(files: int) -> int:
    """How many connections a coordinator accepts with so many open files: each client has one."""
    return max(files - KEPT_FILES, files // 2)
