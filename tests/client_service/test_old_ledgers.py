"""An old copy of a ledger: what the coordinator has had and the ledger lacks ends the client before anything leaves."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.privacy.ledger import Ledger, adopt_head, expect_head, keep_head
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.api.api_schemas import SpendList
from promptfed.shared.privacy.accounting import Event, epsilon_of
from tests.client_service.conftest import Make
from tests.client_service.test_ledger import DELTA, ONE, opened, spend

PRIVACY = {"level": "sample", "clip": 0.3, "noise_multiplier": 8.0, "delta": 1e-3}


def told(*spends: dict[str, Any]) -> SpendList:
    return SpendList.model_validate({"federation_id": "fed-1", "client": "a", "spends": list(spends)})


def release(number: int, **changes: Any) -> dict[str, Any]:
    """A spend as a coordinator tells of it; its release is that of `tests.client_service.test_ledger.spend`."""
    return {
        "round": number, "phase": "train", "task_id": f"task-{number}",
        "release": hashlib.sha256(str(number).encode()).hexdigest(), "events": [one.as_json() for one in ONE],
        "epsilon": 0.5, "delta": DELTA, "noise": "secret", "at": "2026-11-22T10:00:00Z",
    } | changes  # fmt: skip


def test_a_restored_copy_is_found_and_what_it_lacks_is_adopted(tmp_path: Path) -> None:
    path, copy = tmp_path / "ledger.jsonl", tmp_path / "copy.jsonl"
    ledger = opened(path)
    spend(ledger, 1)
    shutil.copy(path, copy)
    spend(ledger, 2)
    known = told(release(1), release(2))
    ledger.expect_whole(known)
    shutil.copy(copy, path)
    with pytest.raises(ClientError, match=r"ledger-behind: .* lacks 1 releases \(of round 2\)") as end:
        ledger.expect_whole(known)
    assert end.value.exit is Exit.LEDGER
    assert ledger.adopt(known, "http://127.0.0.1:1") == 1
    assert ledger.adopt(known, "http://127.0.0.1:1") == 0
    ledger.expect_whole(known)
    assert ledger.epsilon() == epsilon_of([Event("gaussian", 1.0, 8.0, 2)], DELTA)
    assert not spend(ledger, 2), "the release that was adopted costs nothing again"


def test_a_coordinator_can_add_and_never_take(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger.jsonl")
    spend(ledger, 1)
    before = ledger.epsilon()
    assert ledger.adopt(told(), "http://127.0.0.1:1") == 0
    assert ledger.epsilon() == before
    assert ledger.adopt(told(release(1, epsilon=0.0), release(9, epsilon=0.0)), "http://127.0.0.1:1") == 1
    assert ledger.epsilon() > before
    assert ledger.spends()[-1].epsilon == ledger.epsilon(), "its own sum, not the coordinator's word"


def test_a_ledger_that_is_lost_altogether_begins_with_what_was_had(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", "eyes")
    assert ledger.adopt(told(release(1), release(2)), "http://127.0.0.1:1") == 2
    assert ledger.delta() == DELTA
    assert [one.round for one in ledger.spends()] == [1, 2]


def test_what_was_part_of_a_sum_is_known_by_its_phase(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger.jsonl")
    spend(ledger, 1)
    ledger.expect_whole(told(release(1, release=None)))
    with pytest.raises(ClientError, match="ledger-behind"):
        ledger.expect_whole(told(release(2, release=None)))


def test_a_client_with_an_old_copy_sends_nothing_more(tmp_path: Path, make: Make, settings: Settings) -> None:
    own = settings.model_copy(update={"ledger": tmp_path / "ledger.jsonl"})
    coordinator = make.coordinator(rounds=1, privacy=PRIVACY, training={"batch_size": 24})
    coordinator.spends = [release(1, delta=1e-3)]
    with pytest.raises(ClientError, match="ledger-behind") as end:
        asyncio.run(make.worker(coordinator, settings=own).run())
    assert end.value.exit is Exit.LEDGER
    assert not any(path.endswith(("/payload", "/update", "/evaluation")) for _, path, _ in coordinator.calls)
    assert coordinator.client is not None
    assert coordinator.client.protection is not None
    assert coordinator.client.protection.noise_multiplier == 8.0
    assert coordinator.client.protection.units == coordinator.client.num_samples
    coordinator.spends = []
    assert asyncio.run(make.worker(coordinator, settings=own).run()) == Exit.OK


def test_a_coordinator_that_goes_back_on_a_ledger_between_tasks_is_noticed(
    tmp_path: Path, make: Make, settings: Settings
) -> None:
    """The ledger is looked at before each task, and before its payload is fetched."""
    own = settings.model_copy(update={"ledger": tmp_path / "ledger.jsonl"})
    coordinator = make.coordinator(rounds=2, privacy=PRIVACY, training={"batch_size": 24})
    coordinator.spends = []
    worker = make.worker(coordinator, settings=own)

    def restore(event: str, facts: Any) -> None:
        if event == "accepted":
            coordinator.spends = [release(1, delta=1e-3)]

    worker.monitor._hook = restore
    with pytest.raises(ClientError, match="ledger-behind"):
        asyncio.run(worker.run())
    assert len(coordinator.accepted) == 1


@pytest.mark.parametrize("answers", ["nothing", "no such resource"])
def test_a_restored_copy_is_found_whatever_the_coordinator_says(
    tmp_path: Path, make: Make, settings: Settings, answers: str
) -> None:
    """The state folder knows how long the ledger was and what its last line said."""
    own = settings.model_copy(update={"ledger": tmp_path / "ledger.jsonl"})
    assert own.ledger is not None
    coordinator = make.coordinator(rounds=2, privacy=PRIVACY, training={"batch_size": 24})
    coordinator.spends = [] if answers == "nothing" else None
    worker = make.worker(coordinator, settings=own)

    def restore(event: str, facts: Any) -> None:
        if event == "accepted":  # the copy is from before the first spend
            assert own.ledger is not None
            own.ledger.write_bytes(own.ledger.read_bytes().splitlines(keepends=True)[0])

    worker.monitor._hook = restore
    with pytest.raises(ClientError, match=r"ledger-behind: the ledger .* has 1 lines where .* knows of 2"):
        asyncio.run(worker.run())
    assert len(coordinator.accepted) == 1, "nothing was trained, and nothing sent, on a budget that was spent before"


def test_a_head_is_kept_found_changed_and_adopted(tmp_path: Path) -> None:
    state, ledger = PrivateState(tmp_path / "state"), Ledger(tmp_path / "ledger.jsonl")
    ledger.open(1e-3)
    expect_head(ledger, state)  # nothing is known yet
    about = {"federation_id": "f", "coordinator": "c", "round": 1, "phase": "train", "task_id": "t", "noise": "secret"}
    ledger.spend("1" * 64, [Event("gaussian", 1.0, 8.0, 1)], 8.0, about, "train")
    keep_head(ledger, state)
    ledger.spend("2" * 64, [Event("gaussian", 1.0, 8.0, 1)], 8.0, about, "train")
    expect_head(ledger, state)  # another client has gone on with the same ledger
    assert ledger.path is not None
    ledger.path.unlink()
    ledger.open(1e-3)
    for check in (expect_head, adopt_head):
        with pytest.raises(ClientError, match="1 lines where"):
            check(ledger, state)
    ledger.spend("3" * 64, [Event("gaussian", 1.0, 8.0, 1)], 8.0, about, "train")
    with pytest.raises(ClientError, match="another line where"):
        expect_head(ledger, state)
    adopt_head(ledger, state)
    expect_head(ledger, state)
    state.close()
