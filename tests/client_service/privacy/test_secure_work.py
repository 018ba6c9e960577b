"""A client's steps of a secure sum: each is computed once, in its turn, of one change, and sent until it is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.client_service.exits import ClientError, Failure
from promptfed.client_service.privacy import secure
from promptfed.client_service.privacy.earlier_sums import EarlierSums, shapes_of
from promptfed.client_service.privacy.secure import MASKED, SecureWork, StepAnswer, Trained
from promptfed.client_service.privacy.secure_records import KeptAttempt, Markers
from promptfed.client_service.state.private_state import TensorOrigin
from promptfed.shared.secagg import opening
from promptfed.shared.secagg.messages import Limits, Roster
from tests.support.malicious import SPEC, World

ORIGIN = TensorOrigin("t", 2, "train")


def refused(kind: str, act: Any, *given: Any) -> str:
    with pytest.raises(Failure) as failed:
        act(*given)
    assert failed.value.kind == kind
    return str(failed.value)


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.begin()
    return made


def test_what_leaves_is_on_the_disk_at_each_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The points at which other tests kill a client: what was written before each, and what was not."""
    world, seen = World(tmp_path), list[tuple[str, bool, str, bool]]()
    state = world.works[0]._state

    def point(name: str) -> None:
        attempt, markers = state.read_as(secure.ATTEMPT, KeptAttempt), state.read_as(secure.MARKERS, Markers)
        last = "" if attempt is None or attempt.last is None else attempt.last.kind
        seen.append((name, bool(markers and markers.payloads), last, bool(markers and markers.revealed)))

    monkeypatch.setattr(secure, "point", point)
    world.whole()
    steps = {"secure-work": "", "keys": "train", "share": "share", "mask": "mask", "confirm": "confirm"}
    expected = {f"{name}-written": [last != "", last, False] for name, last in steps.items()}
    expected |= {"reveal-marked": [True, "confirm", True], "unmask-written": [True, "unmask", True]}
    first = {name: facts for name, *facts in reversed(seen)}  # the first client's
    assert (first, list(dict.fromkeys(name for name, *_ in seen))) == (expected, list(expected))


def test_a_change_that_is_gone_is_not_masked(world: World) -> None:
    world.share()
    first, second = world.works[:2]
    first._state.remove_note(secure.WORK)
    task = world.task("train", 1, b"others", round=2)
    second.keep(task, {"context": world.prompts}, Trained({"context": world.prompts + 1}, {}, ORIGIN))
    for client in (0, 1):
        asked = world.task("mask", client), world.mask_job(client).model_dump_json().encode()
        assert "is not here any more" in refused("bad-roster", world.works[client].answer, *asked)


def told(world: World) -> bytes:
    return world.roster.message(world.signed).model_dump_json().encode()


def test_a_step_is_computed_once_in_its_turn_and_for_its_own_attempt(world: World) -> None:
    work, task = world.works[0], world.task("share", 0)
    assert "not understood" in refused("bad-roster", work.answer, task, b"{")
    assert "before step share" in refused("bad-roster", work.answer, world.task("mask", 0), b"{}")
    for other in (world.task("share", 0, attempt=2), world.task("share", 0, round=2)):
        assert "no keys for attempt" in refused("bad-roster", work.answer, other, told(world))
    first = work.answer(task, told(world))
    assert work.answer(task, b"something else").body == first.body, "answered before"
    assert SecureWork(work._state, "fed-1").answer(task, b"").body == first.body, "and after a restart"


def test_the_last_answer_is_sent_again_until_it_is_taken_or_refused_for_good(world: World) -> None:
    work = world.works[0]
    keys = work.unsent()
    assert (keys.kind, keys.task_id) == ("train", "train-0-1-1")
    work.note_accepted(keys)
    assert work.unsent() == keys, "of keys it does not matter: sent again at worst"
    world.mask()
    masked = work.unsent()
    assert masked.kind == "mask"
    work.note_accepted(masked)
    work.note_accepted(masked)
    assert work.unsent() is None
    assert work._attempt().accepted == ["mask"]
    _, known = EarlierSums(work._state, 0.1)._read()
    [sum_] = known.values()
    assert (sum_.round, sum_.shapes) == (1, shapes_of({"context": world.prompts.numpy()}))
    assert sum_.change > 0
    (work._state.folder / MASKED).unlink()
    with pytest.raises(ClientError, match=rf"{MASKED} is damaged"):
        work.answer(world.task("mask", 0), b"")
    world.works[1].note_refused(world.works[1].unsent())
    assert world.works[1].unsent() is None
    assert SecureWork(world.works[1]._state, "fed-1").unsent() is None, "on the disk"
    world.works[2].drop()
    world.works[2].note_refused(StepAnswer("mask-2", "mask", b""))
    assert (world.works[2].unsent(), world.works[2].cost()) == (None, None)


def test_a_change_is_of_one_payload_and_phase(world: World) -> None:
    work = world.works[0]
    assert work.is_trained(world.task("train", 0))
    assert work.is_trained(world.task("train", 0, attempt=2)), "another attempt sums the same change"
    assert not work.is_trained(world.task("train", 0, b"others"))
    assert not work.is_trained(world.task("train", 0, round=2))
    work.drop()
    assert not work.is_trained(world.task("train", 0))


@pytest.mark.parametrize(
    ("accepted", "kept_round", "committed"), [(True, 1, True), (False, 1, False), (True, 2, False)]
)  # fmt: skip
def test_private_tensors_are_committed_where_the_sum_has_their_change(
    accepted: bool, kept_round: int, committed: bool, world: World
) -> None:
    work, state = world.works[0], world.works[0]._state
    world.mask()
    if accepted:
        work.note_accepted(work.unsent())
    task = world.task("train", 0, b"another" if kept_round == 2 else b"prompts", round=kept_round)
    update = {"context": world.prompts + 1}
    work.keep(task, {"context": world.prompts}, Trained(update, {"own": torch.ones(2)}, ORIGIN))
    for same in (task, world.task("mask", 0, round=kept_round)):
        work.settle(same)
        assert work.cost() is not None, "the same phase goes on"
    work.settle(world.task("train", 0, b"next", round=3))
    assert (work.cost(), work.unsent()) == (None, None)
    tensors, _ = state.committed()
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == ({"own": [1, 1]} if committed else {})


def test_no_payload_is_served_for_two_phases_and_no_round_comes_again(world: World) -> None:
    work = world.works[0]
    work.expect(world.task("train", 0))
    assert "difference" in refused("payload-repeated", work.expect, world.task("train", 0, round=2))
    task = world.task("train", 0, b"third", round=3)
    update = {"context": world.prompts + 1.0}
    work.keep(task, {"context": world.prompts}, Trained(update, {}, TensorOrigin(task.task_id, 3, "train")))
    assert "after round 3" in refused("payload-repeated", work.expect, world.task("train", 0, b"new", round=2))
    work.expect(world.task("train", 0, b"new", round=3))
    work.expect(world.task("mask", 0, round=2))  # what is no training is held against what was revealed


def test_after_a_reveal_only_its_own_attempt_is_answered(world: World) -> None:
    world.whole()
    work = world.works[0]
    work.expect(world.task("unmask", 0))
    for other in (world.task("unmask", 0, attempt=2), world.task("train", 0)):
        assert "attempt 1 of round 1" in refused("already-revealed", work.expect, other)
    work.expect(world.task("unmask", 0, round=2))


def test_a_list_is_confirmed_also_where_the_change_is_gone(world: World) -> None:
    """It may have left under masks before: of what is summed nothing new is noted."""
    world.mask()
    work = world.works[0]
    known = EarlierSums(work._state, 0.1)._read()
    work._state.remove_note(secure.WORK)
    world.confirm(0, world.listed())
    assert EarlierSums(work._state, 0.1)._read()[1] == known[1]


def test_keys_are_made_once_for_each_attempt(world: World) -> None:
    work, task = world.works[0], world.task("train", 0)
    first = work.keys(task)
    assert work.keys(task).body == first.body
    second = work.keys(world.task("train", 0, attempt=2))
    assert second.body != first.body
    assert "is over" in refused("bad-roster", work.keys, task)
    too_far = {"context": torch.full((70,), 1e30)}
    task = world.task("train", 1, b"x", round=2)
    given = (task, {"context": world.prompts}, Trained(too_far, {}, ORIGIN))
    refused("out-of-range", world.works[1].keep, *given)


def test_a_damaged_key_of_a_client_ends_it_by_name(world: World) -> None:
    work = world.works[0]
    name = "signing.key"
    assert work._state.read_note(name)
    work._state.write_note(name, "no key")
    with pytest.raises(ClientError, match=r"signing\.key is damaged"):
        work.keys(world.task("train", 0, b"y", round=2))


@pytest.mark.parametrize("limits", [Limits(), Limits(minimum=7)])
def test_what_a_site_asks_for_beyond_the_terms_goes_with_its_keys(limits: Limits, tmp_path: Path) -> None:
    told = World(tmp_path, count=1, limits=limits).keys(0).limits
    assert told == (None if limits == Limits() else limits)


def test_each_step_is_held_against_earlier_sums_and_the_last_one_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool]] = []
    real = SecureWork._expect_apart

    def spied(work: SecureWork, task: Any, roster: Any, places: Any, final: bool = False) -> None:
        asked.append((len(list(places)), final))
        real(work, task, roster, list(places), final)

    monkeypatch.setattr(SecureWork, "_expect_apart", spied)
    World(tmp_path).whole(4)
    assert asked == [(5, False)] * 10 + [(4, True)] * 4, "share, mask, confirm"


def test_places_follow_from_the_entries_whatever_their_order(world: World) -> None:
    entries = [answer.entry for answer in world.entries.values()]
    first, second = (Roster(some, SPEC, world.rule) for some in (entries, entries[::-1]))
    assert (first.hashes, first.sha256, first.entries) == (second.hashes, second.sha256, second.entries)
    assert list(first.hashes) == sorted(entry.digest() for entry in entries)


def test_shares_are_revealed_for_one_list_and_weights_follow_a_rule(world: World) -> None:
    world.mask()
    work, there = world.works[0], range(world.count)
    signed = {world.place[k]: world.confirm(k, world.listed()) for k in there}
    markers = Markers(revealed={"round 1, train": (1, "another list")})
    work._state.write_as(secure.MARKERS, markers)
    told = opening.unmask_job(signed).model_dump_json().encode()
    assert "for another list" in refused("already-revealed", work.answer, world.task("unmask", 0, told), told)
    task = world.task("train", 1, b"next", round=2)
    task.config.weighting = None
    assert "how much each client" in refused("bad-roster", world.works[1].keys, task)
    work._state.write_file(secure.WORK, b"damaged")
    with pytest.raises(ClientError, match=rf"{secure.WORK} is damaged"):
        work.cost()


def test_a_list_to_confirm_is_in_order_of_places() -> None:
    job = opening.confirm_job([33, 8, 1, 16, 64, 5], [64, 5])
    assert (job.alive, job.dropped) == ([5, 64], [1, 8, 16, 33])
