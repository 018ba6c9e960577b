"""`promptfed doctor --coordinator`: ten faults of a network, each made by something that has it."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.client_service.joining import doctor as doctor_module
from promptfed.client_service.joining import network
from promptfed.client_service.joining.network import FAULTS, Way
from promptfed.client_service.settings import make_settings
from promptfed.sdk.errors import Exit
from tests.networks.conftest import HOST
from tests.support import exports
from tests.support.authority import DAY, Authority
from tests.support.coordinators import InThread, in_thread
from tests.support.networks import Line, SiteProxy
from tests.support.proxy import Proxy
from tests.support.real_proxies import mitmproxy, squid

LOGIN = "ward:p@ss"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is quiet for a moment only."""
    monkeypatch.setattr(network, "QUIET_SECONDS", 0.6)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    """A coordinator without TLS: what stands before it reads requests, as where it inspects TLS."""
    with in_thread(tmp_path_factory.mktemp("plain") / "data") as server:
        yield server


def look(url: str, **settings: Any) -> Way:
    given = {"federation": "none", "data": "none", "name": "ward", "state_dir": Path("/nowhere")} | settings
    way = Way(make_settings(coordinator=url, **given))
    way.walk()
    return way


def named(coordinator: InThread) -> str:
    return f"https://{HOST}:{coordinator.url.rpartition(':')[2]}"


def expect(way: Way, fault: str, *texts: str) -> None:
    """It is the only fault; the words name it, and the paragraph says who is to be reached and what is asked."""
    assert list(way.faults) == [fault], way.checks
    for text in texts:
        assert text in way.faults[fault]
    [check] = [check for check in way.checks if check.text == way.faults[fault]]
    assert (check.name, check.advice) == (fault, FAULTS[fault].advice)
    assert check.verdict in ("warn", "fail")
    request = way.request()
    assert request is not None
    host, port = way.address.partition("://")[2].split(":")
    for told in (host, f"TCP port {port}", way.faults[fault], FAULTS[fault].request):
        assert told in request
    assert "p@ss" not in request


def test_nothing_is_wrong(coordinator: InThread, authority: Authority) -> None:
    way = look(coordinator.url, ca_file=authority.file)
    assert [(check.name, check.verdict) for check in way.checks[:2]] == [("tls", "pass"), ("http", "pass")]
    assert {check.name for check in way.checks[2:]} == {"stream", "bodies"}
    assert {check.verdict for check in way.checks} == {"pass"}
    assert way.request() is None


def test_nothing_is_wrong_with_a_proxy(coordinator: InThread, authority: Authority) -> None:
    with SiteProxy(coordinator.url, login=LOGIN) as proxy:
        through = proxy.url.replace("://", "://ward:p%40ss@")
        way = look(named(coordinator), ca_file=authority.file, proxy=through)
    assert {check.name for check in way.checks} == {"proxy", "tls", "http", "stream", "bodies"}
    assert {check.verdict for check in way.checks} == {"pass"}


def test_the_proxy_refuses(coordinator: InThread, authority: Authority) -> None:
    with SiteProxy(coordinator.url, refusal=403) as proxy:
        way = look(named(coordinator), ca_file=authority.file, proxy=proxy.url)
    expect(way, "proxy-refuses", "403", HOST)
    assert f"through the proxy {proxy.url.removeprefix('http://')}" in str(way.request())


@pytest.mark.parametrize(("login", "text"), [("", "wants a login"), ("ward:wrong@", "does not accept the login")])
def test_the_proxy_wants_a_login(login: str, text: str, coordinator: InThread, authority: Authority) -> None:
    with SiteProxy(coordinator.url, login=LOGIN, scheme="Negotiate") as proxy:
        url = proxy.url.replace("://", f"://{login}")
        expect(look(named(coordinator), ca_file=authority.file, proxy=url), "proxy-login", text, "Negotiate")


def test_tls_is_inspected(coordinator: InThread, authority: Authority, tmp_path: Path) -> None:
    inspector = Authority(tmp_path, "inspector of ACME")
    with SiteProxy(coordinator.url, inspecting=inspector.sign("all", HOST)) as proxy:
        way = look(named(coordinator), ca_file=authority.file, proxy=proxy.url)
        expect(way, "tls-inspection", "CN=inspector of ACME")
        assert look(named(coordinator), ca_file=inspector.file, proxy=proxy.url).faults == {}


def test_idle_connections_are_cut(coordinator: InThread, authority: Authority) -> None:
    with SiteProxy(coordinator.url, Line(idle=0.3)) as proxy:
        expect(look(named(coordinator), ca_file=authority.file, proxy=proxy.url), "idle-cut", "without traffic")


def test_streams_are_buffered(plain: InThread) -> None:
    with Proxy(plain.url, lambda asked: "none") as proxy:
        expect(look(proxy.url), "buffering", "arrived after")


def test_bodies_are_limited(plain: InThread) -> None:
    def limited(asked: Any) -> Any:
        return "too-large" if asked.size > 1_000_000 else "none"

    with Proxy(plain.url, limited) as proxy:
        way = look(proxy.url)
    assert set(way.faults) == {"buffering", "body-limit"}, way.checks
    assert "1.5 MB" in way.faults["body-limit"]
    assert "16 MB" in str(way.request())


def test_the_name_is_not_resolved() -> None:
    expect(look("https://no-such-host.invalid:443"), "name", "no-such-host.invalid")


def test_the_port_is_closed() -> None:
    expect(look("https://127.0.0.1:1"), "port", "nothing listens there")


def test_the_proxy_reaches_nobody(coordinator: InThread, authority: Authority) -> None:
    with SiteProxy(coordinator.url, refusal=503) as proxy:
        expect(look(named(coordinator), ca_file=authority.file, proxy=proxy.url), "port", "503")


def test_the_proxy_resolves_no_such_name(coordinator: InThread) -> None:
    with SiteProxy(coordinator.url, refusal=503, header="X-Squid-Error: ERR_DNS_FAIL 0") as proxy:
        expect(look(named(coordinator), proxy=proxy.url), "name", f"does not resolve {HOST}")


def test_the_certificate_is_not_trusted(coordinator: InThread) -> None:
    expect(look(coordinator.url), "certificate", "not trusted here", "CN=authority")


@contextmanager
def away(certificate: Path | None, ahead: timedelta) -> Iterator[str]:
    """The address of a server like a coordinator, whose clock is ``ahead`` of this one's."""

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def date_time_string(self, timestamp: float | None = None) -> str:
            return format_datetime(datetime.now(UTC) + ahead, usegmt=True)

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = b'{"status": "ok"}' if self.path == "/healthz" else b'{"type": "x", "title": "x", "status": 404}'
            body = b"data: begin\n\ndata: end\n\n" if "/probe" in self.path else body
            self.send_response(404 if b"404" in body else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        if certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http{'s' if certificate is not None else ''}://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_certificate_has_expired(authority: Authority) -> None:
    old = authority.sign("old", "127.0.0.1", begins=-9 * DAY, ends=-2 * DAY)
    with away(old, timedelta(0)) as url:
        expect(look(url, ca_file=authority.file), "certificate", "has expired")


def test_the_clock_is_wrong_where_the_certificate_is_valid_at_the_other_end(authority: Authority) -> None:
    old = authority.sign("then", "127.0.0.1", begins=-9 * DAY, ends=-2 * DAY)
    with away(old, -3 * DAY) as url:
        expect(look(url, ca_file=authority.file), "clock", "ahead of the coordinator's")


def test_the_clock_is_wrong_though_the_certificate_is_valid() -> None:
    with away(None, timedelta(minutes=5)) as url:
        expect(look(url), "clock", "behind the coordinator's")


def test_a_probe_s_body_is_limited_and_its_pause_too(coordinator: InThread) -> None:
    assert coordinator.http.post("/v1/probe", content=bytes(2 << 20)).status_code == 200
    assert coordinator.http.post("/v1/probe", content=bytes((2 << 20) + 1)).status_code == 413
    assert coordinator.http.get("/v1/probe?quiet=61").status_code == 422


@pytest.mark.extended
def test_squid_wants_a_login_and_reaches_nobody_at_a_closed_port(coordinator: InThread, authority: Authority) -> None:
    with squid(HOST) as (url, _):
        expect(look(named(coordinator), ca_file=authority.file, proxy=url), "proxy-login", "Basic")
        through = url.replace("://", "://ward:p%40ss@")
        assert look(named(coordinator), ca_file=authority.file, proxy=through).faults == {}
        expect(look("https://127.0.0.1:1", proxy=through), "port", "503")


@pytest.mark.extended
def test_mitmproxy_inspects_tls(coordinator: InThread, authority: Authority, tmp_path: Path) -> None:
    with mitmproxy(tmp_path, authority) as (url, inspector):
        expect(look(coordinator.url, ca_file=authority.file, proxy=url), "tls-inspection", "CN=mitmproxy")
        expect(look(coordinator.url, ca_file=inspector, proxy=url), "buffering")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = exports.backbone()
    monkeypatch.setattr(doctor_module, "open_backbone", lambda spec, device, allowed, file: backbone)


@pytest.mark.extended
@pytest.mark.usefixtures("loaded")
def test_the_command_prints_the_paragraph(coordinator: InThread, authority: Authority, tmp_path: Path) -> None:
    given = ["doctor", "--coordinator", named(coordinator), "--ca-file", str(authority.file)]
    with SiteProxy(coordinator.url, login=LOGIN) as proxy:
        done = CliRunner().invoke(app, [*given, "--proxy", proxy.url])
        assert done.exit_code == Exit.BAD_INPUT
        assert "fail  proxy-login" in done.stdout
        assert "To the network team: " in done.stdout
        # With a federation it is asked first, and the network is looked at where nobody answers.
        token = tmp_path / "token"
        token.write_text("0" * 64)
        given += ["--federation", "eyes", "--enrolment-token-file", str(token), "--json"]
        done = CliRunner().invoke(app, [*given, "--proxy", proxy.url])
    told = json.loads(done.stdout)
    assert list(told["network"]["faults"]) == ["proxy-login"]
    assert told["network"]["request"].startswith("To the network team: ")
    assert {"proxy-login", "coordinator"} <= {check["name"] for check in told["checks"] if check["verdict"] == "fail"}
