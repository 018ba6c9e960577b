"""What a coordinator takes of a secure sum's members, and whom a sum is made without: both sides of each bound."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from promptfed.shared.secagg import SecureError, member, messages, opening
from promptfed.shared.secagg.keys import fingerprint, new_identity, new_pair, public_identity, public_of
from promptfed.shared.secagg.messages import KeysAnswer, Limits, too_heavy
from promptfed.shared.secagg.shares import PRIME, combine, commitment, expect_share, share_value, split
from promptfed.shared.secagg.vectors import as_tensors, encoded, flat_change, mean_change, signed_sum
from promptfed.shared.spec.sections import SecureAggregationSpec
from promptfed.shared.spec.weighting import Weighting
from tests.shared.secagg.test_sums import LIST, masked, refusal, revealed, sharing
from tests.support import secure_sums as sums

SPEC = SecureAggregationSpec()
KEYS = {name: new_identity() for name in "abcdefghij"}


def peers(names: str) -> frozenset[str]:
    return frozenset(fingerprint(public_identity(KEYS[name])) for name in names)


def answered(samples: Mapping[str, int], limits: Mapping[str, Limits] | None = None) -> dict[str, KeysAnswer]:
    """The signed entries of members, in this order."""
    given = {}
    for name, count in samples.items():
        own = member.signed_entry(member.Secrets.fresh(KEYS[name]), {**sums.ABOUT, "samples": count})
        given[name] = own.model_copy(update={"limits": (limits or {}).get(name)})
    return given


EVEN, ONE_HEAVY = dict.fromkeys("abcd", 10), {"b": 10, "a": 10, "c": 10, "d": 20}  # count as 4 and as 3.57
LISTS = Limits(peers=peers("acd"))


@pytest.mark.parametrize(
    ("samples", "limits", "out"),
    [
        (EVEN, {}, {}),
        (EVEN, {"a": Limits(minimum=4)}, {}),
        (EVEN, {"a": Limits(minimum=5)}, {"a": "policy-minimum"}),
        (ONE_HEAVY, dict.fromkeys("ab", Limits(min_effective=3.6)), dict.fromkeys("ba", "policy-effective")),  # half
        ({**EVEN, "e": 30}, dict.fromkeys("abc", Limits(min_effective=3.8)), {"e": "too-heavy"}),  # more than half
        ({**EVEN, "e": 30}, dict.fromkeys("abc", Limits(min_effective=3.7)), {}),
        (EVEN, dict.fromkeys(EVEN, Limits(min_effective=4.1)), dict.fromkeys(EVEN, "policy-effective")),  # all alike
        (EVEN, dict.fromkeys("acd", LISTS), {"b": "policy-peers"}),
        # Of equals the first in order of name goes first.
        (dict.fromkeys("jbacd", 10), dict.fromkeys("acd", LISTS), {"b": "policy-peers", "j": "policy-peers"}),
        ({"e": 30, "d": 30, "a": 10, "b": 10, "c": 10}, dict.fromkeys("abc", Limits(min_effective=3.9)),
         {"d": "too-heavy", "e": "too-heavy", **dict.fromkeys("abc", "policy-effective")}),
        (EVEN, dict.fromkeys(EVEN, Limits(peers=peers("j"))), dict.fromkeys(EVEN, "policy-peers")),
        # Of two with the same list, one is on it: each is looked at. Without it the other has too few.
        (ONE_HEAVY, dict.fromkeys("ba", Limits(peers=peers("ac"), verified=2, unverified=1)),
         {"a": "policy-peers", "b": "policy-peers"}),
        (ONE_HEAVY, dict.fromkeys("bacd", Limits(max_own_share=0.39)), {"d": "policy-share"}),
        (dict.fromkeys("abc", 10), {"a": Limits(minimum=4)}, {"a": "policy-minimum"}),
        (dict.fromkeys("ab", 10), {"a": Limits(minimum=4)}, {}),  # of two there is no sum anyway
    ],
)  # fmt: skip
def test_who_is_left_out_so_that_the_others_take_part(
    samples: Mapping[str, int], limits: Mapping[str, Limits], out: dict[str, str]
) -> None:
    found = opening.unfit(answered(samples, limits), SPEC, sums.BY_SAMPLES)
    assert ({name: error.kind for name, error in found.items()}, next(iter(found), "")) == (out, next(iter(out), ""))


def test_the_keys_of_an_entry_are_three_that_others_can_use() -> None:
    good = {name: public_of(new_pair()).hex() for name in ("mask_key", "share_key")}
    good["identity_key"] = public_identity(KEYS["a"]).hex()
    assert sorted(messages.expect_keys(messages.Entry.model_construct(**good))) == sorted(good.values())
    for name in good:
        for wrong in ("00" * 32, "01" + "00" * 31, good["share_key" if name != "share_key" else "mask_key"]):
            entry = messages.Entry.model_construct(**(good | {name: wrong}))
            assert refusal("bad-roster", messages.expect_keys, entry)


def test_a_share_is_committed_to_for_its_owner_holder_and_kind() -> None:
    roster, pair = bytes(range(32)), (bytes(32) + b"\1", PRIME.to_bytes(33, "big"))
    places = [struct.pack(">III", 3, 5, kind) for kind in (0, 1)]
    digests = [b"promptfed/share/1\0" + roster + place + share for place, share in zip(places, pair, strict=True)]
    committed = commitment(roster, 3, 5, pair)
    assert committed == b"".join(hashlib.sha256(one).digest() for one in digests)
    expect_share(roster, 3, 5, 0, pair[0], committed)
    said = "that entry 5 holds of the mask key of entry 3 is not the one that was committed to"
    assert said in refusal("bad-shares", expect_share, roster, 3, 5, 1, pair[0], committed)
    assert "committed to" in refusal("bad-shares", expect_share, roster, 5, 3, 0, pair[0], committed)
    assert "less than the field's prime" in refusal("bad-shares", expect_share, roster, 3, 5, 1, pair[1], committed)


def test_places_and_changes_are_in_order() -> None:
    job = opening.confirm_job([40, 8, 3, 16, 24], [24, 3])
    assert (job.alive, job.dropped) == ([3, 24], [8, 16, 40])
    update = {"b": np.full(2, 3.0, np.float32), "a": np.full((1, 1), 5.0, np.float32)}
    assert flat_change(update, {"a": np.ones((1, 1), np.float32), "b": np.ones(3, np.float32)}).tolist() == [4, 3, 3]


def test_who_is_counted_is_signed_in_order() -> None:
    wanted = hashlib.sha256(b'["01ff","02aa"]').hexdigest()
    assert (
        messages.alive_digest([b"\x02\xaa", b"\x01\xff"]) == messages.alive_digest([b"\x01\xff", b"\x02\xaa"]) == wanted
    )


def test_who_is_too_heavy_for_a_sum() -> None:
    rule = Weighting(weighting="samples", max_weight_share=1.0)
    for weights, heavy in (
        ((20, 10, 10), "as much as the others"), ((21, 10, 10), ["a"]), ((7, 7, 2), "as 2.51 clients"),
        ((10**9, 10**9, 10**9), "alike"), ((4, 4, 1), ["a"]),
        ((10**9, 10**6, 10, 10, 10), ["a", "b"]), ((10**9, 10**6, 10**3, 1), ["a"]), ((9, 1), []),
    ):  # fmt: skip
        expected = heavy if isinstance(heavy, list) else []
        assert too_heavy(dict(zip("abcde", weights, strict=False)), rule) == expected, weights
    assert too_heavy({"b": 4, "a": 4, "c": 1}, rule) == ["a"], "of two that are alike the first by name"
    assert too_heavy({"a": 10**9, "b": 10, "c": 10}, Weighting(weighting="uniform")) == []
    assert too_heavy({"a": 10**9, "b": 10**6, "c": 10**3, "d": 1}, Weighting(weighting="samples")) == ["a"]


@pytest.mark.parametrize(
    ("count", "listed", "own", "fault"),
    [
        (3, "abc", {}, None),
        (4, "abc", {"unverified": 1}, None), (4, "abc", {}, "1 of the 3 other members .*; 0 may be"),
        (4, "ab", {"unverified": 9}, "with more than 1 the operator"),  # the threshold is 3, 1 is safe
        (5, "abcd", {"unverified": 9}, "with more than 0 the operator"), (5, "abcde", {}, None), (5, "", {}, None),
        (10, "abcdefgh", {"unverified": 9}, "with more than 1 the operator"),
        (10, "abcdefghi", {"unverified": 1}, None),
    ],
)  # fmt: skip
def test_so_many_members_may_be_unknown(count: int, listed: str, own: dict[str, int], fault: str | None) -> None:
    entries = answered(dict.fromkeys("abcdefghij"[:count], 1))
    roster, _ = messages.make_roster(entries.values(), SPEC, sums.UNIFORM)
    assert roster.threshold == {3: 2, 4: 3, 5: 3, 10: 6}[count]
    place, limits = roster.place_of(entries["a"].entry), Limits(peers=peers(listed), **own)
    if fault is None:
        member.expect_roster(roster, place, limits)
    else:
        with pytest.raises(SecureError, match=fault) as refused:
            member.expect_roster(roster, place, limits)
        assert refused.value.kind == "policy-peers"


@pytest.mark.parametrize(
    ("minimum", "most", "holds"), [(3, 4, True), (4, 4, True), (5, 9, False), (3, 3, False)]
)  # fmt: skip
def test_a_roster_is_of_so_many(minimum: int, most: int, holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MOST_CLIENTS", most)
    given = answered(dict.fromkeys("abcd", 1))
    roster, signed = messages.make_roster(given.values(), SPEC, sums.UNIFORM)
    read = roster.message(signed), given["a"], SPEC, minimum, sums.UNIFORM
    if holds:
        assert messages.read_roster(*read).sha256 == roster.sha256
    else:
        assert "is of 4 clients" in refusal("bad-roster", messages.read_roster, *read)


def test_a_confirmation_is_of_the_list_and_of_its_member() -> None:
    clients, made, _ = masked()
    here, other = ([0, 1, 2, 3, 4], [0, 1, 2, 3])
    answers: list[Any] = []
    for alive in (here, other):
        job = messages.ConfirmJob(alive=alive, dropped=[place for place in here if place not in alive])
        answers += [
            member.confirm_list(clients[at].secrets, made, at, clients[at].sharing, job, Limits()) for at in (0, 1)
        ]
    opening.check_confirmation(made, 0, here, answers[0])
    named_otherwise = answers[0].model_copy(update={"alive_sha256": answers[2].alive_sha256})
    for false in (answers[1], answers[2], named_otherwise):
        refusal("bad-signature", opening.check_confirmation, made, 0, here, false)


def test_an_exchange_has_what_was_asked_for_and_nothing_else() -> None:
    clients, made, shares = masked(6)
    boxes = shares[0].boxes
    for wrong in (boxes[1:], [*boxes, boxes[0]], [*boxes[1:], boxes[0][1:]]):
        text = refusal("bad-exchange", opening.check_shares, made, 0, shares[0].model_copy(update={"boxes": wrong}))
        assert "5 boxes of 82 bytes" in text
    answer = revealed(clients, 0)
    for change in ({"seeds": answer.seeds[1:]}, {"keys": []}, {"keys": [*answer.seeds[:1], *answer.keys]}):
        text = refusal("bad-shares", opening.check_reveal, made, 0, LIST, answer.model_copy(update=change), shares)
        assert "asked for" in text
    assert "no masked vector" in refusal("bad-shares", opening.open_sum, made, LIST, [], {}, shares)
    _, alone, dealt = sharing(3)
    assert [place for place, _ in opening.mask_job(alone, 1, dealt).boxes] == [0, 2]


@pytest.mark.parametrize(
    ("threshold", "places", "holds"),
    [(1, [1], True), (2, [1, 2], True), (0, [1, 2], False), (3, [1, 2], False), (1, [0, 1], False),
     (2, [1, 1], False)],
)  # fmt: skip
def test_shares_are_of_different_points_but_zero(threshold: int, places: list[int], holds: bool) -> None:
    if holds:
        shares = split(bytes(range(32)), threshold, places)
        assert combine(shares) == bytes(range(32))
    else:
        with pytest.raises(ValueError, match="cannot be made"):
            split(bytes(32), threshold, places)


def test_so_many_shares_open_a_secret_and_one_fewer_is_said() -> None:
    roster = SimpleNamespace(threshold=3, entries=[SimpleNamespace(identity_key="dealer")])
    shares, opener = split(b"s" * 32, 3, [1, 2, 4, 5]), opening._Opener(cast(Any, roster))
    three = {place: shares[place] for place in (5, 1, 4)}
    assert opener.secret(0, three, bytes.hex, (b"s" * 32).hex()) == b"s" * 32
    assert opener.secret(0, shares | {1: shares[2]}, bytes.hex, (b"s" * 32).hex()) == b"s" * 32, "one is false"
    two = {place: shares[place] for place in (5, 1)}
    assert combine(two) != b"s" * 32, "two know nothing of it"
    assert "2 shares of the secret of entry 0 are there; 3" in refusal("bad-shares", opener.secret, 0, two, str, "")
    assert "ed25519:dealer" in refusal("bad-shares", opener.secret, 0, three, bytes.hex, "another")


def test_a_secret_has_32_bytes_and_a_share_is_in_the_field() -> None:
    assert combine({1: ((1 << 256) - 1).to_bytes(33, "big")}) == b"\xff" * 32
    assert "no secret of 32 bytes" in refusal("bad-shares", combine, {1: (1 << 256).to_bytes(33, "big")})
    assert share_value((PRIME - 1).to_bytes(33, "big")) == PRIME - 1
    for wrong in (PRIME.to_bytes(33, "big"), bytes(32), bytes(34)):
        refusal("bad-shares", share_value, wrong)


def test_changes_sums_and_means_within_their_bounds() -> None:
    """A change and a mean of 16, a sum of 2⁶² are the most; what is not in the payload starts from 0."""
    edge = np.array([16.0, -16.0])
    assert flat_change({"b": edge, "a": np.zeros((0, 2))}, {"b": np.ones(3)}).tolist() == edge.tolist()
    assert flat_change({"b": edge}, {"b": np.array([1.0, 1.0 - 2**-9])[::-1] * 0}).tolist() == edge.tolist()
    assert flat_change({}, {}).shape == (0,)
    for sign in (1.0, -1.0):
        refusal("out-of-range", flat_change, {"b": sign * np.array([16.001, 0.0])}, {"b": np.zeros(2)})
    whole = encoded(np.array([2.5, 3.5, -1.25]) / 2**32, 1.0)
    assert (whole.tolist(), encoded(edge, 0.5).tolist()) == ([2, 4, -1], [1 << 35, -(1 << 35)])
    for most in (1 << 62, -(1 << 62)):
        assert signed_sum(np.array([0, most], np.int64).view(np.uint64)).tolist() == [0, most]
        beyond = np.array([0, most + (1 if most > 0 else -1)], np.int64).view(np.uint64)
        refusal("sum-invalid", signed_sum, beyond)
    assert signed_sum(np.zeros(0, np.uint64)).size == mean_change(np.zeros(0, np.int64), 1.0).size == 0
    assert mean_change(np.array([1 << 37, -(1 << 37)]), 2.0).tolist() == edge.tolist()
    refusal("sum-invalid", mean_change, np.array([0, -(1 << 37) - (1 << 9)]), 2.0)
    payload = {"a": np.ones(2, np.float32), "b": np.ones((1, 2), np.float32)}
    tensors = as_tensors(np.arange(4.0), payload, {"b": (2,), "a": (2,)})
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"a": [1.0, 2.0], "b": [2.0, 3.0]}
    with pytest.raises(ValueError, match="vector of 5 numbers does not fill tensors of 4"):
        as_tensors(np.arange(5.0), payload, {"b": (2,), "a": (2,)})
