"""The way to a coordinator: through which proxy, and which certificate authorities are trusted."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

from promptfed.shared.service.net import addresses_of, is_loopback
from promptfed.shared.service.tls import trusting

NO_PROXY = "none"
"""The value of a proxy setting that ignores the proxies of the environment."""


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
