"""Proxies' addresses, and why no connection comes about."""

from __future__ import annotations

import socket
import ssl
from typing import Any

import httpx
import pytest

from promptfed.shared.service import net
from promptfed.shared.service.net import explained, http_options, proxy_parts, refused_by_proxy


@pytest.mark.parametrize("url", ["http://u:p@h:1", "https://h:1", "h:1", "http://h:65535"])
def test_a_proxy_has_a_host_and_a_port(url: str) -> None:
    parts = proxy_parts(url)
    assert parts.hostname == "h"
    assert parts.port in (1, 65535)


@pytest.mark.parametrize(("url", "words"), [
    ("socks5://u:secret@h:1", "the proxy socks5://h:1 speaks SOCKS, which"),
    ("ftp://u:secret@h:1", "the proxy ftp://h:1 cannot be used: write http://HOST:PORT"),
    ("http://u:secret@h", "the proxy http://h cannot be used"), ("http://:1", "the proxy http://:1 cannot be used"),
    ("h:70000", "the proxy http://h:70000 cannot be used"), ("h:port", "the proxy http://h:port cannot be used"),
])  # fmt: skip
def test_any_other_is_named_without_its_password(url: str, words: str) -> None:
    with pytest.raises(ValueError, match="proxy") as caught:
        proxy_parts(url)
    assert str(caught.value).startswith(words)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("status", "words"), [
    (399, None), (400, "refuses to connect to a (400)"), (407, "wants a login before it connects to a"),
    (499, "refuses to connect to a (499)"), (500, None), (0, None),
])  # fmt: skip
def test_a_proxys_refusal_may_pass_or_not(status: int, words: str | None) -> None:
    said = refused_by_proxy(status, "a")
    assert (said is None) if words is None else (words in (said or ""))
    assert explained(httpx.ProxyError(f"{status:03d} Because"), "a") == said
    assert explained(httpx.ProxyError("Because"), "a") is None


@pytest.mark.parametrize(("code", "words"), [
    (net.EXPIRED, "has expired"), (net.NOT_YET_VALID, "is not valid yet"),
    (net.OTHER_HOST, "is for another host name"), (net.OTHER_ADDRESS, "is for another host name"),
    (18, "is not signed by an authority that this machine trusts: give the authority's certificate with --ca-file"),
])  # fmt: skip
def test_a_certificate_is_refused_for_its_reason(code: int, words: str) -> None:
    refusal = ssl.SSLCertVerificationError("no")
    refusal.verify_code = code
    outer = httpx.ConnectError("failed")
    outer.__cause__ = refusal
    assert words in (explained(outer, "https://a") or "")
    assert net.is_certificate_error(outer)
    while_told = OSError("closed")
    while_told.__context__ = ssl.SSLCertVerificationError("expired")
    assert net.is_certificate_error(while_told)
    assert not net.is_certificate_error(httpx.ConnectError("failed"))


@pytest.mark.parametrize(
    ("reason", "words"),
    [("WRONG_VERSION_NUMBER", "does not speak TLS"), ("RECORD_LAYER_FAILURE", "does not speak TLS"), ("OTHER", None)],
)
def test_an_address_that_speaks_no_tls_is_told(reason: str, words: str | None) -> None:
    error = ssl.SSLError("no")
    error.reason = reason
    said = explained(error, "https://a")
    assert (said is None) if words is None else (words in (said or ""))


def test_only_a_broken_answer_of_plain_http_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def connect(place: tuple[str, int], seconds: float) -> socket.socket:
        asked.append(place)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    for error in (httpx.RemoteProtocolError("x"), httpx.ReadError("x"), httpx.ConnectError("x")):
        for address in ("http://a", "http://b:81", "https://a"):
            assert explained(error, address) is None
    assert asked == [("a", 80), ("b", 81)] * 2
    monkeypatch.setattr(net, "_speaks_tls", lambda address: True)
    assert explained(httpx.ReadError("x"), "http://a:1") == "http://a:1 speaks TLS: use https://a:1"


@pytest.mark.parametrize(("coordinators", "proxy", "environment", "found"), [
    ("http://127.0.0.1:1", None, {"http": "socks5://h:1"}, (False, None)),
    ("http://127.0.0.1:1,http://a", None, {"http": "http://h:1"}, (True, None)),
    ("http://a", None, {"http": "socks5://h:1"}, "speaks SOCKS"), ("http://a", None, {"https": "h"}, "cannot be used"),
    ("http://a", None, {"all": "h"}, "cannot be used"), ("http://a", None, {"ftp": "h"}, (True, None)),
    ("http://a", net.NO_PROXY, {"http": "h"}, (False, None)),
    ("http://a", "https://u:p@h:1", {}, (False, "https://h:1")),
    ("http://127.0.0.1:1", "h:1", {}, (False, "http://h:1")), ("http://a", "socks5://h:1", {}, "speaks SOCKS"),
])  # fmt: skip
def test_a_proxy_is_the_given_one_or_the_environments(
    monkeypatch: pytest.MonkeyPatch, coordinators: str, proxy: str | None, environment: dict[str, str], found: Any
) -> None:
    monkeypatch.setattr(net, "getproxies", lambda: environment)
    verify = ssl.create_default_context()
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            http_options(coordinators, verify, proxy)
        return
    options = http_options(coordinators, verify, proxy)
    given = options.pop("proxy", None)
    assert options == {"verify": verify, "follow_redirects": False, "http2": False, "trust_env": found[0]}
    assert (given and str(given.url)) == found[1]
    assert given is None or (given.ssl_context is verify) == (given.url.scheme == "https")


def test_a_file_of_authorities_must_hold_one(tmp_path: Any) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    for name in ("ca.pem", "none.pem"):
        with pytest.raises(ValueError, match=r"--ca-file .* cannot be used: .*; give the PEM file"):
            net.trust(tmp_path / name)
