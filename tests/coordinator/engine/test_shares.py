"""How federations are divided among several coordinators."""

from __future__ import annotations

from collections import Counter

from promptfed.coordinator.engine.shares import deal, surplus
from promptfed.coordinator.store.leases import LeaseLook, LeaseView


def leases(count: int, running: int, *holders: str | None) -> list[LeaseView]:
    """``count`` leases, the first ``running`` of running federations, whose holders are ``holders`` in turn."""
    return [LeaseView(f"fed-{number}", number < running, holders[number % len(holders)]) for number in range(count)]


def test_free_federations_are_dealt_in_equal_shares_running_ones_first() -> None:
    all_leases = leases(1000, 100, "a", "b", None)
    dealt = deal(all_leases, ["a", "b"])
    assert sum(map(len, dealt.values())) == 333
    running = {lease.federation for lease in all_leases if lease.running}
    for taker in ("a", "b"):
        held = {lease.federation for lease in all_leases if lease.holder == taker} | set(dealt[taker])
        assert abs(len(held) - 500) <= 2
        assert abs(len(held & running) - 50) <= 1
        kinds = [id in running for id in dealt[taker]]
        assert kinds == sorted(kinds, reverse=True), "running ones first"


def test_who_has_taken_its_share_already_is_dealt_nothing_more() -> None:
    before = leases(12, 0, "a", "b", None)
    mine = set(deal(before, ["a", "b"])["a"])
    later = [LeaseView(known.federation, False, "a" if known.federation in mine else known.holder) for known in before]
    dealt = deal(later, ["a", "b"])
    assert dealt["a"] == []
    assert len(dealt["b"]) == 2


def test_nobody_takes_what_nobody_can() -> None:
    assert deal(leases(3, 1, None), []) == {}


def test_the_surplus_goes_to_who_has_returned_and_then_nothing_moves() -> None:
    now = leases(999, 99, "a", "b")
    takers = ["a", "b", "c"]
    moved = {id for mine in ("a", "b") for id in surplus(now, takers, mine, lambda id: True)}
    free = [
        LeaseView(known.federation, known.running, None if known.federation in moved else known.holder) for known in now
    ]
    new = {id: taker for taker, ids in deal(free, takers).items() for id in ids}
    assert set(new.values()) == {"c"}, "nothing comes back to who gave it"
    after = [LeaseView(known.federation, known.running, new.get(known.federation, known.holder)) for known in free]
    assert Counter(lease.holder for lease in after) == {"a": 333, "b": 333, "c": 333}
    assert Counter(lease.holder for lease in after if lease.running) == {"a": 33, "b": 33, "c": 33}
    assert all(surplus(after, takers, taker, lambda id: True) == [] for taker in takers)


def test_small_differences_stay_and_what_may_not_move_stays() -> None:
    assert surplus(leases(2, 2, "a"), ["a", "b"], "a", lambda id: True) == []
    assert surplus(leases(100, 0, "a"), ["a", "b"], "a", lambda id: False) == []
    assert surplus(leases(100, 0, "a"), ["a", "b"], "a", lambda id: id == "fed-7") == ["fed-7"]


def test_leases_go_to_who_has_its_object_store_or_to_anybody_if_nobody_has() -> None:
    assert LeaseLook([], [], living={"b": True, "a": True, "c": False}).takers == ["a", "b"]
    assert LeaseLook([], [], living={"b": False, "a": False}).takers == ["a", "b"]
