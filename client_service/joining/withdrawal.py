"""Withdrawing consent: first on this machine, where it holds whatever the coordinator says, then there."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.connection import BadAnswer, Refused
from promptfed.client_service.http.coordinator_client import CoordinatorClient
from promptfed.client_service.joining.enrolled import call_enrolled
from promptfed.client_service.privacy.agreement import FILE, WITHDRAWN
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.state.site_log import SiteLog
from promptfed.shared.files import write_whole

log = logging.getLogger("promptfed.client")

END_SECONDS = 300.0  # that a client which still runs gets to end, before its private parts are deleted


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
    told = _tell(settings)
    if settings.delete_private:
        state = _opened(settings)
        try:
            state.delete_private()
        finally:
            state.close()
        log.info("private tensors, features and prompts in %s are deleted; who this client was is kept", folder)
        if settings.feature_cache is not None:
            log.warning("features in %s are left: other clients may share that folder", settings.feature_cache)
    return Exit.OK if told else Exit.UNREACHABLE


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
