"""A client that sends compressed changes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from promptfed.client_service.exits import Exit
from promptfed.client_service.settings import Settings
from promptfed.shared.seeds import derive_seed
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.compression import compressed
from promptfed.shared.tensors.torch_tensors import arrays_of, decode, tensors_of
from tests.client_service.conftest import Make
from tests.support.fake_coordinator import FakeCoordinator


def sent(coordinator: FakeCoordinator) -> list[Tensors]:
    return [decode(body)[0] for body in coordinator.received if body[8:9] == b"{"]


@pytest.mark.parametrize("up", ["bf16", "int8"])
def test_each_change_is_encoded_with_draws_of_its_task(up: str, make: Make, settings: Settings) -> None:
    plain = make.coordinator(rounds=2)
    plain_state = {name: one.clone() for name, one in plain.global_state.items()}
    plain.compression = {"up": "none"}  # this coordinator does not move its state then
    asyncio.run(make.worker(plain, settings=settings.model_copy(update={"state_dir": settings.state_dir / "p"})).run())
    changes = [arrays_of({name: update[name] - plain_state[name] for name in update}) for update in sent(plain)]

    coordinator = make.coordinator(rounds=2, compression={"up": up})
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert len(sent(coordinator)) == len(changes) == 2
    for round, (change, body) in enumerate(zip(changes, sent(coordinator), strict=True), 1):
        seed = derive_seed(7, "compression", round, "train", settings.name)
        wanted = compressed(change, up, np.random.default_rng(seed))
        assert body.keys() == wanted.keys()
        assert all(torch.equal(tensors_of(wanted)[name], body[name]) for name in wanted)
