"""Consent: what a data owner sees when a client starts, a question if necessary, and the way back.

A withdrawal holds first on this machine, whatever the coordinator says, then there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Literal

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.bodies import SentLog
from promptfed.client_service.http.connection import BadAnswer, Refused
from promptfed.client_service.http.coordinator_client import CoordinatorClient, open_http
from promptfed.client_service.joining.checks import Check
from promptfed.client_service.joining.disclosure import Disclosure
from promptfed.client_service.joining.parts import Consent
from promptfed.client_service.privacy.agreement import FILE, WITHDRAWN
from promptfed.client_service.privacy.policy import allows, read_policy
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.known_addresses import add_known
from promptfed.client_service.state.private_state import Identity, PrivateState
from promptfed.client_service.state.site_log import SiteLog, digest
from promptfed.shared.files import write_whole
from promptfed.shared.machine import line_of
from promptfed.shared.plain_text import plain

log = logging.getLogger("promptfed.client")

QUESTION = "Join? [y/N] "
ANSWER_SECONDS = 15.0  # that a coordinator gets to answer
END_SECONDS = 300.0  # that a client which still runs gets to end, before its private parts are deleted


class Terminal:
    """Writes to stderr. It asks only if stdin and stderr are terminals and ``--yes`` is not given."""

    def __init__(self, log_format: Literal["text", "json"], ask: bool, agree: str | None = None):
        self._json = log_format == "json"
        self._agree = agree
        self._ask = ask and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()

    async def consent(self, checks: Sequence[Check], disclosure: Disclosure) -> bool:
        """Whether to join.

        Without anybody to ask it is what the command line says: yes to a first offer, but to one that has changed only
        where ``--agree`` names it. Where that is given it decides alone.
        """
        self.tell(checks)
        self.show(disclosure)
        if self._agree is not None:
            return self._agree == disclosure.terms.digest
        if not self._ask:
            return not disclosure.changes
        sys.stderr.write(QUESTION)
        sys.stderr.flush()
        return (await line_of(sys.stdin)).strip().lower() in ("y", "yes")

    def tell(self, checks: Sequence[Check]) -> None:
        """The checks, a line each."""
        for check in checks:
            if self._json:
                facts = {"name": check.name, "verdict": check.verdict, "text": check.text, "advice": check.advice}
                log.info("check %s", check.name, extra={"event": "check", "facts": facts})
            else:
                self._say(check.line())

    def show(self, disclosure: Disclosure) -> None:
        """What will leave this machine."""
        if self._json:
            log.info("disclosure", extra={"event": "disclosure", "facts": disclosure.facts()})
        else:
            self._say("", *disclosure.lines(), "")

    @staticmethod
    def _say(*lines: str) -> None:
        sys.stderr.write("\n".join(map(plain, lines)) + "\n")
        sys.stderr.flush()


def noted(consent: Consent | None, site: SiteLog) -> Consent | None:
    """``consent``, with a note in the site's log of what was shown and what the answer was."""
    if consent is None:
        return None

    async def asked(checks: Sequence[Check], disclosure: Disclosure) -> bool:
        text = "\n".join(map(plain, disclosure.lines()))
        terms = {"terms": disclosure.terms.digest}
        site.note("shown", {**terms, "sha256": digest(text), "text": text})
        agreed = await consent(checks, disclosure)
        about = disclosure.terms.model_dump(mode="json", include={"federation", "role", "method", "rounds", "privacy"})
        site.note("agreed" if agreed else "declined", terms | about)
        return agreed

    return asked


def withdraw(settings: Settings) -> int:
    """Withdraw consent, tell the coordinator, and delete what is private where that is wanted; the exit code.

    A client that runs on this folder ends at its next task or question, or when the coordinator tells it.

    Raises:
        ClientError: STATE where there is no consent to withdraw, or a running client does not end.
    """
    folder = settings.state_dir
    if not (folder / FILE).exists():
        raise ClientError(Exit.STATE, f"{folder} holds no consent to withdraw: give the client's --state-dir")
    write_whole(folder / WITHDRAWN, datetime.now(UTC).isoformat(timespec="seconds").encode(), mode=0o600)
    SiteLog(folder).note("withdrawn", {"delete_private": settings.delete_private})
    log.info("consent is withdrawn: this client answers no further task")
    reached = _tell(settings)
    if settings.delete_private:
        state = _opened(settings)
        try:
            state.delete_private()
        finally:
            state.close()
        log.info("private tensors, features and prompts in %s are deleted; who this client was is kept", folder)
        if settings.feature_cache is not None:
            log.warning("features in %s are left: other clients may share that folder", settings.feature_cache)
    return Exit.OK if reached else Exit.UNREACHABLE


def _tell(settings: Settings) -> bool:
    """Tell the coordinator. False if it cannot be told: then the operator has to be told in another way."""
    try:
        if not asyncio.run(call_enrolled(settings, CoordinatorClient.withdraw)):
            log.info("the coordinator knows of no such client: nothing to tell it")
            return True
    except Refused as refused:
        if refused.status not in (401, 403, 409, 410):
            return _untold(str(refused))
        log.info("at the coordinator this client takes part no longer: %s", refused.detail)
    except (ClientError, BadAnswer) as error:
        return _untold(str(error))
    else:
        log.info("the coordinator waits for this client no longer; the operator can delete what it has sent")
    return True


def _untold(why: str) -> bool:
    log.error("the coordinator could not be told (%s): tell the operator, or give --withdraw again", why)
    return False


def _opened(settings: Settings) -> PrivateState:
    """The state folder, once a client that still runs on it has ended."""
    until = time.monotonic() + END_SECONDS
    while True:
        try:
            return PrivateState(settings.state_dir)
        except ClientError:
            if time.monotonic() > until:
                text = f"a client still runs on {settings.state_dir}: stop it, then give --withdraw again"
                raise ClientError(Exit.STATE, text) from None
            time.sleep(0.2)


async def call_enrolled(settings: Settings, call: Callable[[CoordinatorClient], Awaitable[None]]) -> bool:
    """Make ``call`` with the identity of the settings' state folder, and record it there. False: it has none.

    Raises:
        ClientError, Refused, BadAnswer: as `CoordinatorClient` says.
    """
    try:
        identity = Identity(**json.loads((settings.state_dir / "identity.json").read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return False
    if identity.federation_id is None or identity.client_id is None:
        return False
    async with open_http(settings) as http:
        coordinator = CoordinatorClient(
            http, settings.coordinator, identity.federation_id, ANSWER_SECONDS, identity.secret
        )
        coordinator.sent = SentLog(SiteLog(settings.state_dir).note)
        policy = read_policy(settings.policy_file)[0] if settings.policy_file is not None else None
        add_known(coordinator.addresses, settings.state_dir, partial(allows, policy))
        await call(coordinator)
    return True
