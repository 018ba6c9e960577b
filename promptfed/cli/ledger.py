"""What a coordinator knows a client to have spent, asked with the secret of its state folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from promptfed.client_service.http.connection import BadAnswer, Refused
from promptfed.client_service.http.coordinator_client import CoordinatorClient, http_to
from promptfed.client_service.privacy.agreement import FILE
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.api.privacy_schemas import SpendList

ANSWER_SECONDS = 30.0


def known_spends(folder: Path, coordinator: str | None, ca_file: Path | None) -> tuple[SpendList, str]:
    """The spends, and the coordinator's address. The client may be at work meanwhile.

    Raises:
        CommandError: the folder is no enrolled client's, or the coordinator does not answer it.
    """
    try:
        identity = json.loads((folder / "identity.json").read_bytes())
        address = coordinator or json.loads((folder / FILE).read_bytes())["terms"]["coordinator"]
        federation, secret = str(identity["federation_id"]), str(identity["secret"])
    except (OSError, ValueError, KeyError, TypeError):
        text = f"{folder} holds no client that has enrolled: give its --state-dir"
        raise CommandError(text, Exit.BAD_INPUT) from None

    async def ask() -> SpendList:
        async with http_to(address, ca_file) as http:
            return await CoordinatorClient(http, address, federation, ANSWER_SECONDS, secret).ask(SpendList, "spends")

    try:
        return asyncio.run(ask()), address
    except Refused as refused:
        raise CommandError(f"{address} does not tell: {refused}", Exit.REFUSED) from None
    except BadAnswer as error:
        raise CommandError(str(error), Exit.PROTOCOL) from None
