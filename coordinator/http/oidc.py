"""Operators' tokens from an OpenID Connect issuer, such as that of a hospital or university.

A token is a JWT that the issuer has signed. It is believed where its signature is by one of the issuer's published
keys, with an asymmetric algorithm that fits this key, and it says that it is the issuer's, meant for us, in force,
whose and with which role. Source: OpenID Connect Core 1.0, section 3.1.3.7; RFC 8725 (best practices for JWT).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
import urllib.request
from concurrent.futures import Future
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any, NoReturn

import jwt

from promptfed.coordinator.problems import IssuerAway, TokenExpired, Unauthorized, WrongRole
from promptfed.coordinator.settings import Settings, is_safe
from promptfed.shared.api.access_schemas import LEVELS, OperatorRole

log = logging.getLogger("promptfed.coordinator")

# No HMAC: with it, whoever knows a public key could sign; and never `none`.
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
REQUIRED = ["exp", "iss", "aud", "sub"]
LEEWAY_SECONDS = 30
FETCH_SECONDS = 5.0  # for the issuer's configuration and keys together, however slowly they come
KEYS_SECONDS = 600.0  # for which the issuer's keys are taken to be as they were
AGAIN_SECONDS = 10.0  # before they are asked for again, whatever keys tokens name
MOST_BYTES = 1 << 20

Keys = dict[str | None, jwt.PyJWK]
"""Public keys by their id."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: only the issuer's own address is trusted."""

    def redirect_request(self, *_: Any) -> None:
        """Follow nothing."""


class Issuer:
    """The issuer that the settings name. Its keys are fetched when a token first needs them, and kept a while.

    One thread of its own fetches them, for all callers that wait: the other threads are for uploads. PyJWT's own
    ``PyJWKClient`` is not used: it blocks its caller, follows redirects and has no deadline for the whole answer.
    """

    def __init__(self, url: str, audience: str, role_claim: str, role_prefix: str):
        self._url = url
        self._audience = audience
        self._claim = role_claim.split(".")
        self._prefix = role_prefix
        self._keys: Keys = {}
        self._fetched = self._tried = -math.inf
        self._turn = asyncio.Lock()
        self._fetching: Future[Keys] | None = None

    @classmethod
    def of(cls, settings: Settings) -> Issuer | None:
        """The settings' issuer, if they name one."""
        if settings.oidc_issuer is None or settings.oidc_audience is None:
            return None
        return cls(settings.oidc_issuer, settings.oidc_audience, settings.oidc_role_claim, settings.oidc_role_prefix)

    @staticmethod
    def may_have_issued(token: str) -> bool:
        """Whether it looks like a JWT; tokens of our own are hexadecimal."""
        return token.count(".") == 2

    async def identify(self, token: str) -> tuple[str, OperatorRole, datetime]:
        """The token's owner, role, and end.

        Raises:
            Unauthorized, TokenExpired: it is not to be believed, or not any more.
            WrongRole: it gives no role here.
            IssuerAway: the issuer's keys cannot be had.
        """
        try:
            key = await self._key(jwt.get_unverified_header(token).get("kid"))
            claims = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=self._audience,
                issuer=self._url,
                leeway=LEEWAY_SECONDS,
                options={"require": REQUIRED},
            )
            ends = _end_of(claims["exp"])
        except jwt.ExpiredSignatureError:
            raise TokenExpired("this token has expired: sign in again") from None
        except jwt.PyJWTError as error:
            log.info("a token of the issuer's was refused: %s", error)
            self._refuse()
        if not claims["sub"].strip():
            log.info("a token of the issuer's was refused: its subject is empty")
            self._refuse()
        name = claims["sub"][:200]
        role = self._role(claims)
        if role is None:
            raise WrongRole(f"{self._url} gives {name} no role here: one of {', '.join(self._named_roles())} is needed")
        return f"oidc:{name}", role, ends

    def _refuse(self) -> NoReturn:
        raise Unauthorized(f"this is no token of {self._url} that is good here")

    def _named_roles(self) -> list[str]:
        return [self._prefix + role for role in LEVELS]

    def _role(self, claims: dict[str, Any]) -> OperatorRole | None:
        value: Any = claims
        for part in self._claim:
            value = value.get(part) if isinstance(value, dict) else None
        given = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        highest = [role for role in LEVELS if self._prefix + role in given]
        return highest[-1] if highest else None

    async def _key(self, kid: object) -> jwt.PyJWK:
        if not isinstance(kid, str | None):
            self._refuse()
        if kid in self._keys and time.monotonic() - self._fetched <= KEYS_SECONDS:
            return self._keys[kid]
        async with self._turn:
            now = time.monotonic()
            stale = now - self._fetched > KEYS_SECONDS
            if (stale or kid not in self._keys) and now - self._tried > AGAIN_SECONDS:
                self._tried = now
                self._keys = await self._fetch()
                self._fetched = now
            elif stale:
                raise self._away()
        key = self._keys.get(kid)
        if key is None:
            self._refuse()
        return key

    async def _fetch(self) -> Keys:
        """The keys, within ``FETCH_SECONDS``. A fetch that takes longer keeps its thread, and no other is started."""
        try:
            if self._fetching is None or self._fetching.done():
                self._fetching = _keys_of(self._url)
            fetching = asyncio.wrap_future(self._fetching)
            fetching.add_done_callback(_look_at)
            async with asyncio.timeout(FETCH_SECONDS):
                return await asyncio.shield(fetching)
        except (OSError, ValueError, KeyError, HTTPException, jwt.PyJWTError) as error:
            log.error("the keys of %s cannot be had: %s", self._url, str(error) or type(error).__name__)
            raise self._away() from None

    def _away(self) -> IssuerAway:
        return IssuerAway(f"the keys of {self._url} cannot be had just now: try again, or use a token from an admin")


def _look_at(fetching: asyncio.Future[Keys]) -> None:
    """Retrieve a fetch's error, which asyncio would log if the fetch ends after the deadline."""
    if not fetching.cancelled():
        fetching.exception()


def _end_of(exp: object) -> datetime:
    """The time of the claim ``exp``, which must be seconds since 1970. Raises PyJWTError."""
    if isinstance(exp, bool) or not isinstance(exp, int | float):
        raise jwt.DecodeError("exp is no number of seconds")
    try:
        return datetime.fromtimestamp(exp + LEEWAY_SECONDS, UTC)
    except (OverflowError, ValueError, OSError):
        raise jwt.DecodeError("exp is no moment") from None


def _keys_of(issuer: str) -> Future[Keys]:
    """Fetch the issuer's keys in a daemon thread."""
    fetched: Future[Keys] = Future()

    def fetch() -> None:
        try:
            fetched.set_result(_fetched(issuer))
        except Exception as error:
            fetched.set_exception(error)

    threading.Thread(target=fetch, name="oidc", daemon=True).start()
    return fetched


def _fetched(issuer: str) -> Keys:
    """The issuer's published keys for signatures. Raises OSError, HTTPException, ValueError, KeyError, PyJWTError."""
    until = time.monotonic() + FETCH_SECONDS
    about = _get(issuer.rstrip("/") + "/.well-known/openid-configuration", until)
    if about.get("issuer") != issuer:
        raise ValueError(f"it calls itself {about.get('issuer')!r}")
    keys = jwt.PyJWKSet.from_dict(_get(str(about["jwks_uri"]), until)).keys
    return {key.key_id: key for key in keys if key.key_type != "oct" and key.public_key_use in (None, "sig")}


def _get(url: str, until: float) -> dict[str, Any]:
    """The JSON object at ``url``, of at most ``MOST_BYTES``, before ``until`` (monotonic seconds)."""
    if not is_safe(url):
        raise ValueError(f"{url} is not https")
    body = b""
    with urllib.request.build_opener(_NoRedirect).open(url, timeout=FETCH_SECONDS) as answer:
        while part := answer.read1(MOST_BYTES):
            body += part
            if time.monotonic() > until:
                raise TimeoutError(f"{url} takes longer than {FETCH_SECONDS:g} s")
            if len(body) > MOST_BYTES:
                raise ValueError(f"{url} has more than {MOST_BYTES} bytes")
    content = json.loads(body)
    if not isinstance(content, dict):
        raise ValueError(f"{url} is no JSON object")
    return content
