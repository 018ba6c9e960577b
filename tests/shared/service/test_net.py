"""Proxies' addresses."""

from __future__ import annotations

import pytest

from promptfed.shared.service.net import proxy_parts


@pytest.mark.parametrize("url", ["http://u:p@h:1", "https://h:1", "h:1", "http://h:65535"])
def test_a_proxy_has_a_host_and_a_port(url: str) -> None:
    parts = proxy_parts(url)
    assert parts.hostname == "h"
    assert parts.port in (1, 65535)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("socks5://u:secret@h:1", "the proxy socks5://h:1 speaks SOCKS, which"),
        ("ftp://u:secret@h:1", "the proxy ftp://h:1 cannot be used: write http://HOST:PORT"),
        ("http://u:secret@h", "the proxy http://h cannot be used"),
        ("http://:1", "the proxy http://:1 cannot be used"),
        ("h:70000", "the proxy http://h:70000 cannot be used"),
        ("h:port", "the proxy http://h:port cannot be used"),
    ],
)
def test_any_other_is_named_without_its_password(url: str, words: str) -> None:
    with pytest.raises(ValueError, match="proxy") as caught:
        proxy_parts(url)
    assert str(caught.value).startswith(words)
    assert "secret" not in str(caught.value)
