"""What leaves a client with secure sums: never an update in the clear, and no masked change that is not paid for."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from promptfed.client_service.__main__ import main
from promptfed.client_service.exits import ClientError, Exit, Failure
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.privacy.protection import PrivacyPlan, SiteProtection
from promptfed.client_service.privacy.secure import SecureWork, StepAnswer, Trained, meet, own_fingerprint
from promptfed.client_service.state.private_state import PrivateState, TensorOrigin
from promptfed.client_service.task_loop import TaskLoop
from promptfed.shared.messages import PrivacyEvent, SpendReport
from promptfed.shared.privacy.accounting import epsilon_of
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.privacy.settings import PrivacySpec
from promptfed.shared.spec.sections import SecureAggregationSpec
from tests.privacy.mutants import PLAIN_PATH, UNPAID
from tests.support.agreed import agreed
from tests.support.malicious import World

EVENT = PrivacyEvent(mechanism="gaussian", q=0.25, z=2.0, count=4)
SPENT = SpendReport(events=[EVENT], epsilon=1.0, delta=1e-3, noise="seeded")


class Coordinator:
    """Notes what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def send_update(self, task_id: str, body: Any) -> None:
        self.sent.append(task_id)

    async def send_failure(self, task_id: str, failure: Any) -> None:
        self.sent.append(failure.type)


class Here:
    """Computes at once."""

    async def run(self, work: Any) -> Any:
        return work()


def loop_of(state: PrivateState, protection: SiteProtection | None = None) -> TaskLoop:
    agreement = agreed(state, {"name": "promptfl", "m": 4}, secure_aggregation=SecureAggregationSpec())
    data = SimpleNamespace(count=lambda which: 4)
    rules = SimpleNamespace(policy=None, payloads=None)
    own = {"state": state, "agreement": agreement, "rules": rules, "data": data, "protection": protection}
    work = SimpleNamespace(**own, expect_policy=lambda task=None: None)
    monitor = SimpleNamespace(task=lambda *about: None, tell=lambda *about, **facts: None)
    return TaskLoop(*cast(Any, (Coordinator(), work, Here(), monitor)))


@pytest.mark.parametrize("mutant", [False, True])
def test_an_update_in_the_clear_never_leaves(mutant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant:
        PLAIN_PATH.apply(monkeypatch)
    loop = loop_of(PrivateState(tmp_path))
    loop.state.write_pending(b"an update", {}, TensorOrigin("task-1", 1, "train"))
    asyncio.run(loop._send_pending())
    assert loop.coordinator.sent == (["task-1"] if mutant else [])


def protected(ledger: Ledger, most: float = 8.0) -> SiteProtection:
    plan = PrivacyPlan(24, 2.0, 1e-3, 8, 0.25, 1.0, 1.0, most)
    ledger.open(1e-3)
    return SiteProtection(PrivacySpec(level="sample", clip=0.3), plan, ledger, SeededNoise(1), "http://x", "fed-1")


def trained_work(folder: Path) -> SecureWork:
    """A client that has trained under protection."""
    world = World(folder, count=1)
    task, work = world.task("train", 0), world.works[0]
    update = {"context": torch.full((70,), 0.5)}
    trained = Trained(update, {}, TensorOrigin(task.task_id, 1, "train", privacy="sample"), {}, SPENT)
    work.keep(task, {"context": torch.zeros(70)}, trained)
    return work


def test_a_change_is_paid_for_once_whatever_the_attempt(tmp_path: Path) -> None:
    work, ledger = trained_work(tmp_path / "work"), Ledger(None)
    loop = loop_of(PrivateState(tmp_path / "state"), protected(ledger))
    for attempt in (1, 2):
        asyncio.run(loop._pay_masked(work, StepAnswer(f"keys-{attempt}", "train", b"")))
        assert len(ledger.spends()) == attempt - 1, "keys cost nothing, nor does another attempt"
        asyncio.run(loop._pay_masked(work, StepAnswer(f"mask-{attempt}", "mask", b"")))
        (spend,) = ledger.spends()
        content = work._state.read_file("secure-work.safetensors") or b""
        assert spend.release == hashlib.sha256(content).hexdigest()
        assert spend.epsilon == epsilon_of(spend.events, 1e-3)
        assert (spend.round, spend.phase, spend.noise) == (1, "train", "seeded")


@pytest.mark.parametrize("mutant", [False, True])
def test_what_the_data_set_cannot_afford_is_deleted_unsent(
    mutant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mutant:
        UNPAID.apply(monkeypatch)
    work, ledger = trained_work(tmp_path / "work"), Ledger(None)
    loop = loop_of(PrivateState(tmp_path / "state"), protected(ledger, most=0.1))
    try:
        asyncio.run(loop._pay_masked(work, StepAnswer("mask-1", "mask", b"")))
        kind = "left"
    except Failure as failure:
        kind = failure.kind
    assert kind == ("left" if mutant else "privacy-budget-exhausted")
    assert (work.cost() is None) is not mutant
    assert ledger.spends() == []


def test_what_was_trained_without_protection_is_no_masked_change_of_a_protected_federation(tmp_path: Path) -> None:
    world = World(tmp_path / "work", count=1)
    world.keys(0)
    loop = loop_of(PrivateState(tmp_path / "state"), protected(Ledger(None)))
    with pytest.raises(Failure, match="not trained under protection") as refused:
        asyncio.run(loop._pay_masked(world.works[0], StepAnswer("mask-1", "mask", b"")))
    assert refused.value.kind == "privacy-missing"


def test_a_kept_attempt_is_gone_on_with_and_a_damaged_one_ends_the_client_by_name(tmp_path: Path) -> None:
    world = World(tmp_path, count=1)
    sent = world.keys(0)
    work, note = world.works[0], "secure-attempt.json"
    kept = json.loads(work._state.read_note(note) or "")
    needed = {name: kept[name] for name in ("about", "secrets", "answers", "accepted", "last")}
    assert {len(bytes.fromhex(secret)) for secret in needed["secrets"].values()} == {32}
    work._state.write_note(note, json.dumps(needed))
    assert world.keys(0) == sent
    without = {name: value for name, value in needed["about"].items() if name != "samples"}
    for damaged in (needed | {"about": without}, {"about": needed["about"]}):
        work._state.write_note(note, json.dumps(damaged))
        with pytest.raises(ClientError, match=r"secure-attempt\.json is damaged: restore it, or enrol anew"):
            world.keys(0)


def test_peers_are_remembered_from_their_first_use(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    listed = frozenset({"ed25519:" + "aa" * 32})
    first = meet(state, ["aa" * 32, "bb" * 32], 1, listed)
    assert (first.members, first.new, first.listed) == (2, 2, 1)
    state.close()
    again = meet(PrivateState(tmp_path), ["aa" * 32, "bb" * 32, "cc" * 32], 4, listed)
    assert (again.members, again.new, again.listed) == (3, 1, 1)
    assert '"ed25519:' in (tmp_path / "peers.json").read_text()


def test_the_fingerprint_is_that_of_the_key_that_signs_also_while_the_client_runs(tmp_path: Path) -> None:
    made = own_fingerprint(tmp_path)
    state = PrivateState(tmp_path)
    assert own_fingerprint(tmp_path) == made
    assert made.startswith("ed25519:")
    state.close()


def test_the_command_prints_the_fingerprint_and_needs_no_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--coordinator", "http://127.0.0.1:9", "--federation", "eyes", "--state-dir", str(tmp_path)]
    assert main(["--fingerprint", *options]) == Exit.OK
    assert capsys.readouterr().out == own_fingerprint(tmp_path) + "\n"
