"""What ends a simulated client, as the command ends."""

from __future__ import annotations

import pytest

from promptfed.client_service.exits import ClientError
from promptfed.experiments.simulation.workers import _exit
from promptfed.shared.service.reasons import Exit


@pytest.mark.parametrize(
    ("client", "command"),
    [
        (Exit.BAD_INPUT, Exit.BAD_INPUT),
        (Exit.FEDERATION_ENDED_BADLY, Exit.FEDERATION_ENDED_BADLY),
        (Exit.NAME_TAKEN, Exit.FAILED),
        (Exit.BACKBONE, Exit.FAILED),
        (Exit.DECLINED, Exit.FAILED),
        (Exit.INTERRUPTED, Exit.INTERRUPTED),
    ],
)
def test_codes_of_a_clients_process_alone_are_a_failure(client: Exit, command: Exit) -> None:
    assert _exit(ClientError(client, "why")) == command
