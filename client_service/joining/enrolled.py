"""Calls to the coordinator as a client that has enrolled, outside its loop of tasks."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial

from promptfed.client_service.http.coordinator_client import CoordinatorClient, open_http
from promptfed.client_service.http.sent_log import SentLog
from promptfed.client_service.privacy.policy import expect_origin, read_policy
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.known_coordinators import use_known
from promptfed.client_service.state.private_state import Identity
from promptfed.client_service.state.site_log import SiteLog

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
        coordinator.sent = SentLog(SiteLog(settings.state_dir).note)
        use_known(coordinator.book, settings.state_dir)
        await call(coordinator)
    return True
