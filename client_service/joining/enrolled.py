"""Calls to the coordinator as a client that has enrolled, outside its loop of tasks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.connection import BadAnswer, Refused
from promptfed.client_service.http.coordinator_client import CoordinatorClient, open_http
from promptfed.client_service.http.sent_log import SentLog
from promptfed.client_service.privacy.agreement import FILE, WITHDRAWN
from promptfed.client_service.privacy.policy import expect_origin, read_policy
from promptfed.client_service.settings import Settings, make_settings
from promptfed.client_service.state.known_coordinators import use_known
from promptfed.client_service.state.private_state import Identity
from promptfed.client_service.state.site_log import SiteLog
from promptfed.shared.messages import DataCheckRequest

ANSWER_SECONDS = 15.0  # that a coordinator gets to answer


async def call_enrolled(settings: Settings, call: Callable[[CoordinatorClient], Awaitable[None]]) -> bool:
    """Make ``call`` with the identity of the settings' state folder, and record it there. False: it has none.

    Raises:
        ClientError, Refused, BadAnswer: as `CoordinatorClient` says.
    """
    try:
        identity = Identity(**json.loads((settings.state_dir / "identity.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return False
    if identity.federation_id is None or identity.client_id is None:
        return False
    async with open_http(settings) as http:
        coordinator = CoordinatorClient(
            http, settings.coordinator, identity.federation_id, ANSWER_SECONDS, identity.secret
        )
        if settings.policy_file is not None:
            coordinator.may_move = partial(expect_origin, read_policy(settings.policy_file)[0])
        coordinator.sent = SentLog(settings.state_dir, SiteLog(settings.state_dir).note)
        use_known(coordinator.book, settings.state_dir)
        await call(coordinator)
    return True


def settings_in(folder: Path) -> Settings:
    """The settings by which a client's state folder reaches the coordinator that its owner has agreed to.

    The environment adds those that the folder does not have, such as ``PROMPTFED_CLIENT_CA_FILE``.

    Raises:
        ClientError: STATE: there is no consent, or it was withdrawn.
    """
    try:
        terms = json.loads((folder / FILE).read_bytes())["terms"]
        own = {"coordinator": terms["coordinator"], "federation": terms["federation_id"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise ClientError(Exit.STATE, f"{folder} is not the state folder of a client that has joined") from None
    if (folder / WITHDRAWN).exists():
        raise ClientError(Exit.WITHDRAWN, f"the consent in {folder} was withdrawn: nothing is sent to the coordinator")
    return make_settings(**own, state_dir=folder, data="none", allow_plain_http=True)


def send_data_check(settings: Settings, told: DataCheckRequest) -> None:
    """Send what the owner shares of a check of the images. Raises ClientError."""
    try:
        known = asyncio.run(call_enrolled(settings, lambda coordinator: coordinator.send_data_check(told)))
    except Refused as refused:
        old = refused.status == 404
        text = "it is of an earlier release, which takes no checks" if old else refused.detail
        raise ClientError(Exit.REFUSED, f"the coordinator has refused the counts: {text}") from None
    except BadAnswer as error:
        raise ClientError(Exit.UNREACHABLE, f"the coordinator's answer cannot be used: {error}") from None
    if not known:
        raise ClientError(Exit.STATE, f"{settings.state_dir} has no client that has enrolled: run it first")
