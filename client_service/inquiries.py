"""What comes before a task: is the ledger complete, and what were others given?"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from promptfed.client_service.http.connection import Refused
from promptfed.client_service.http.coordinator_client import CoordinatorClient
from promptfed.client_service.monitor import Monitor
from promptfed.client_service.privacy.ledger_head import expect_head
from promptfed.client_service.training.executor import Compute
from promptfed.client_service.training.trainer import TaskWork
from promptfed.shared.api.privacy_schemas import SpendList
from promptfed.shared.messages import Task, Witnesses

log = logging.getLogger("promptfed.client")


@dataclass
class Inquiries:
    """One client's questions. It asks only what its budget or its policy needs."""

    coordinator: CoordinatorClient
    work: TaskWork
    compute: Compute
    monitor: Monitor
    _spends_told: bool = True  # by this coordinator; older ones know no such resource

    async def before(self, task: Task) -> None:
        """Before the payload of ``task`` is fetched.

        Raises:
            Failure: policy-witnesses.
            ClientError: LEDGER.
        """
        await self.expect_whole_ledger()
        await self._expect_witnesses(task)

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

    async def _expect_witnesses(self, task: Task) -> None:
        """Compare this client's last payload with what others were given, if its policy asks for witnesses."""
        checks = self.work.rules.payloads
        waits = checks.unwitnessed(task) if checks is not None else None
        if checks is None or waits is None:
            return
        round, phase = waits
        try:
            told = await self.coordinator.ask(Witnesses, "receipts", round=round, phase=phase)
        except Refused as refused:
            if refused.status != 404:
                raise
            told = Witnesses(round=round, phase=phase, receipts=[])  # an older coordinator: nobody has witnessed it
        await self.compute.run(lambda: checks.expect_witnesses(told))

    def tell_payload(self) -> None:
        """Write the result of the payload's check to log and status."""
        look = self.work.rules.payloads.last if self.work.rules.payloads is not None else None
        if look is not None:
            figures = {name: round(value, 4) for name, value in look.figures.items()}
            self.monitor.tell("payload", verdict=look.verdict, **figures, why="; ".join(look.why) or None)
