"""Whole attempts among simulated clients: exact sums whoever is lost, and what clients refuse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from promptfed.shared.secagg import SecureError, member, messages, opening, primitives
from promptfed.shared.secagg.messages import (
    ConfirmJob,
    Entry,
    KeysAnswer,
    RosterMessage,
    SharesAnswer,
    UnmaskAnswer,
    UnmaskJob,
)
from promptfed.shared.secagg.primitives import Words, commitment
from promptfed.shared.spec.sections import SecureAggregationSpec
from tests.support.secure_sums import ABOUT, BY_SAMPLES, STEPS, UNIFORM, Member, clear_sum, lost, members, play

SPEC = SecureAggregationSpec()


@pytest.mark.parametrize("step", STEPS)
def test_the_sum_is_exact_with_30_percent_lost_in_a_step(step: str) -> None:
    clients = members(10, 17, SPEC)
    played = play(clients, SPEC, lost(10, 0.3, step))
    assert len(played.counted) == (10 if step in ("confirm", "unmask") else 7)
    assert np.array_equal(played.total, clear_sum(clients, played.counted))


@settings(max_examples=12, deadline=None)
@given(some.integers(3, 20), some.data())
def test_sums_with_weights_are_exact(count: int, data: some.DataObject) -> None:
    heavy = data.draw(some.integers(1, 65_535))
    # Of three, none weighs more than the others together: a client refuses that.
    weights = [data.draw(some.integers((heavy + 1) // 2, heavy)) for _ in range(count)]
    clients = members(count, 3, SPEC, weights)
    step = data.draw(some.sampled_from(STEPS))
    share = 0.3 if count >= 10 else 0.0
    played = play(clients, SPEC, lost(count, share, step, data.draw(some.integers(0, 99))))
    assert np.array_equal(played.total, clear_sum(clients, played.counted))


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_two_hundred_clients(step: str) -> None:
    clients = members(200, 64, SPEC)
    played = play(clients, SPEC, lost(200, 0.3, step))
    assert np.array_equal(played.total, clear_sum(clients, played.counted))


def windows(content: bytes) -> set[bytes]:
    return {content[at : at + 16] for at in range(len(content) - 15)}


def test_nothing_that_the_coordinator_is_sent_holds_a_vector_or_a_secret() -> None:
    clients = members(5, 40, SPEC)
    told = b"\0".join(play(clients, SPEC, {"mask": {4}}).told)
    for client in clients:
        secret = client.secrets
        for content in (client.vector.tobytes(), secret.identity, secret.mask_key, secret.share_key, secret.seed):
            assert not any(window in told for window in windows(content))
    # The same look does find a vector whose masks were dropped.
    told += b"\0" + clients[2].vector.tobytes()
    assert any(window in told for window in windows(clients[2].vector.tobytes()))


def sharing(count: int = 5) -> tuple[list[Member], messages.Roster, dict[int, SharesAnswer]]:
    """Clients after step 1, by place, and their shares."""
    clients = members(count, 70, SPEC)
    made, signed = messages.make_roster([client.entry for client in clients], SPEC, UNIFORM)
    clients.sort(key=lambda client: made.place_of(client.entry.entry))
    shares = {}
    for place, client in enumerate(clients):
        client.share(made.message(signed).model_dump_json())
        shares[place], client.own = member.share_secrets(client.secrets, client.roster, place)
    return clients, made, shares


def refusal(kind: str, act: object, *arguments: object) -> str:
    with pytest.raises(SecureError) as refused:
        act(*arguments)
    assert refused.value.kind == kind
    return str(refused.value)


def test_a_box_that_was_changed_or_swapped_is_refused_by_its_sender_s_name() -> None:
    clients, made, shares = sharing()
    job = opening.mask_job(made, 0, shares)
    bent = bytes([job.boxes[1][1][0] ^ 1]) + job.boxes[1][1][1:]
    boxes = [job.boxes[0], (job.boxes[1][0], bent), *job.boxes[2:]]
    text = refusal("bad-shares", clients[0].mask, job.model_copy(update={"boxes": boxes}).model_dump_json())
    assert clients[2].entry.entry.identity_key in text
    swapped = [(job.boxes[0][0], job.boxes[1][1]), (job.boxes[1][0], job.boxes[0][1]), *job.boxes[2:]]
    refusal("bad-shares", clients[0].mask, job.model_copy(update={"boxes": swapped}).model_dump_json())
    refusal("bad-shares", clients[0].mask, job.model_copy(update={"boxes": job.boxes[1:]}).model_dump_json())


@pytest.mark.parametrize("changed", ["round", "attempt", "payload_sha256", "terms", "samples", "mask_key", "signature"])
def test_an_entry_that_is_not_as_it_was_signed_is_refused(changed: str) -> None:
    clients = members(4, 3, SPEC)
    other = {
        "round": 2,
        "attempt": 2,
        "payload_sha256": "sha256:" + "3" * 64,
        "terms": "4" * 64,
        "samples": 65_535,
        "mask_key": clients[1].entry.entry.mask_key[::-1],
    }
    forged = clients[2].entry.model_dump(mode="json")
    if changed == "signature":
        forged["signature"] = clients[1].entry.signature
    else:
        forged["entry"][changed] = other[changed]
    entries = [clients[0].entry, clients[1].entry, KeysAnswer.model_validate(forged), clients[3].entry]
    made, signed = messages.make_roster(entries, SPEC, UNIFORM)
    refusal("bad-roster", clients[0].share, made.message(signed).model_dump_json())


def test_a_signed_entry_for_another_round_is_refused() -> None:
    clients = members(4, 3, SPEC)
    old = member.signed_entry(clients[3].secrets, {**ABOUT, "round": 7, "samples": 1})
    made, signed = messages.make_roster([*(client.entry for client in clients[:3]), old], SPEC, UNIFORM)
    assert "round" in refusal("bad-roster", clients[0].share, made.message(signed).model_dump_json())


def test_a_roster_without_the_own_entry_twice_a_key_or_too_few_is_refused() -> None:
    clients = members(4, 3, SPEC)
    made, signed = messages.make_roster([client.entry for client in clients[1:]], SPEC, UNIFORM)
    refusal("bad-roster", clients[0].share, made.message(signed).model_dump_json())
    twice = member.signed_entry(clients[1].secrets, {**ABOUT, "samples": 2})
    made, signed = messages.make_roster([*(client.entry for client in clients), twice], SPEC, UNIFORM)
    assert "twice" in refusal("bad-roster", clients[0].share, made.message(signed).model_dump_json())
    few = RosterMessage(entries=[client.entry for client in sorted(clients[:2], key=lambda c: c.entry.entry.digest())])
    refusal("bad-roster", clients[0].share, few.model_dump_json())


def test_a_heavy_weight_or_too_small_a_set_is_refused() -> None:
    clients, made, shares = sharing()
    few = opening.mask_job(made, 0, {place: shares[place] for place in (0, 1)})
    refusal("policy-minimum", clients[0].mask, few.model_dump_json())
    clients[0].limits = member.Limits(minimum=6)
    refusal("policy-minimum", clients[0].mask, opening.mask_job(made, 0, shares).model_dump_json())
    heavy = members(3, 3, SPEC, [65_535, 1, 1])
    made, signed = messages.make_roster([client.entry for client in heavy], SPEC, BY_SAMPLES)
    place = {made.place_of(client.entry.entry): client for client in heavy}
    shares = {}
    for at, client in place.items():
        client.share(made.message(signed).model_dump_json())
        shares[at], _ = member.share_secrets(client.secrets, client.roster, at)
    at = made.place_of(heavy[0].entry.entry)
    assert "uniform" in refusal("policy-share", heavy[0].mask, opening.mask_job(made, at, shares).model_dump_json())


def masked(count: int = 5) -> tuple[list[Member], messages.Roster, dict[int, SharesAnswer]]:
    clients, made, shares = sharing(count)
    for place, client in enumerate(clients):
        client.mask(opening.mask_job(made, place, shares).model_dump_json())
    return clients, made, shares


def test_a_list_that_is_not_what_was_masked_with_is_not_signed() -> None:
    clients, _, _ = masked()
    for alive, dropped in (([0, 1, 2, 3], []), ([0, 1, 2, 3, 4], [4]), ([1, 2, 3, 4], [0]), ([0, 1], [2, 3, 4])):
        job = ConfirmJob(alive=alive, dropped=dropped)
        with pytest.raises(SecureError):
            clients[0].confirm(job.model_dump_json())


def test_nothing_is_revealed_without_enough_signatures_of_the_own_list() -> None:
    clients, made, _ = masked()
    here, there = ConfirmJob(alive=[0, 1, 2, 3], dropped=[4]), ConfirmJob(alive=[0, 1, 3, 4], dropped=[2])
    answers = {}
    for place in (0, 1):
        clients[place].confirm(here.model_dump_json())
        answers[place] = member.confirm_list(
            clients[place].secrets, made, place, clients[place].sharing, here, clients[place].limits
        )
    answers[3] = member.confirm_list(clients[3].secrets, made, 3, clients[3].sharing, there, clients[3].limits)
    job = opening.unmask_job(answers)
    refusal("bad-roster", clients[0].unmask, job.model_dump_json())
    two = UnmaskJob(signatures=job.signatures[:2])
    refusal("bad-roster", clients[0].unmask, two.model_dump_json())
    again = UnmaskJob(signatures=[*job.signatures[:2], job.signatures[0]])
    refusal("bad-roster", clients[0].unmask, again.model_dump_json())
    answers[3] = member.confirm_list(clients[3].secrets, made, 3, clients[3].sharing, here, clients[3].limits)
    answer = UnmaskAnswer.model_validate_json(clients[0].unmask(opening.unmask_job(answers).model_dump_json()))
    assert [one for one, _ in answer.seeds] == [0, 1, 2, 3]
    assert [one for one, _ in answer.keys] == [4]


LIST = ConfirmJob(alive=[0, 1, 2, 3, 4], dropped=[5])


def revealed(clients: list[Member], place: int) -> UnmaskAnswer:
    """What the member at ``place`` gives for `LIST`."""
    held = clients[place].held
    return UnmaskAnswer(seeds=[(one, held[one][0]) for one in LIST.alive], keys=[(5, held[5][1])])


def vectors(clients: list[Member], sharing: list[int]) -> list[Words]:
    """The masked vectors of those who count."""
    return [
        member.mask_vector(clients[one].secrets, clients[one].roster, one, sharing, clients[one].vector)
        for one in LIST.alive
    ]


def test_one_share_less_than_the_threshold_opens_nothing() -> None:
    clients, made, shares = masked(6)
    assert made.threshold == 4
    reveals = {place: revealed(clients, place) for place in range(3)}
    for place, answer in reveals.items():
        opening.check_reveal(made, place, LIST, answer, shares)
    assert not len(reveals) >= made.threshold
    refusal("bad-shares", opening.open_sum, made, LIST, vectors(clients, [*range(6)]), reveals, shares)


@pytest.mark.parametrize("kind", ["seeds", "keys"])
def test_a_false_share_at_opening_is_refused_and_the_others_open_the_sum(kind: str) -> None:
    clients, made, shares = masked(6)
    reveals = {place: revealed(clients, place) for place in range(5)}
    (owner, share), *rest = getattr(reveals[1], kind)
    false = reveals[1].model_copy(update={kind: [(owner, share[:-1] + bytes([share[-1] ^ 1])), *rest]})
    text = refusal("bad-shares", opening.check_reveal, made, 1, LIST, false, shares)
    assert f"entry 1 holds of the {kind[:-1] if kind == 'seeds' else 'mask key'} of entry {owner}" in text
    for place in (0, 2, 3, 4):
        opening.check_reveal(made, place, LIST, reveals[place], shares)
    honest = {place: reveals[place] for place in (0, 2, 3, 4)}
    total = opening.open_sum(made, LIST, vectors(clients, [*range(6)]), honest, shares)
    assert np.array_equal(total, clear_sum(clients, LIST.alive))


def dealt_falsely(to: Sequence[int]) -> tuple[list[Member], messages.Roster, dict[int, SharesAnswer]]:
    """Member 2 commits to other shares of its seed for the holders ``to``, and deals just these."""
    clients, made, shares = sharing(6)
    false = primitives.split(primitives.new_pair(), made.threshold, range(1, 7))
    boxes, commitments = list(shares[2].boxes), list(shares[2].commitments)
    for holder in to:
        honest = clients[holder], opening.mask_job(made, holder, shares)
        pair = member.open_boxes(honest[0].secrets, made, holder, honest[1], honest[0].limits)[2]
        given = false[holder + 1], pair[1]
        commitments[holder] = commitment(made.sha256, 2, holder, given)
        boxes[made.others(2).index(holder)] = member._box(clients[2].secrets, made, 2, holder, b"".join(given))
    shares[2] = shares[2].model_copy(update={"boxes": boxes, "commitments": commitments})
    for place, client in enumerate(clients):
        client.mask(opening.mask_job(made, place, shares).model_dump_json())
    return clients, made, shares


def test_other_subsets_are_tried_where_a_member_has_dealt_false_shares() -> None:
    clients, made, shares = dealt_falsely([0, 3])
    reveals = {place: revealed(clients, place) for place in range(6)}
    for place, answer in reveals.items():
        opening.check_reveal(made, place, LIST, answer, shares)
    total = opening.open_sum(made, LIST, vectors(clients, [*range(6)]), reveals, shares)
    assert np.array_equal(total, clear_sum(clients, LIST.alive))


def test_a_member_whose_shares_open_nothing_is_named() -> None:
    clients, made, shares = dealt_falsely([0, 1, 3, 4, 5])
    reveals = {place: revealed(clients, place) for place in range(6)}
    text = refusal("bad-shares", opening.open_sum, made, LIST, vectors(clients, [*range(6)]), reveals, shares)
    assert clients[2].entry.entry.identity_key in text


def test_a_member_that_deals_other_shares_than_it_commits_to_is_named_by_who_gets_them() -> None:
    clients, made, shares = sharing()
    job = opening.mask_job(made, 0, shares)
    other = [(place, digests if place != 3 else digests[::-1]) for place, digests in job.commitments]
    changed = job.model_copy(update={"commitments": other}).model_dump_json()
    assert clients[3].entry.entry.identity_key in refusal("bad-shares", clients[0].mask, changed)


def test_shares_without_just_their_commitments_are_refused() -> None:
    _, made, shares = sharing()
    for commitments in (shares[0].commitments[1:], [one[1:] for one in shares[0].commitments]):
        refusal(
            "bad-exchange", opening.check_shares, made, 0, shares[0].model_copy(update={"commitments": commitments})
        )


def test_an_entry_s_digest_follows_every_field() -> None:
    entry = members(1, 1, SPEC)[0].entry.entry
    for name in Entry.model_fields:
        value = getattr(entry, name)
        changed = entry.model_copy(update={name: value + 1 if isinstance(value, int) else value[:-1] + "x"})
        assert changed.digest() != entry.digest()
