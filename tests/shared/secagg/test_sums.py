"""Whole attempts among simulated clients: exact sums whoever is lost, and what clients refuse."""

from __future__ import annotations

import ast
import hashlib
import hmac
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import promptfed.shared.secagg as package
from promptfed.shared.secagg import SecureError, masks, member, messages, opening
from promptfed.shared.secagg.keys import (
    agree,
    derive,
    expect_exchange_key,
    fingerprint,
    is_signed,
    new_identity,
    new_pair,
    public_identity,
    public_of,
    sign,
)
from promptfed.shared.secagg.masks import Words, looks_unmasked, pair_mask, self_mask
from promptfed.shared.secagg.shares import PRIME, combine, commitment, share_value, split
from promptfed.shared.secagg.vectors import Whole, as_tensors, blurred, encoded, flat_change, mean_change, signed_sum
from promptfed.shared.spec.sections import SecureAggregationSpec
from promptfed.shared.spec.weighting import WHOLE_WEIGHT, Weighting, whole_weights
from tests.support import secure_sums as sums

SPEC = SecureAggregationSpec()


@pytest.mark.parametrize("step", sums.STEPS)
def test_the_sum_is_exact_with_30_percent_lost_in_a_step(step: str) -> None:
    clients = sums.members(10, 17, SPEC)
    played = sums.play(clients, SPEC, sums.lost(10, 0.3, step))
    assert len(played.counted) == (10 if step in ("confirm", "unmask") else 7)
    assert np.array_equal(played.total, sums.clear_sum(clients, played.counted))


@settings(max_examples=10, deadline=None)
@given(some.integers(3, 12), some.data())
def test_sums_with_weights_are_exact(count: int, data: some.DataObject) -> None:
    heavy = data.draw(some.integers(1, 65_535))
    # Of three, none weighs more than the others together: a client refuses that.
    weights = [data.draw(some.integers((heavy + 1) // 2, heavy)) for _ in range(count)]
    clients = sums.members(count, 3, SPEC, weights)
    step = data.draw(some.sampled_from(sums.STEPS))
    share = 0.3 if count >= 10 else 0.0
    played = sums.play(clients, SPEC, sums.lost(count, share, step, data.draw(some.integers(0, 99))))
    assert np.array_equal(played.total, sums.clear_sum(clients, played.counted))


@pytest.mark.slow
@pytest.mark.parametrize("step", sums.STEPS)
def test_two_hundred_clients(step: str) -> None:
    clients = sums.members(200, 64, SPEC)
    played = sums.play(clients, SPEC, sums.lost(200, 0.3, step))
    assert np.array_equal(played.total, sums.clear_sum(clients, played.counted))


def windows(content: bytes) -> set[bytes]:
    return {content[at : at + 16] for at in range(len(content) - 15)}


def test_nothing_that_the_coordinator_is_sent_holds_a_vector_or_a_secret() -> None:
    clients = sums.members(5, 40, SPEC)
    told = b"\0".join(sums.play(clients, SPEC, {"mask": {4}}).told)
    for client in clients:
        secret = client.secrets
        for content in (client.vector.tobytes(), secret.identity, secret.mask_key, secret.share_key, secret.seed):
            assert not any(window in told for window in windows(content))
    # The same look does find a vector whose masks were dropped.
    told += b"\0" + clients[2].vector.tobytes()
    assert any(window in told for window in windows(clients[2].vector.tobytes()))


def sharing(count: int = 5) -> tuple[list[sums.Member], messages.Roster, dict[int, messages.SharesAnswer]]:
    """Clients after step 1, by place, and their shares."""
    clients = sums.members(count, 70, SPEC)
    made, signed = messages.make_roster([client.entry for client in clients], SPEC, sums.UNIFORM)
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
    assert f"{clients[2].entry.entry.identity_key} are not what it encrypted to this client" in text
    swapped = [(job.boxes[0][0], job.boxes[1][1]), (job.boxes[1][0], job.boxes[0][1]), *job.boxes[2:]]
    refusal("bad-shares", clients[0].mask, job.model_copy(update={"boxes": swapped}).model_dump_json())
    refusal("bad-shares", clients[0].mask, job.model_copy(update={"boxes": job.boxes[1:]}).model_dump_json())


@pytest.mark.parametrize("changed", ["round", "attempt", "payload_sha256", "terms", "samples", "mask_key", "signature"])
def test_an_entry_that_is_not_as_it_was_signed_is_refused(changed: str) -> None:
    clients = sums.members(4, 3, SPEC)
    other = {
        "round": 2, "attempt": 2, "payload_sha256": "sha256:" + "3" * 64, "terms": "4" * 64, "samples": 65_535,
        "mask_key": clients[1].entry.entry.mask_key[::-1],
    }  # fmt: skip
    forged = clients[2].entry.model_dump(mode="json")
    if changed == "signature":
        forged["signature"] = clients[1].entry.signature
    else:
        forged["entry"][changed] = other[changed]
    entries = [clients[0].entry, clients[1].entry, messages.KeysAnswer.model_validate(forged), clients[3].entry]
    made, signed = messages.make_roster(entries, SPEC, sums.UNIFORM)
    refusal("bad-roster", clients[0].share, made.message(signed).model_dump_json())


def test_a_signed_entry_for_another_round_is_refused() -> None:
    clients = sums.members(4, 3, SPEC)
    old = member.signed_entry(clients[3].secrets, {**sums.ABOUT, "round": 7, "samples": 1})
    made, signed = messages.make_roster([*(client.entry for client in clients[:3]), old], SPEC, sums.UNIFORM)
    assert "round" in refusal("bad-roster", clients[0].share, made.message(signed).model_dump_json())


def test_a_roster_without_the_own_entry_twice_a_key_or_too_few_is_refused() -> None:
    clients = sums.members(4, 3, SPEC)
    made, signed = messages.make_roster([client.entry for client in clients[1:]], SPEC, sums.UNIFORM)
    refusal("bad-roster", clients[0].share, made.message(signed).model_dump_json())
    twice = member.signed_entry(clients[1].secrets, {**sums.ABOUT, "samples": 2})
    made, signed = messages.make_roster([*(client.entry for client in clients), twice], SPEC, sums.UNIFORM)
    assert "twice" in refusal("bad-roster", clients[0].share, made.message(signed).model_dump_json())
    few = messages.RosterMessage(
        entries=[client.entry for client in sorted(clients[:2], key=lambda c: c.entry.entry.digest())]
    )
    refusal("bad-roster", clients[0].share, few.model_dump_json())
    own, *others = (member.signed_entry(one.secrets, {**sums.ABOUT, "samples": 2}) for one in clients)
    made, signed = messages.make_roster([own, *others], SPEC, sums.UNIFORM)
    text = refusal("bad-roster", messages.read_roster, made.message(signed), own, SPEC, 3, sums.UNIFORM)
    assert "tells samples where all weigh the same" in text


def test_too_small_a_set_is_refused() -> None:
    clients, made, shares = sharing()
    few = opening.mask_job(made, 0, {place: shares[place] for place in (0, 1)})
    refusal("policy-minimum", clients[0].mask, few.model_dump_json())
    clients[0].limits = messages.Limits(minimum=6)
    refusal("policy-minimum", clients[0].mask, opening.mask_job(made, 0, shares).model_dump_json())


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        ({}, None),
        ({"max_own_share": 0.4}, None),  # 2 of 5
        ({"max_own_share": 0.399}, "policy-share"),
        ({"min_effective": 25 / 7}, None),  # (2 + 1 + 1 + 1)² / (4 + 1 + 1 + 1)
        ({"min_effective": 25 / 7 + 1e-9}, "policy-effective"),
        ({"minimum": 4}, None),
        ({"minimum": 5}, "policy-minimum"),
        ({"verified": 2, "unverified": 1}, None),
        ({"verified": 3, "unverified": 1}, "policy-peers"),
    ],
)
def test_a_sum_is_held_against_every_condition_of_the_site(limits: dict[str, float], kind: str | None) -> None:
    clients = sums.members(4, 3, SPEC, [20_000, 10_000, 10_000, 10_000])
    made, _ = messages.make_roster([client.entry for client in clients], SPEC, sums.BY_SAMPLES)
    heavy, *others = (bytes.fromhex(client.entry.entry.identity_key) for client in clients)
    peers = frozenset(fingerprint(key) for key in (heavy, *others[:2])) if "verified" in limits else frozenset()
    own = messages.Limits(**{"max_own_share": 0.5, "min_effective": 2.0} | limits, peers=peers)
    place = made.place_of(clients[0].entry.entry)
    if kind is None:
        assert member.expect_set(made, range(4), place, own) == {0, 1, 2, 3}
    else:
        refusal(kind, member.expect_set, made, range(4), place, own)
    for wrong in ([0, 1, 2, 4], [1, 0, 2, 3], [0, 1, 1, 2, 3], [other for other in range(4) if other != place]):
        refusal("bad-roster", member.expect_set, made, wrong, place, own)


def masked(count: int = 5) -> tuple[list[sums.Member], messages.Roster, dict[int, messages.SharesAnswer]]:
    clients, made, shares = sharing(count)
    for place, client in enumerate(clients):
        client.mask(opening.mask_job(made, place, shares).model_dump_json())
    return clients, made, shares


def test_a_list_that_is_not_what_was_masked_with_is_not_signed() -> None:
    clients, _, _ = masked()
    for alive, dropped in (([0, 1, 2, 3], []), ([0, 1, 2, 3, 4], [4]), ([1, 2, 3, 4], [0]), ([0, 1], [2, 3, 4])):
        job = messages.ConfirmJob(alive=alive, dropped=dropped)
        with pytest.raises(SecureError):
            clients[0].confirm(job.model_dump_json())


def test_nothing_is_revealed_without_enough_signatures_of_the_own_list() -> None:
    clients, made, _ = masked()
    here, there = (
        messages.ConfirmJob(alive=[0, 1, 2, 3], dropped=[4]),
        messages.ConfirmJob(alive=[0, 1, 3, 4], dropped=[2]),
    )
    answers = {}
    for place in (0, 1):
        clients[place].confirm(here.model_dump_json())
        answers[place] = member.confirm_list(
            clients[place].secrets, made, place, clients[place].sharing, here, clients[place].limits
        )
    answers[3] = member.confirm_list(clients[3].secrets, made, 3, clients[3].sharing, there, clients[3].limits)
    job = opening.unmask_job(answers)
    refusal("bad-roster", clients[0].unmask, job.model_dump_json())
    two = messages.UnmaskJob(signatures=job.signatures[:2])
    refusal("bad-roster", clients[0].unmask, two.model_dump_json())
    again = messages.UnmaskJob(signatures=[*job.signatures[:2], job.signatures[0]])
    refusal("bad-roster", clients[0].unmask, again.model_dump_json())
    strange = messages.UnmaskJob(signatures=[*job.signatures[:2], (9, job.signatures[0][1])])
    refusal("bad-roster", clients[0].unmask, strange.model_dump_json())
    answers[3] = member.confirm_list(clients[3].secrets, made, 3, clients[3].sharing, here, clients[3].limits)
    answer = messages.UnmaskAnswer.model_validate_json(clients[0].unmask(opening.unmask_job(answers).model_dump_json()))
    assert [one for one, _ in answer.seeds] == [0, 1, 2, 3]
    assert [one for one, _ in answer.keys] == [4]


LIST = messages.ConfirmJob(alive=[0, 1, 2, 3, 4], dropped=[5])


def revealed(clients: list[sums.Member], place: int) -> messages.UnmaskAnswer:
    """What the member at ``place`` gives for `LIST`."""
    held = clients[place].held
    return messages.UnmaskAnswer(seeds=[(one, held[one][0]) for one in LIST.alive], keys=[(5, held[5][1])])


def vectors(clients: list[sums.Member], sharing: list[int]) -> list[Words]:
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
    assert np.array_equal(total, sums.clear_sum(clients, LIST.alive))


def dealt_falsely(to: Sequence[int]) -> tuple[list[sums.Member], messages.Roster, dict[int, messages.SharesAnswer]]:
    """Member 2 commits to other shares of its seed for the holders ``to``, and deals just these."""
    clients, made, shares = sharing(6)
    false = split(new_pair(), made.threshold, range(1, 7))
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
    assert np.array_equal(total, sums.clear_sum(clients, LIST.alive))


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
    first, *others = shares[0].commitments
    for commitments in (others, [first[1:], *others], [one[1:] for one in shares[0].commitments]):
        refusal(
            "bad-exchange", opening.check_shares, made, 0, shares[0].model_copy(update={"commitments": commitments})
        )

    other = shares[0].model_copy(update={"roster_sha256": "0" * 64})
    assert "another roster" in refusal("wrong-roster", opening.check_shares, made, 0, other)
    opening.check_shares(made, 0, shares[0])


def test_a_roster_is_read_by_its_members_alone_and_with_keys_that_tell_them_apart() -> None:
    clients = sums.members(4, 3, SPEC)
    made, signed = messages.make_roster([client.entry for client in clients[1:]], SPEC, sums.UNIFORM)
    refusal("bad-roster", messages.read_roster, made.message(signed), clients[0].entry, SPEC, 3, sums.UNIFORM)
    assert messages.read_roster(made.message(signed), clients[1].entry, SPEC, 3, sums.UNIFORM).sha256 == made.sha256
    weak = clients[0].entry.entry.model_copy(update={"identity_key": "01" + "00" * 31})
    assert "with which all can sign" in refusal("bad-roster", messages.expect_keys, weak)
    twice = clients[0].entry.entry.model_copy(update={"share_key": clients[0].entry.entry.mask_key})
    assert "twice" in refusal("bad-roster", messages.expect_keys, twice)


def test_an_entry_s_digest_follows_every_field() -> None:
    entry = sums.members(1, 1, SPEC)[0].entry.entry
    for name in messages.Entry.model_fields:
        value = getattr(entry, name)
        changed = entry.model_copy(update={name: value + 1 if isinstance(value, int) else value[:-1] + "x"})
        assert changed.digest() != entry.digest()


# Published vectors through our functions, and slow literal versions beside them.


def test_x25519_is_that_of_rfc_7748() -> None:
    private = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    expected = "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    assert agree(private, point).hex() == expected


def test_a_key_of_small_order_is_refused() -> None:
    with pytest.raises(SecureError) as refused:
        agree(new_pair(), bytes(32))
    assert refused.value.kind == "bad-roster"
    assert "X25519" in refusal("bad-roster", expect_exchange_key, bytes(32))
    expect_exchange_key(public_of(new_pair()))


def test_identities_are_those_of_rfc_8032() -> None:
    private = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert public_identity(private).hex() == public
    assert fingerprint(bytes.fromhex(public)) == f"ed25519:{public}"


def test_a_signature_is_for_one_purpose_and_one_body() -> None:
    private = new_identity()
    public, signature = public_identity(private), sign(private, "keys", {"a": 1})
    assert is_signed(public, signature, "keys", {"a": 1})
    assert not is_signed(public, signature, "confirm", {"a": 1})
    assert not is_signed(public, signature, "keys", {"a": 2})
    assert not is_signed(public, signature[:-1] + bytes([signature[-1] ^ 1]), "keys", {"a": 1})
    assert not is_signed(public_identity(new_identity()), signature, "keys", {"a": 1})


def test_words_are_chacha20_s_of_rfc_8439() -> None:
    expected = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a37"
    assert masks.words(bytes(32), 6).astype("<u8").tobytes().hex() == expected


def literal_hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869 word for word."""
    prk, okm, block, number = hmac.digest(salt, secret, "sha256"), b"", b"", 1
    while len(okm) < length:
        block = hmac.digest(prk, block + info + bytes([number]), "sha256")
        okm, number = okm + block, number + 1
    return okm[:length]


def test_derived_keys_are_those_of_rfc_5869() -> None:
    published = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    info = bytes(range(0xF0, 0xFA))
    assert literal_hkdf(b"\x0b" * 22, bytes(range(13)), info, 42).hex() == published
    expected = literal_hkdf(b"secret", b"salt" * 8, b"promptfed/mask/1\0" + b"first" + b"second", 32)
    assert derive(b"secret", "mask", b"salt" * 8, b"first", b"second") == expected
    others = {derive(b"secret", purpose, b"salt" * 8) for purpose in ("self", "mask", "share")}
    assert len(others) == 3


def is_prime(n: int) -> bool:
    """Miller and Rabin's test with the first forty primes as bases."""
    bases = [p for p in range(2, 174) if all(p % q for q in range(2, p))]
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in bases:
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return len(bases) == 40


def test_the_field_is_one() -> None:
    assert is_prime(PRIME)
    assert not is_prime(PRIME - 2)
    assert PRIME > 1 << 256


def test_any_threshold_of_shares_opens_the_secret_and_fewer_say_nothing() -> None:
    secret = bytes(range(32))
    shares = split(secret, 3, range(1, 6))
    for three in combinations(shares, 3):
        assert combine({place: shares[place] for place in three}) == secret
    assert combine(shares) == secret
    # With one share less every secret is as likely: for each there is just one polynomial through what is known.
    known = {place: share_value(shares[place]) for place in (2, 5)}
    for guess in (bytes(32), b"\xff" * 32):
        third = interpolated({0: int.from_bytes(guess, "big"), **known}, 3).to_bytes(33, "big")
        assert combine({2: shares[2], 5: shares[5], 3: third}) == guess


def interpolated(points: dict[int, int], at: int) -> int:
    """Lagrange's polynomial through ``points``, word for word."""
    total = 0
    for x, y in points.items():
        term = y
        for other in points:
            if other != x:
                term = term * (at - other) * pow(x - other, -1, PRIME) % PRIME
        total += term
    return total % PRIME


def test_shares_are_values_of_one_polynomial() -> None:
    shares = split(b"\x07" * 32, 4, [1, 3, 8, 20, 1024])
    values = {place: share_value(share) for place, share in shares.items()}
    some = {place: values[place] for place in (1, 3, 8, 20)}
    assert interpolated(some, 1024) == values[1024]
    assert interpolated(some, 0) == int.from_bytes(b"\x07" * 32, "big")


def test_masks_of_two_cancel_and_are_not_small() -> None:
    one, other, roster = new_pair(), new_pair(), hashlib.sha256(b"roster").digest()
    given = pair_mask(one, public_of(other), roster, 1000)
    taken = pair_mask(other, public_of(one), roster, 1000)
    assert not (given + taken).any()
    assert np.unique(given).size == 1000
    assert not looks_unmasked(given)
    another = pair_mask(one, public_of(other), hashlib.sha256(b"another").digest(), 1000)
    assert (given != another).all()


def test_masks_are_the_same_in_every_version() -> None:
    """Members of one sum may run different releases: who adds which words must not change."""
    keys = bytes(range(32)), bytes(range(32, 64))
    first, second = (public_of(key) for key in keys)
    assert pair_mask(keys[1], first, bytes(32), 2).tolist() == [627672680077388449, 2765446954230994995]
    assert pair_mask(keys[0], second, bytes(32), 1).tolist() == [2**64 - 627672680077388449]
    assert self_mask(bytes(32), bytes(32), 2).tolist() == [12407046553994863298, 7444475708997107540]
    update = {"b": np.array([1.0, 2.0], np.float32), "a": np.array([100.0], np.float32)}
    moved = [-1.022548426009586e-06, -1.6113794213076414e-08, -2.1562338372765846e-08]  # in order of name
    assert blurred(np.zeros(3), update).tolist() == pytest.approx(moved)
    signed = {2: messages.ConfirmAnswer(alive_sha256="0" * 64, signature="2" * 128)}
    signed[0] = signed[2].model_copy(update={"signature": "0" * 128})
    assert [signer for signer, _ in opening.unmask_job(signed).signatures] == [0, 2]


def test_no_statistical_generator_makes_secrets() -> None:
    """A generator for statistics can be predicted from what it gave, and a mask with it."""
    modules = list(Path(package.__file__).parent.glob("*.py"))
    assert {"member.py", "messages.py", "opening.py", "keys.py", "shares.py", "masks.py", "vectors.py"} <= {
        module.name for module in modules
    }
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {"random"} & {alias.name for alias in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("random", "numpy.random"), path
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("random", "default_rng", "manual_seed", "Generator", "randn", "rand"), path


# Changes as whole numbers: exact at the edges, refused beyond them.


@settings(max_examples=50, deadline=None)
@given(
    some.lists(
        some.tuples(some.lists(some.floats(-16, 16), min_size=5, max_size=5), some.integers(1, 65_535)),
        min_size=3,
        max_size=20,
    )
)
def test_the_mean_is_the_weighted_one_of_changes_to_half_a_step_of_each(clients: list[tuple[list[float], int]]) -> None:
    """Each x is half a whole number off at most: the mean is within 2^-33·K/Σ a."""
    whole = whole_weights({place: samples for place, (_, samples) in enumerate(clients)}, sums.BY_SAMPLES)
    weights = [whole[place] / WHOLE_WEIGHT for place in range(len(clients))]
    total = np.zeros(5, dtype=np.uint64)
    for (change, _), weight in zip(clients, weights, strict=True):
        x = encoded(np.array(change), weight)
        assert np.abs(x).max() <= 1 << 36
        total = total + x.view(np.uint64)
    mean = mean_change(signed_sum(total), sum(weights))
    bound = Fraction(len(clients), 2**33) / sum(map(Fraction, weights))
    for place, found in enumerate(mean.tolist()):
        parts = zip(clients, weights, strict=True)
        exact = sum(Fraction(change[place]) * Fraction(weight) for (change, _), weight in parts)
        assert abs(Fraction(found) - exact / sum(map(Fraction, weights))) <= bound + Fraction(1e-14)  # a float's


def test_the_largest_sum_does_not_wrap() -> None:
    change = encoded(np.array([16.0, -16.0])).view(np.uint64)
    total = np.zeros(2, dtype=np.uint64)
    for _ in range(1024):
        total = total + change
    assert signed_sum(total).tolist() == [1 << 46, -(1 << 46)]


def odd_one_out(weights: list[float], payload: torch.Tensor, seed: int) -> tuple[Whole, Whole]:
    """The sum of clients' changes from ``payload``, and what the last, smallest one has added to it."""
    draws = torch.Generator().manual_seed(seed)
    parts = []
    for weight in weights:
        update = {"x": (payload + 1e-3 * torch.randn(payload.shape, generator=draws)).numpy()}
        parts.append(sums.encode_change(update, {"x": payload.numpy()}, weight))
    return sum(parts), parts[-1]


def chance_of_the_digits(total: Whole, part: Whole, modulus: int) -> float:
    """How often the sum modulo ``modulus`` is that of the one part."""
    return float(np.mean(total % modulus == part % modulus))


def test_a_sum_modulo_the_others_weight_tells_nothing_of_one_client() -> None:
    """Four clients have the largest weight, one another: with whole numbers times weights all 16 digits were told."""
    total, part = odd_one_out([1.0, 1.0, 1.0, 1.0, 0.3], torch.zeros(100_000), 1)
    for modulus in (1 << 16, 65_536 - 1, 65_535 * 3):
        assert chance_of_the_digits(total, part, modulus) < 1e-3  # by chance 1.5e-5


def test_the_grid_of_float32_tells_nothing_of_a_client_on_a_finer_one() -> None:
    """Near 0.75 numbers of float32 are multiples of 2^-24, so that whole numbers of weight 1 are multiples of 256."""
    total, part = odd_one_out([1.0, 1.0, 1.0, 1.0, 0.3], torch.full((100_000,), 0.75), 2)
    digits = chance_of_the_digits(total, part, 256)
    assert abs(digits - 1 / 256) < 5 * (1 / 256 / 100_000) ** 0.5
    residues = np.bincount((total - part) % 256, minlength=256)
    assert ((residues - 100_000 / 256) ** 2 / (100_000 / 256)).sum() < 255 + 5 * (2 * 255) ** 0.5, "uniform"


def test_blurring_stays_within_half_a_step_and_is_the_same_again() -> None:
    payload = {"x": np.array([0.75, 1.0, 0.0, -3.0], np.float32)}
    update = {"x": np.array([0.75, 1.0 + 2**-10, 0.0, -3.5], np.float32)}
    change = flat_change(update, payload)
    moved = blurred(change, update)
    step = np.spacing(update["x"]).astype(np.float64)
    assert (np.abs(moved - change) <= np.abs(step) / 2).all()
    assert np.array_equal(moved, blurred(change, update))
    assert (moved[[0, 1, 3]] != change[[0, 1, 3]]).all()
    mean = as_tensors(moved, payload, {"x": (4,)})["x"]
    assert np.array_equal(mean[[0, 2]], payload["x"][[0, 2]]), "what has not changed stays as it was"


def test_a_change_starts_from_the_payload_and_goes_back_to_it() -> None:
    start = np.random.default_rng(1).standard_normal((2, 3)).astype(np.float32)
    payload = {"a": start, "unsent": np.ones(1, np.float32)}
    update = {"a": start + 0.25, "b": np.array([1.0, -2.0], np.float32), "c": np.array(3.0, np.float32)}
    change = sums.encode_change(update, payload)
    mean = mean_change(change, 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in update.items()}
    back = as_tensors(mean, payload, shapes)
    assert set(back) == set(update)
    for name, tensor in update.items():
        assert np.abs(back[name] - tensor).max() <= 1e-6


@pytest.mark.parametrize("value", [16.001, float("nan"), float("inf")])
def test_what_is_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(SecureError) as refused:
        sums.encode_change({"x": np.array([0.0, value], np.float32)}, {})
    assert refused.value.kind == "out-of-range"


def test_an_update_in_the_clear_is_told_from_a_masked_one() -> None:
    some = torch.randn(100, generator=torch.Generator().manual_seed(2))
    clear = sums.encode_change({"x": some.numpy()}, {}).view(np.uint64)
    assert looks_unmasked(clear)
    assert [looks_unmasked(clear[:size]) for size in (63, 64)] == [False, True]
    least, most, large = -(1 << 60), (1 << 60) - 1, 1 << 60

    def looks(small: int, words: tuple[int, int] = (least, most)) -> bool:
        cut = np.array([*(words * 50)[:small], *[large] * (100 - small)], np.int64)
        return looks_unmasked(cut.view(np.uint64))

    assert [looks(50), looks(51), looks(100)] == [False, True, True], "more than half"
    assert not looks(100, (least - 1, large)), "just no small words"


def test_weights_keep_their_ratio() -> None:
    assert whole_weights({"a": 5, "b": 5}, sums.BY_SAMPLES) == {"a": 65_536, "b": 65_536}
    assert whole_weights({"a": 5, "b": 50}, sums.UNIFORM) == {"a": 65_536, "b": 65_536}
    assert whole_weights({"a": 1 << 30, "b": 1 << 29, "c": 1}, sums.BY_SAMPLES) == {"a": 65_536, "b": 32_768, "c": 1}
    capped = Weighting(weighting="samples", max_weight_share=0.4)
    assert whole_weights({"a": 80, "b": 10, "c": 10}, capped) == {"a": 65_536, "b": 49_152, "c": 49_152}
