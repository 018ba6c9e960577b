"""The ledger: what is spent stays spent, once for each release, and a broken file ends the client."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.privacy import ledger as module
from promptfed.client_service.privacy.ledger import BudgetExhausted, Ledger, adopt_head, expect_head, keep_head
from promptfed.client_service.privacy.policy import Policy, facts_of, refusals
from promptfed.client_service.privacy.protection import groups_of, units_of
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.api.api_schemas import SpendList
from promptfed.shared.data import open_source
from promptfed.shared.data.source import DataError, Source
from promptfed.shared.messages import EnrolmentInfo
from promptfed.shared.privacy.accounting import Event, PrivacyError, epsilon_of
from promptfed.shared.service import fault_points
from promptfed.shared.spec.sections import PrivacySpec
from promptfed.shared.spec.spec import TrainingSpec
from tests.client_service.conftest import Make

ONE = [Event("gaussian", 1.0, 8.0, 1)]


DELTA = 1e-4


def about(number: int) -> dict[str, Any]:
    where = {"federation_id": "fed-1", "coordinator": "http://127.0.0.1:1", "phase": "train", "noise": "secret"}
    return {**where, "round": number, "task_id": f"task-{number}"}


def opened(path: Path | None) -> Ledger:
    ledger = Ledger(path, "eyes")
    ledger.open(DELTA)
    return ledger


def spend(ledger: Ledger, number: int, most: float = 8.0) -> bool:
    return ledger.spend(hashlib.sha256(str(number).encode()).hexdigest(), ONE, most, about(number), "train")


@pytest.mark.parametrize("in_memory", [False, True])
def test_releases_add_up_and_the_same_one_costs_nothing_again(tmp_path: Path, in_memory: bool) -> None:
    path = None if in_memory else tmp_path / "deep" / "ledger.jsonl"
    ledger = opened(path)
    assert path is None or stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert ledger.epsilon() == 0
    assert spend(ledger, 1)
    assert spend(ledger, 2)
    assert not spend(ledger, 1)
    assert ledger.epsilon() == epsilon_of([Event("gaussian", 1.0, 8.0, 2)], DELTA)
    assert ledger.epsilon("test") == 0
    assert [one.round for one in ledger.spends()] == [1, 2]
    unspent = Ledger(tmp_path / "unspent.jsonl", "eyes")
    assert (unspent.adopt(told(), "http://127.0.0.1:1"), unspent.delta()) == (0, None)
    if path is not None:
        again = Ledger(path, "eyes")
        again.open(1e-9)
        assert again.delta() == DELTA
        assert again.spends() == ledger.spends()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert again.spends()[-1].epsilon == ledger.epsilon()


def test_what_does_not_fit_is_refused_and_nothing_written(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger.jsonl")
    most = epsilon_of([Event("gaussian", 1.0, 8.0, 2)], DELTA)
    spend(ledger, 1, most)
    spend(ledger, 2, most)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(BudgetExhausted, match=r"'eyes' has spent ε = 0\.\d+ of 0\.\d+, and this would make it"):
        spend(ledger, 3, most)
    with pytest.raises(BudgetExhausted):
        ledger.expect(ONE, most)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    assert not spend(ledger, 2, most)  # a resent update costs nothing, also where nothing is left


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_an_unfinished_last_line_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path)
    spend(ledger, 1)
    whole = path.read_bytes()
    spend(ledger, 2)
    path.write_bytes(path.read_bytes()[: len(whole) + cut])
    assert [one.round for one in ledger.spends()] == [1]
    assert spend(ledger, 3)
    assert [one.round for one in ledger.spends()] == [1, 3]


def flipped(content: bytes) -> bytes:
    place = content.index(b'"round": 1') + 9
    return content[:place] + b"2" + content[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        lambda content: b"\n".join(content.split(b"\n")[:1] + content.split(b"\n")[2:]),  # a line is missing
        lambda content: content.replace(b"spend", b"spent", 1),
        lambda content: content.split(b"\n", 1)[1],  # no opening line
        lambda content: content[:30] + b"\x00" + content[31:],
        lambda content: content.replace(b'"delta": 0.0001', b'"delta": 0.01', 1),
        lambda content: content.replace(b'"n": 3', b'"n": 4', 1),  # the last line: no other holds its digest
        lambda content: re.sub(rb'"prev": "\w+"(?=[^\n]*\n\Z)', b'"prev": "' + b"0" * 64 + b'"', content),
    ],
)
def test_any_other_break_ends_the_client(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path)
    for number in (1, 2, 3):
        spend(ledger, number)
    path.write_bytes(damage(path.read_bytes()))
    for use in (ledger.spends, lambda: spend(ledger, 4), ledger.epsilon):
        with pytest.raises(ClientError, match="does not hold together") as end:
            use()
        assert end.value.exit is Exit.LEDGER


def test_a_full_disk_ends_the_client_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path)
    spend(ledger, 1)
    before = path.read_bytes()

    def full(handle: int, content: bytes) -> None:
        os.write(handle, content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write", full)
    with pytest.raises(ClientError, match="the disk is full") as end:
        spend(ledger, 2)
    assert end.value.exit is Exit.LEDGER
    assert path.read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ClientError, match=r"cannot be used: .*give --ledger another place"):
        opened(tmp_path / "file" / "ledger.jsonl")


def test_two_processes_share_one_budget(tmp_path: Path) -> None:
    """Each tries ten releases; what both noted never goes over the limit and the chain holds."""
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path)
    most = epsilon_of([Event("gaussian", 1.0, 8.0, 8)], DELTA)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_spend_many, args=(path, start, most)) for start in (0, 100)]
    for child in children:
        child.start()
    for child in children:
        child.join(300)
        assert child.exitcode == 0
    assert len(ledger.spends()) == 8
    assert ledger.epsilon() <= most
    assert len({one.release for one in ledger.spends()}) == 8


def _spend_many(path: Path, start: int, most: float) -> None:
    ledger = Ledger(path, "eyes")
    for number in range(start, start + 6):
        try:
            spend(ledger, number, most)
        except BudgetExhausted:
            return


@pytest.mark.parametrize("place", ["spend-locked", "spend-half-written", "spend-written"])
def test_a_kill_at_each_point_leaves_the_release_spent_or_unspent_and_never_twice(tmp_path: Path, place: str) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path)
    spend(ledger, 1)
    child = multiprocessing.get_context("fork").Process(target=_die_at, args=(path, place))
    child.start()
    child.join(300)
    assert child.exitcode == -signal.SIGKILL
    known = [one.round for one in ledger.spends()]
    assert known == ([1, 2] if place == "spend-written" else [1])
    assert spend(ledger, 2) is (place != "spend-written")  # started again, the same bytes are to be sent
    assert [one.round for one in ledger.spends()] == [1, 2]


def _die_at(path: Path, place: str) -> None:
    fault_points.arm(place)
    spend(Ledger(path, "eyes"), 2)


def test_lines_are_what_the_texts_say(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path)
    spend(ledger, 1)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["kind"], first["dataset"], first["delta"], first["relation"]) == ("open", "eyes", DELTA, "zero-out")
    assert second["prev"] == hashlib.sha256(path.read_bytes().splitlines()[0]).hexdigest()
    assert second["events"] == [{"mechanism": "gaussian", "q": 1.0, "z": 8.0, "count": 1}]
    assert second["split"] == "train"


GROUP = PrivacySpec(level="sample", clip=0.3, noise_multiplier=2.0, delta=1e-3, unit="group", per_group=2)


CLASSES = ("sun", "umbrella")


def image(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten patients with two images of each class, named p03_1.png."""
    root, number = tmp_path / "eyes", 0
    for patient in range(10):
        for label in CLASSES:
            for one in range(2):
                number += 1
                image(root / label / f"p{patient:02}_{one}.png", number)
    return root


@pytest.fixture
def table(folder: Path) -> Path:
    path = folder.parent / "eyes.csv"
    with path.open("w", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(["path", "label", "patient"])
        for file in sorted(folder.rglob("*.png")):
            writer.writerow([file.relative_to(folder.parent), file.parent.name, file.name[:3]])
    return path


def opened_of_groups(folder: Path) -> Source:
    return open_source(f"folder:{folder}?group=^(p\\d%2B)_")


def test_a_group_is_trained_on_or_tested_on_as_a_whole(folder: Path, table: Path) -> None:
    for source in (opened_of_groups(folder), open_source(f"csv:{table}?group=patient")):
        train, test = source.train.groups, source.test.groups
        assert train is not None
        assert test is not None
        assert not set(train) & set(test)
        assert (len(set(train)), len(set(test))) == (8, 2)
        assert (len(source.train), len(source.test)) == (32, 8)
        assert len(set(train)) * 4 == len(train)
    again = opened_of_groups(folder)
    assert again.train.groups == opened_of_groups(folder).train.groups
    held = open_source(f"folder:{folder}?group=^(p\\d%2B)_&validation=0.25")
    assert held.train.groups is not None
    assert held.test.groups is not None
    assert not set(held.train.groups) & set(held.test.groups)


def test_what_names_no_groups_is_refused(folder: Path, table: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"its name has no group \(\^\(q\)\)"):
        open_source(f"folder:{folder}?group=^(q)")
    with pytest.raises(DataError, match="captures nothing"):
        open_source(f"folder:{folder}?group=p")
    with pytest.raises(DataError, match="is not a regular expression"):
        open_source(f"folder:{folder}?group=(p")
    with pytest.raises(DataError, match=r"has no column doctor"):
        open_source(f"csv:{table}?group=doctor")
    for split in ("train", "test"):
        for number, label in enumerate(CLASSES):
            image(tmp_path / "split" / split / label / "p1_x.png", number + 10 * len(split))
    with pytest.raises(DataError, match="the group p1 has images in train and in test"):
        open_source(f"folder:{tmp_path / 'split'}?group=^(p1)")
    with pytest.raises(ClientError, match="the data name none: add group=COLUMN to a csv: URI") as error:
        groups_of(GROUP, open_source(f"folder:{folder}").train)
    assert error.value.exit is Exit.LEDGER


def test_the_first_images_of_a_group_in_order_of_digest_stand_for_it(folder: Path) -> None:
    train = opened_of_groups(folder).train
    groups = groups_of(GROUP, train)
    assert groups is not None
    assert train.groups is not None
    assert [len(rows) for rows in groups] == [2] * 8
    for name, rows in zip(sorted(set(train.groups)), groups, strict=True):
        mine = [row for row, group in enumerate(train.groups) if group == name]
        assert list(rows) == sorted(mine, key=train.digest)[:2]
    assert groups_of(GROUP.model_copy(update={"unit": "record"}), train) is None


def test_client_enrols_its_groups_and_spends_them(folder: Path, make: Make, settings: Settings, tmp_path: Path) -> None:
    training = TrainingSpec(learning_rate=0.1, batch_size=4).model_dump()
    coordinator = make.coordinator(privacy=GROUP.model_dump(), training=training, rounds=1, class_names=list(CLASSES))
    own = settings.model_copy(update={"ledger": tmp_path / "ledger.jsonl", "max_epsilon": 50.0})
    assert asyncio.run(make.worker(coordinator, settings=own, source=opened_of_groups(folder)).run()) is Exit.OK
    ledger = Ledger(own.ledger_file)
    assert ledger.kept_unit() == "group"
    assert [one.events for one in ledger.spends()] == [(Event("gaussian", 0.5, 2.0, 2),)], "8 groups in batches of 4"
    assert coordinator.client is not None
    told = coordinator.client.protection
    assert told is not None
    assert (coordinator.client.num_samples, told.units, told.noise_multiplier) == (32, 8, 2.0)
    single = make.coordinator(privacy=GROUP.model_copy(update={"unit": "record"}).model_dump(), training=training)
    another = own.model_copy(update={"state_dir": tmp_path / "other"})
    with pytest.raises(ClientError, match="the ledger of 'default' is of groups, and the federation protects records"):
        asyncio.run(make.worker(single, settings=another).run())


def test_a_site_s_policy_names_the_unit_and_counts_steps_over_groups(folder: Path) -> None:
    info = EnrolmentInfo.model_validate({
        "federation_id": "fed-1", "name": "eyes", "method": {"name": "promptfl"}, "backbone": {},
        "class_names": list(CLASSES), "template": None, "state": "enrolling", "rounds": 1, "seed": 0,
        "training": TrainingSpec(batch_size=4).model_dump(), "evaluate_every": 1, "privacy": GROUP.model_dump(),
    })  # fmt: skip
    train = opened_of_groups(folder).train
    facts = facts_of(info, "https://x", "trainer", len(train), units_of(info, train))
    assert (facts.unit, facts.steps) == ("group", 2)
    offended = {
        unit: [one.kind for one in refusals(Policy.model_validate({"version": 1, "privacy": {"unit": unit}}), facts)]
        for unit in ("record", "group")
    }
    assert offended == {"record": ["policy-unit"], "group": []}


# An old copy of a ledger: what the coordinator has had and the ledger lacks ends the client before anything leaves.


PRIVACY = {"level": "sample", "clip": 0.3, "noise_multiplier": 8.0, "delta": 1e-3}


def told(*spends: dict[str, Any]) -> SpendList:
    return SpendList.model_validate({"federation_id": "fed-1", "client": "a", "spends": list(spends)})


def release(number: int, **changes: Any) -> dict[str, Any]:
    """A spend as a coordinator tells of it; its release is that of `spend`."""
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
    with pytest.raises(ClientError, match=r"lacks 6 releases \(of round 1, 2, 3, 4, 5\)"):
        ledger.expect_whole(told(*map(release, range(1, 7))))
    larger = release(2) | {"delta": 2 * DELTA}
    assert ledger.adopt(told(release(1), larger), "http://127.0.0.1:1") == 2
    assert ledger.delta() == 2 * DELTA
    assert [one.round for one in ledger.spends()] == [1, 2]
    summed = release(3) | {"release": None, "task_id": "task-3"}
    assert ledger.adopt(told(summed), "http://127.0.0.1:1") == 1
    assert ledger.spends()[-1].release == "adopted task-3", "of a masked change the coordinator knows no digest"


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
    assert coordinator.calls[-1][1].endswith("/spends"), "before it asks for a task"
    assert coordinator.client is not None
    assert coordinator.client.protection is not None
    assert coordinator.client.protection.noise_multiplier == 8.0
    assert coordinator.client.protection.units == coordinator.client.num_samples
    coordinator.spends = []
    assert asyncio.run(make.worker(coordinator, settings=own).run()) == Exit.OK


def test_a_coordinator_that_goes_back_on_a_ledger_between_tasks_is_noticed(tmp_path: Path, make: Make) -> None:
    """The ledger is looked at before each task, and before its payload is fetched."""
    own = make.settings.model_copy(update={"ledger": tmp_path / "ledger.jsonl"})
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


def test_a_restored_copy_is_found_whatever_the_coordinator_says(tmp_path: Path, make: Make) -> None:
    """The state folder knows how long the ledger was and what its last line said."""
    own = make.settings.model_copy(update={"ledger": tmp_path / "ledger.jsonl"})
    assert own.ledger is not None
    coordinator = make.coordinator(rounds=2, privacy=PRIVACY, training={"batch_size": 24})
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


def test_a_ledger_that_cannot_be_read_or_was_not_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="it has no δ yet"):
        Ledger(tmp_path / "none.jsonl").expect([Event("gaussian", 1.0, 1.0, 1)], 8.0)
    assert Ledger(tmp_path / "none.jsonl").expect([], 0.0) == 0
    with pytest.raises(ClientError, match=r"cannot be used: .*give --ledger another place") as end:
        Ledger(tmp_path).spends()
    assert end.value.exit is Exit.LEDGER
    path = tmp_path / "a" / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.open(1e-3)
    ledger.open(1e-5)
    assert (ledger.delta(), len(path.read_bytes().splitlines())) == (1e-3, 1), "it has begun"
    [first] = path.read_bytes().splitlines()
    line = {"n": 1, "prev": hashlib.sha256(first).hexdigest(), "kind": "spend", "round": "one"}
    with path.open("ab") as file:
        file.write(json.dumps(line).encode() + b"\n")
    with pytest.raises(ClientError, match="does not hold together at line 1: "):
        ledger.spends()
    state = PrivateState(tmp_path / "state")
    for same in (Ledger(None), ledger):
        adopt_head(same, state)
        assert state.read_note(module.FILE) is None, "a folder that has seen none takes none"
