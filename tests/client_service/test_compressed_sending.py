"""A client that sends compressed changes: error feedback, and the residual over refusals and kills."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from promptfed.client_service.exits import Exit
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import PrivateState, TensorOrigin
from promptfed.shared.seeds import derive_seed
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.compression import compressed, decompressed
from promptfed.shared.tensors.torch_tensors import arrays_of, decode, tensors_of
from tests.client_service.conftest import MakeCoordinator, MakeWorker
from tests.client_service.test_private_state import killed_in
from tests.support.fake_coordinator import FakeCoordinator

ROUND_1, ROUND_2 = TensorOrigin("task-1", 1, "train"), TensorOrigin("task-2", 2, "train")


def sent(coordinator: FakeCoordinator) -> list[Tensors]:
    return [decode(body)[0] for body in coordinator.received if body[8:9] == b"{"]


def residual_of(settings: Settings) -> Tensors:
    state = PrivateState(settings.state_dir)
    try:
        assert not any("residual" in name for name in state.committed()[0])
        return state.residual()
    finally:
        state.close()


@pytest.mark.parametrize("up", ["int8", "topk(0.1)"])
def test_the_next_change_has_what_the_last_one_lost(
    up: str, make_coordinator: MakeCoordinator, make_worker: MakeWorker, settings: Settings
) -> None:
    """The state stays as it is, so that both rounds would send nearly the same change without error feedback."""
    plain = make_coordinator(rounds=2)
    plain_state = {name: one.clone() for name, one in plain.global_state.items()}
    plain.compression = {"up": "none"}  # this coordinator does not move its state then
    asyncio.run(make_worker(plain, settings=settings.model_copy(update={"state_dir": settings.state_dir / "p"})).run())
    changes = [arrays_of({name: update[name] - plain_state[name] for name in update}) for update in sent(plain)]

    coordinator = make_coordinator(rounds=2, compression={"up": up})
    assert asyncio.run(make_worker(coordinator).run()) is Exit.OK
    assert len(sent(coordinator)) == len(changes) == 2
    residual = {name: np.zeros_like(change) for name, change in changes[0].items()}
    for round, (change, body) in enumerate(zip(changes, sent(coordinator), strict=True), 1):
        whole = {name: change[name] + residual[name] for name in change}
        seed = derive_seed(7, "compression", round, "train", settings.name)
        wanted = compressed(whole, up, np.random.default_rng(seed))
        assert all(torch.equal(tensors_of(wanted)[name], body[name]) for name in wanted)
        shapes = {name: (one.shape, "float32") for name, one in whole.items()}
        received = decompressed(wanted, shapes, up)
        residual = {name: whole[name] - received[name] for name in whole}
    kept = residual_of(settings)
    assert all(np.array_equal(kept[name].numpy(), residual[name]) for name in residual)
    assert any(np.abs(one).max() > 0 for one in residual.values())


def test_a_refused_change_leaves_the_residual_as_it_was(
    make_coordinator: MakeCoordinator, make_worker: MakeWorker, settings: Settings
) -> None:
    coordinator = make_coordinator(rounds=1, compression={"up": "int8"})
    asyncio.run(make_worker(coordinator).run())
    before = residual_of(settings)
    assert before
    coordinator.plan, coordinator.rounds = [("train", 1)], 2
    coordinator = make_coordinator(rounds=2, compression={"up": "int8"}, closed_phases={2})
    folder = settings.model_copy(update={"state_dir": settings.state_dir / "other"})
    asyncio.run(make_worker(coordinator, settings=folder).run())
    after = residual_of(folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before), "that of round 1, whose change was accepted"


def test_a_kill_at_any_file_operation_leaves_private_state_and_residual_together(tmp_path: Path) -> None:
    def kept(state: PrivateState) -> tuple[float, float]:
        return float(state.committed()[0]["v"][0]), float(state.residual()["w"][0])

    seen = []
    for step in range(1, 100):
        state = PrivateState(tmp_path / str(step))
        state.write_pending(b"first", {"v": torch.full((1,), 1.0)}, ROUND_1, {"w": torch.full((1,), 10.0)})
        state.commit()
        state.write_pending(b"second", {"v": torch.full((1,), 2.0)}, ROUND_2, {"w": torch.full((1,), 20.0)})
        completed = killed_in(state, lambda state: state.commit(), step)
        again = PrivateState(tmp_path / str(step))
        seen.append(kept(again))
        again.commit_prepared({"v": torch.full((1,), 5.0)}, ROUND_2)
        assert kept(again)[1] == seen[-1][1], "preparing private tensors keeps it"
        again.close()
        if completed:
            break
    assert set(seen) == {(1.0, 10.0), (2.0, 20.0)}
