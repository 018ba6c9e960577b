"""What comes before a task: is the ledger complete?"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from promptfed.client_service.http.connection import Refused
from promptfed.client_service.http.coordinator_client import CoordinatorClient
from promptfed.client_service.privacy.ledger_head import expect_head
from promptfed.client_service.training.executor import Compute
from promptfed.client_service.training.trainer import TaskWork
from promptfed.shared.api.privacy_schemas import SpendList

log = logging.getLogger("promptfed.client")


@dataclass
class Inquiries:
    """One client's questions. It asks only what its budget needs."""

    coordinator: CoordinatorClient
    work: TaskWork
    compute: Compute
    _spends_told: bool = True  # by this coordinator; older ones know no such resource

    async def expect_whole_ledger(self) -> None:
        """Raise ClientError (LEDGER) if the ledger is an old copy, which lacks spends of this client."""
        protection = self.work.protection
        if protection is None or protection.ledger.path is None:
            return
        # What this folder itself has seen comes first: a coordinator may say that it has had nothing.
        await self.compute.run(lambda: expect_head(protection.ledger, self.work.state))
        if not self._spends_told:
            return
        try:
            told = await self.coordinator.ask(SpendList, "spends")
        except Refused as refused:
            if refused.status != 404:
                raise
            self._spends_told = False
            log.info("this coordinator does not tell what it has had: whether the ledger is an old copy is not known")
            return
        await self.compute.run(lambda: protection.ledger.expect_whole(told))
