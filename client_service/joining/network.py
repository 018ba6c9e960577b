"""What stands between this machine and a coordinator: ten faults, each with its cause.

The way is walked step by step: the name, the port, the proxy, TLS, HTTP. What comes after a broken step is left out.
"""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import SplitResult, unquote

import httpx
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from promptfed.client_service.http.coordinator_client import options_of
from promptfed.client_service.joining.checks import CLOCK_SECONDS, Check, Verdict
from promptfed.client_service.settings import Settings
from promptfed.shared.messages import Problem
from promptfed.shared.service.net import address_parts
from promptfed.shared.service.network import proxy_for, proxy_parts
from promptfed.shared.service.reasons import why
from promptfed.shared.service.tls import PROXY_LOGIN, certificates_in

SECONDS = 10.0  # for a connection, a handshake, or the answer to a short request
QUIET_SECONDS = 25.0  # of silence: longer than the 20 s after which many proxies end a connection
BODIES = (1_500_000, 500_000)  # bytes of a body that most limits refuse, and of one that most let pass
BODY_SECONDS = 30.0
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Fault:
    """A kind of fault: what the user can do about it, and what the network's administrators are asked for."""

    verdict: Verdict
    advice: str
    request: str


FAULTS = {
    "name": Fault("fail", "check the address, or name a proxy with --proxy", "make the name known to this machine"),
    "port": Fault("fail", "check the address and the port", "allow outgoing TCP connections to this host and port"),
    "proxy-refuses": Fault("fail", "ask your network team", "let the proxy connect to this host and port"),
    "proxy-login": Fault(
        "fail",
        "give --proxy http://USER:PASSWORD@HOST:PORT, or start px or cntlm for Kerberos and NTLM",
        "give this machine an account for the proxy, or let it connect without one",
    ),
    "tls-inspection": Fault(
        "fail",
        "give the inspecting authority's certificate with --ca-file",
        "exempt this host from TLS inspection, or send us the certificate of the inspecting authority",
    ),
    "certificate": Fault(
        "fail",
        "ask the coordinator's operator; an authority that you trust can be given with --ca-file",
        "nothing, unless TLS is inspected here: then exempt this host",
    ),
    "clock": Fault("fail", "set the clock by NTP", "let this machine reach a time server (NTP)"),
    "idle-cut": Fault("warn", "clients poll more often", "keep connections without traffic open for at least 60 s"),
    "buffering": Fault("warn", "the operator's page polls", "pass answers on as they arrive, without buffering"),
    "body-limit": Fault("warn", "longer updates are refused there", "let request bodies of any size pass"),
}


class _Broken(Exception):
    """The way ends here."""


@dataclass
class Way:
    """The way to the first address of the settings' coordinators, and what was found on it.

    Raises:
        ClientError: a certificate's file or the proxy of the settings cannot be used.
    """

    settings: Settings
    checks: list[Check] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)  # what was seen, by the fault

    def __post_init__(self) -> None:
        self.address, self._options = self.settings.first_coordinator, options_of(self.settings)
        self._parts = address_parts(self.address)
        self._host, self._port = _place(self._parts)
        proxy = proxy_for(self.address, self.settings.proxy)
        self._proxy = proxy_parts(proxy) if proxy is not None else None

    def walk(self) -> None:
        """Look at everything."""
        try:
            self._connect()
            self._ask()
        except _Broken:
            return
        with ThreadPoolExecutor() as both:
            for job in (both.submit(self._look_at_streams), both.submit(self._look_at_bodies)):
                job.result()

    def request(self) -> str | None:
        """A paragraph for the network's administrators; None without a fault."""
        if not self.faults:
            return None
        way = f"through the proxy {_shown(self._proxy)}" if self._proxy is not None else "directly"
        seen = "; ".join(f"{text} [{name}]" for name, text in self.faults.items())
        asked = "; ".join(dict.fromkeys(FAULTS[name].request for name in self.faults))
        return (
            f"To the network team: promptfed on the machine {socket.gethostname()} connects to {self._host}, TCP port "
            f"{self._port} ({self._parts.scheme.upper()}, HTTP/1.1), {way}. The connections are outgoing only. Seen on "
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {seen}. Please: {asked}."
        )

    # Steps

    def _connect(self) -> None:
        """The name, the port, the proxy and TLS."""
        with self._reached() as line:
            if self._parts.scheme != "https":
                return
            try:
                with self._options["verify"].wrap_socket(line, server_hostname=self._host):
                    self._pass("tls", "the certificate is trusted")
                    return
            except ssl.SSLCertVerificationError as error:
                refused = error
            except OSError as error:
                text = f"the connection to {self._host}:{self._port} ends while TLS begins: {why(error)}"
                raise self._found("port", text) from None
        self._look_at_certificate(refused)

    @contextmanager
    def _reached(self) -> Iterator[socket.socket]:
        """A connection to the coordinator, through the proxy if there is one."""
        host, port = _place(self._proxy or self._parts)
        what = "the proxy" if self._proxy is not None else "the coordinator"
        try:
            line = socket.create_connection((host, port), SECONDS)
        except socket.gaierror:
            raise self._found("name", f"the name of {what}, {host}, is not resolved") from None
        except OSError as error:
            raise self._found("port", f"port {port} of {what} {host} is closed: {why(error)}") from None
        with line:
            if self._proxy is not None and self._parts.scheme == "https":
                line = self._tunnel(line, self._proxy)
            yield line

    def _tunnel(self, line: socket.socket, proxy: SplitResult) -> socket.socket:
        """The same connection, which the proxy has joined to the coordinator."""
        if proxy.scheme == "https":
            raise self._done("proxy", "warn", "it speaks TLS itself, and is not looked at step by step")
        place = f"{self._host}:{self._port}"
        head = [f"CONNECT {place} HTTP/1.1", f"Host: {place}"]
        if proxy.username is not None:
            login = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
            head.append(f"Proxy-Authorization: Basic {base64.b64encode(login.encode()).decode()}")
        try:
            line.sendall("\r\n".join([*head, "", ""]).encode())
            answer = http.client.HTTPResponse(line, method="CONNECT")
            answer.begin()
        except (OSError, http.client.HTTPException) as error:
            text = f"the proxy {_shown(proxy)} ends the connection instead of an answer: {why(error)}"
            raise self._found("proxy-refuses", text) from None
        if answer.status != 200:
            raise self._refused(answer.status, dict(answer.headers))
        self._pass("proxy", f"{_shown(proxy)} connects to {place}")
        return line

    def _refused(self, status: int, headers: dict[str, str]) -> _Broken:
        shown, told = _shown(self._proxy), {name.lower(): value for name, value in headers.items()}
        if status == PROXY_LOGIN:
            scheme = told.get("proxy-authenticate", "").partition(" ")[0] or "unknown"
            given = self._proxy is not None and self._proxy.username is not None
            how = "does not accept the login that was given" if given else "wants a login"
            return self._found("proxy-login", f"the proxy {shown} {how} ({status}, {scheme})")
        if status < 500:
            text = f"the proxy {shown} refuses to connect to {self._host}:{self._port} ({status})"
            return self._found("proxy-refuses", text)
        if "DNS" in told.get("x-squid-error", ""):
            return self._found("name", f"the proxy {shown} does not resolve {self._host} ({status})")
        return self._found("port", f"the proxy {shown} reaches nobody at {self._host}:{self._port} ({status})")

    def _look_at_certificate(self, error: ssl.SSLCertVerificationError) -> None:
        """Why a certificate was refused: it is asked again over a connection that nobody vouches for."""
        leaf, date, authority = self._unverified()
        issuer = leaf.issuer.rfc4514_string()
        begins, ends, now = leaf.not_valid_before_utc, leaf.not_valid_after_utc, datetime.now(UTC)
        if not begins <= now <= ends:
            if date is not None and begins <= date <= ends:
                raise self._found("clock", f"this machine's clock is {_apart(now, date)} the coordinator's")
            text = "has expired" if now > ends else "is not valid yet"
            raise self._found("certificate", f"the certificate of {self._host} {text} ({begins:%F} to {ends:%F})")
        if authority is not None and not _is_of(leaf, authority):
            raise self._found("tls-inspection", f"TLS to {self._host} is opened on the way, by {issuer}")
        text = f"the certificate of {self._host}, signed by {issuer}, is not trusted here: {why(error)}"
        raise self._found("certificate", text)

    def _unverified(self) -> tuple[x509.Certificate, datetime | None, x509.Certificate | None]:
        """The certificate that is shown, the time at the other end, and the authority that the coordinator names."""
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE  # nothing secret is sent
        own = self.settings.client_cert
        if own is not None:
            anybody.load_cert_chain(own, self.settings.client_key, lambda: "")
        with self._reached() as line, anybody.wrap_socket(line, server_hostname=self._host) as secured:
            leaf = x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")
            try:
                secured.sendall(f"GET /v1/authority HTTP/1.1\r\nHost: {self._parts.netloc}\r\n\r\n".encode())
                answer = http.client.HTTPResponse(secured)
                answer.begin()
                return leaf, _date(answer.headers.get("date")), _certificate(answer.read(1 << 16).decode())
            except (OSError, http.client.HTTPException, UnicodeDecodeError):
                return leaf, None, None

    def _ask(self) -> None:
        """Whether a coordinator answers, and at which time."""
        try:
            with self._http() as line:
                answer = line.get(f"{self.address}/healthz")
        except httpx.ProxyError as error:
            raise self._refused(int(str(error)[:3]), {}) from None
        except httpx.TransportError as error:
            raise self._done("http", "fail", f"no answer: {why(error)}") from None
        if not _is_of_coordinator(answer):
            if answer.status_code == PROXY_LOGIN or self._proxy is not None:
                raise self._refused(answer.status_code, dict(answer.headers))
            raise self._done("http", "fail", f"{answer.status_code}, which no coordinator answers: check the address")
        self._pass("http", "a coordinator answers")
        date, now = _date(answer.headers.get("date")), datetime.now(UTC)
        if date is not None and abs((now - date).total_seconds()) > CLOCK_SECONDS:
            self._found("clock", f"this machine's clock is {_apart(now, date)} the coordinator's", verdict="warn")

    def _look_at_streams(self) -> None:
        """Whether a stream arrives as it is sent, and whether a connection without traffic stays."""
        begun, url = time.monotonic(), f"{self.address}/v1/probe?quiet={QUIET_SECONDS:g}"
        first, ended = None, "the answer ends too early"
        try:
            with self._http(QUIET_SECONDS + SECONDS) as line, line.stream("GET", url) as answer:
                if answer.status_code in (404, 405):
                    self._done("stream", "warn", "not tried: the coordinator is of an earlier version")
                    return
                if not answer.is_success:
                    ended = f"{answer.status_code} is answered"
                for part in answer.iter_bytes():
                    first, ended = first or time.monotonic(), "" if b"end" in part else ended
        except httpx.TransportError as error:
            ended = why(error)
        heard = time.monotonic()
        if ended:
            self._found("idle-cut", f"after {heard - (first or begun):.0f} s without traffic, {ended}")
        if (first or heard) - begun > QUIET_SECONDS / 2:
            self._found("buffering", f"what was sent at once arrived after {(first or heard) - begun:.0f} s, or never")
        if not {"idle-cut", "buffering"} & self.faults.keys():
            self._pass("stream", f"arrives as it is sent, and survives {QUIET_SECONDS:g} s without traffic")

    def _look_at_bodies(self) -> None:
        """Whether a long request passes."""
        results = [self._sent(size) for size in BODIES]
        if results[0] is None:
            self._pass("bodies", f"a request of {BODIES[0] / 1e6:g} MB passes")
        elif results[1] is None:
            text = (
                f"a request of {BODIES[0] / 1e6:g} MB does not pass ({results[0]}), one of {BODIES[1] / 1e6:g} MB does"
            )
            self._found("body-limit", text)
        else:
            self._done("bodies", "warn", f"long requests do not pass: {results[1]}")

    def _sent(self, size: int) -> str | None:
        """Why a body of ``size`` bytes did not reach the coordinator; None if it did."""
        try:
            with self._http(BODY_SECONDS) as line:
                answer = line.post(f"{self.address}/v1/probe", content=bytes(size))
        except httpx.TransportError as error:
            return why(error)
        return None if _is_of_coordinator(answer) else f"{answer.status_code} {answer.reason_phrase}".strip()

    # Notes

    def _http(self, seconds: float = SECONDS) -> httpx.Client:
        return httpx.Client(timeout=seconds, **self._options)

    def _pass(self, name: str, text: str) -> None:
        self.checks.append(Check(name, "pass", text))

    def _done(self, name: str, verdict: Verdict, text: str) -> _Broken:
        self.checks.append(Check(name, verdict, text))
        return _Broken()

    def _found(self, name: str, text: str, verdict: Verdict | None = None) -> _Broken:
        fault = FAULTS[name]
        self.faults[name] = text
        self.checks.append(Check(name, verdict or fault.verdict, text, fault.advice))
        return _Broken()


def _place(parts: SplitResult) -> tuple[str, int]:
    return parts.hostname or "", parts.port or PORTS[parts.scheme]


def _shown(proxy: SplitResult | None) -> str:
    return "" if proxy is None else proxy.netloc.rpartition("@")[2]


def _apart(now: datetime, date: datetime) -> str:
    seconds = (now - date).total_seconds()
    return f"{abs(seconds):,.0f} s {'ahead of' if seconds > 0 else 'behind'}"


def _date(text: str | None) -> datetime | None:
    try:
        return parsedate_to_datetime(text or "")
    except ValueError:
        return None


def _certificate(text: str) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate(certificates_in(text)[0].encode())
    except (ValueError, IndexError):
        return None


def _is_of(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether it is the authority's own certificate, or one that the authority has signed."""
    if leaf == authority:
        return True
    try:
        leaf.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return leaf.issuer == authority.issuer  # by an authority in between, of the same root
    return True


def _is_of_coordinator(answer: httpx.Response) -> bool:
    try:
        told: Any = answer.json()
        return told == {"status": "ok"} or bool(Problem.model_validate(told))
    except ValueError:
        return False
