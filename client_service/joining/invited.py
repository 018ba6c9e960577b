"""An accepted invitation: where to join, with which token, and the authority that vouches for the coordinator."""

from __future__ import annotations

import json
import ssl
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.settings import Settings, make_settings
from promptfed.shared.files import write_whole
from promptfed.shared.service.digests import CHANGED, Damaged, is_proven
from promptfed.shared.service.invitation import Invitation, InvitationError, decode
from promptfed.shared.service.net import (
    certificate_hash,
    certificates_in,
    explained,
    http_options,
    is_certificate_error,
    trust,
)
from promptfed.shared.service.reasons import why

TOKEN, AUTHORITY = "invitation.token", "authority.pem"  # in the state folder
GIVEN = frozenset({"coordinator", "federation", "enrolment_token_file"})
"""The settings that an invitation brings."""

SECONDS, AGAIN_SECONDS = 20.0, 1.0
MOST_BYTES = 1 << 16  # of a certificate


def accept(text: str, others: dict[str, Any]) -> Settings:
    """The settings of a client that joins by the invitation ``text``; ``others`` are the others.

    The token and the authority's certificate are written into the state folder.

    Raises:
        ClientError: the text is no invitation, it has expired before this client enrolled, the settings do not fit, or
            the coordinator does not show the certificate that the invitation names.
    """
    try:
        invitation = decode(text)
        brought = {"coordinator": invitation.coordinator, "federation": invitation.federation}
        proposed = {"name": invitation.client, "role": invitation.role}
        settings = make_settings(**{**others, **brought, "invited": proposed})
        if not _has_enrolled(settings.state_dir):
            invitation.check_time(datetime.now(UTC))
    except InvitationError as error:
        raise ClientError(Exit.NOT_ALLOWED, str(error)) from None
    folder = settings.state_dir
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        secrets = {
            "ca_file": settings.ca_file or _authority(invitation, settings),
            "enrolment_token_file": folder / TOKEN,
        }
        write_whole(folder / TOKEN, f"{invitation.token}\n".encode(), mode=0o600)
    except OSError as error:
        raise ClientError(Exit.STATE, f"the state folder {folder} cannot be used: {why(error)}") from None
    return settings.model_copy(update=secrets)


def _has_enrolled(folder: Path) -> bool:
    """Whether there is a client that needs no token any more."""
    try:
        return json.loads((folder / "identity.json").read_bytes())["client_id"] is not None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _authority(invitation: Invitation, settings: Settings) -> Path | None:
    """The file of the certificate that the invitation names; None where this machine trusts the coordinator anyway.

    It is asked for over a connection that nobody vouches for. Nothing secret is sent, and no other certificate is kept.
    """
    kept, address = settings.state_dir / AUTHORITY, settings.first_coordinator
    if invitation.authority is None:
        return None
    if kept.exists() and certificate_hash(kept.read_text()) == invitation.authority:
        return kept
    try:
        _ask(settings, trust(None))
        return None
    except httpx.TransportError as error:
        if not is_certificate_error(error):
            raise _unreachable(address, error) from None
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        certificate = _certificate(_ask(settings, anybody))
    except httpx.TransportError as error:
        raise _unreachable(address, error) from None
    if certificate is None or certificate_hash(certificate) != invitation.authority:
        text = f"{address} does not show the certificate that the invitation names: nothing was sent to it"
        raise ClientError(Exit.NOT_ALLOWED, f"{text}; ask the operator for another invitation")
    write_whole(kept, certificate.encode())
    return kept


def _ask(settings: Settings, verify: ssl.SSLContext) -> str:
    """What ``/v1/authority`` answers, asked for again where it was damaged on the way.

    Raises:
        httpx.TransportError: nobody answers.
        ClientError: a proxy that cannot be used, or nothing else than damaged answers.
    """
    until = time.monotonic() + settings.give_up_after
    while True:
        try:
            return _asked(settings, verify)
        except (Damaged, httpx.DecodingError) as error:
            if time.monotonic() > until:
                text = f"no answer from the coordinator at {settings.first_coordinator} that can be used ({error})"
                raise ClientError(Exit.UNREACHABLE, f"{text}: {CHANGED}") from None
        time.sleep(AGAIN_SECONDS)


def _asked(settings: Settings, verify: ssl.SSLContext) -> str:
    address = settings.first_coordinator
    try:
        options = http_options(address, verify, settings.proxy)
    except ValueError as error:
        raise ClientError(Exit.USAGE, str(error)) from None
    body = b""
    with httpx.Client(timeout=SECONDS, **options) as http, http.stream("GET", f"{address}/v1/authority") as answer:
        for part in answer.iter_bytes():
            body += part
            if len(body) > MOST_BYTES:
                break
        is_proven(answer.headers, body)
    return body.decode(errors="replace")


def _certificate(text: str) -> str | None:
    """The first certificate of ``text``, written anew: what else the text holds must not be trusted with it."""
    try:
        return ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(certificates_in(text)[0]))
    except (ValueError, IndexError):
        return None


def _unreachable(address: str, error: httpx.TransportError) -> ClientError:
    text = f"no answer from the coordinator at {address}: {why(error)}"
    return ClientError(Exit.UNREACHABLE, explained(error, address) or text)
