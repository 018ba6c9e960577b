"""Members that would end the sum for all others, by shares, keys or weights: each is named, and the rest go on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import torch

from promptfed.client_service.exits import Failure
from promptfed.client_service.privacy.identity import identity_of
from promptfed.shared.messages import Task
from promptfed.shared.secagg import SecureError
from promptfed.shared.secagg.keys import (
    expect_exchange_key,
    fingerprint,
    is_identity,
    new_identity,
    public_identity,
    sign,
)
from promptfed.shared.secagg.messages import KeysAnswer, Limits, SharesAnswer, UnmaskAnswer
from tests.coordinator.test_secure_sums import TEN, Leap, drive, expected, federation_of, step
from tests.support.coordinators import InThread
from tests.support.open_phases import prompts
from tests.support.secure_clients import SecureClient
from tests.support.waiting import PATIENCE


class Liar(SecureClient):
    """A member that gives a false share of everybody's seed when the sum is to be opened."""

    refused: httpx.Response | None = None

    def exchange(self, task: dict[str, Any], body: bytes) -> httpx.Response:
        if task["kind"] != "unmask":
            return super().exchange(task, body)
        told = UnmaskAnswer.model_validate_json(body)
        seeds = [(owner, share[:-1] + bytes([share[-1] ^ 1])) for owner, share in told.seeds]
        false = told.model_copy(update={"seeds": seeds}).model_dump_json().encode()
        self.refused = super().exchange(task, false)
        return httpx.Response(200)


def test_false_shares_of_a_member_are_refused_by_name_and_the_sum_is_right(coordinator: InThread, leap: Leap) -> None:
    federation, clients = federation_of(coordinator, *"abcd", liars={"a": Liar}, aggregation={"weighting": "uniform"})
    end = time.monotonic() + PATIENCE
    while clients[0].refused is None:  # before the three others that are enough
        assert time.monotonic() < end
        for client in clients:
            step(client, {"unmask": tuple("bcd")})
    drive(coordinator, clients, leap)
    assert coordinator.get(federation)["state"] == "finished"
    assert clients[0].refused.status_code == 422
    assert clients[0].refused.json()["type"].endswith("/bad-shares")
    (phase,) = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert [(one["client"], one["type"]) for one in phase["failed"]] == [("a", "bad-shares")]
    wanted = expected(prompts(coordinator, federation, 0), list("abcd"), dict.fromkeys("abcd", 1.0))
    found = prompts(coordinator, federation, 1)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), "bit for bit"


def failures(coordinator: InThread, federation: str) -> list[list[tuple[str, str]]]:
    """Who has failed by the report of each attempt, and how."""
    phases = coordinator.get(f"{federation}/rounds/1")["phases"]
    return [[(one["client"], one["type"]) for one in phase["failed"]] for phase in phases]


def expect_sum(coordinator: InThread, federation: str, names: str) -> None:
    """The federation has ended, and its sum is that of these, bit for bit."""
    assert coordinator.get(federation)["state"] == "finished"
    wanted = expected(prompts(coordinator, federation, 0), list(names), dict.fromkeys(names, 1.0))
    found = prompts(coordinator, federation, 1)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), "bit for bit"


class FalseDealer(SecureClient):
    """A member whose boxes or commitments are false for all who are ``fooled``, by place among the others."""

    part, fooled = "boxes", slice(None)

    def prepared(self, task: Task, told: bytes) -> bytes:
        body = super().prepared(task, told)
        if task.kind != "share":
            return body
        answer = SharesAnswer.model_validate_json(body)
        given = list(getattr(answer, self.part))
        given[self.fooled] = [one[:-1] + bytes([one[-1] ^ 1]) for one in given[self.fooled]]
        return answer.model_copy(update={self.part: given}).model_dump_json().encode()


@pytest.mark.parametrize(("part", "fooled"), [("boxes", 2), ("commitments", 4)])
def test_who_deals_false_shares_to_many_is_named_and_the_next_attempt_is_without_it(
    coordinator: InThread, leap: Leap, part: str, fooled: int
) -> None:
    liar = type("Liar", (FalseDealer,), {"part": part, "fooled": slice(fooled)})
    federation, clients = federation_of(coordinator, *"abcd", liars={"c": liar}, aggregation={"weighting": "uniform"})
    drive(coordinator, clients, leap)
    assert failures(coordinator, federation) == [[("c", "bad-shares")], []]
    expect_sum(coordinator, federation, "abd")


def test_two_dealers_of_false_shares_are_left_out_together(coordinator: InThread, leap: Leap) -> None:
    liars = dict.fromkeys("ch", FalseDealer)
    federation, clients = federation_of(coordinator, *TEN, liars=liars, aggregation={"weighting": "uniform"})
    drive(coordinator, clients, leap)
    assert failures(coordinator, federation) == [[("c", "bad-shares"), ("h", "bad-shares")], []]
    expect_sum(coordinator, federation, "abdefgij")


def test_two_who_name_all_put_one_out(coordinator: InThread, leap: Leap) -> None:
    """Nobody is believed of more dealers than half of the members that a sum can miss."""

    class Accuser(SecureClient):
        def prepared(self, task: Task, told: bytes) -> bytes:
            if task.kind == "mask":
                raise Failure("bad-shares", " ".join(sorted(keys)))
            return super().prepared(task, told)

    federation, clients = federation_of(coordinator, *"abcdef", liars=dict.fromkeys("ab", Accuser))
    keys = {fingerprint(public_identity(identity_of(client.state))) for client in clients[2:]}
    drive(coordinator, clients, leap)
    (first, _) = failures(coordinator, federation)
    assert len(first) == 1
    assert coordinator.get(federation)["state"] == "finished"


def test_the_word_of_one_puts_nobody_out(coordinator: InThread, leap: Leap) -> None:
    """Either may lie: the sum is that of the others and the one that dealt."""
    liar = type("Liar", (FalseDealer,), {"fooled": slice(1)})
    federation, clients = federation_of(coordinator, *"abcd", liars={"c": liar}, aggregation={"weighting": "uniform"})
    drive(coordinator, clients, leap)
    ((one,),) = failures(coordinator, federation)
    assert one[1] == "bad-shares"
    expect_sum(coordinator, federation, "abcd".replace(one[0], ""))


HEAVY = {"a": 58, "b": 20, "c": 20, "d": 20, "e": 20}  # counts as 3.84 clients


@pytest.mark.parametrize(
    ("limits", "out"),
    [
        ({"b": Limits(minimum=6)}, [("b", "policy-minimum")]),
        ({name: Limits(min_effective=3.9) for name in "bcde"}, [("a", "too-heavy")]),
    ],
)
def test_a_roster_that_policies_rule_out_is_not_sent(
    coordinator: InThread, leap: Leap, limits: dict[str, Limits], out: list[tuple[str, str]]
) -> None:
    given: Any = {
        "participation": {"min_clients": 5, "quorum": 0.5},
        "rounds": 1,
        "aggregation": {"max_weight_share": 1.0},
    }
    given["aggregation"]["weighting"] = "samples"
    federation = coordinator.create(secure_aggregation={"step_seconds": 3600}, **given)
    clients = [SecureClient(coordinator.http, federation, name) for name in HEAVY]
    token = coordinator.token(federation)
    for client in clients:
        assert client.enrol(token, num_samples=HEAVY[client.name]).status_code == 201
        client.secure._limits = limits.get(client.name, Limits())
    coordinator.start(federation)
    drive(coordinator, clients, leap)
    assert coordinator.get(federation)["state"] == "finished"
    assert failures(coordinator, federation) == [out], "in the first attempt"
    (phase,) = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert phase["secure"]["sum_clients"] == 4


def test_a_stranger_is_left_out_whom_most_do_not_list(coordinator: InThread, leap: Leap) -> None:
    federation, clients = federation_of(coordinator, *"abcd", aggregation={"weighting": "uniform"})
    known = frozenset(
        fingerprint(public_identity(identity_of(client.state))) for client in clients if client.name != "b"
    )
    for client in clients:
        client.secure._limits = Limits(peers=known) if client.name != "b" else Limits()
    drive(coordinator, clients, leap)
    assert failures(coordinator, federation) == [[("b", "policy-peers")]]
    expect_sum(coordinator, federation, "acd")


def test_where_policies_allow_no_sum_nobody_is_told_a_roster(coordinator: InThread, leap: Leap) -> None:
    federation, clients = federation_of(coordinator, *"abcd", aggregation={"weighting": "uniform"})
    for client in clients:
        client.secure._limits = Limits(minimum=5)
    drive(coordinator, clients, leap)
    view = coordinator.get(federation)
    assert (view["state"], view["reason"]) == ("paused", "quorum_missed")
    assert failures(coordinator, federation)[0] == [(name, "policy-minimum") for name in "abcd"]


SMALL_ORDER = (
    *(bytes(32).hex(), "01" + 31 * "00", "ec" + 30 * "ff" + "7f", "ed" + 30 * "ff" + "7f", "ee" + 30 * "ff" + "7f"),
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
)
"""Encodings of the points of X25519's curve and its twist whose order divides 8."""


class Keys(SecureClient):
    """A member whose entry of the roster has other keys than its own."""

    keys: Mapping[str, str] = MappingProxyType({})
    refused: httpx.Response | None = None

    def prepared(self, task: Task, told: bytes) -> bytes:
        body = super().prepared(task, told)
        if task.kind != "train":
            return body
        entry = KeysAnswer.model_validate_json(body).entry
        own = entry.model_copy(update={key: getattr(entry, value, value) for key, value in self.keys.items()})
        signature = sign(identity_of(self.state), "keys", own.model_dump(mode="json")).hex()
        return KeysAnswer(entry=own, signature=signature).model_dump_json().encode()

    def exchange(self, task: dict[str, Any], body: bytes) -> httpx.Response:
        answer = super().exchange(task, body)
        if task["kind"] == "train":
            self.refused = answer
        return httpx.Response(200)


WRONG = [{"share_key": SMALL_ORDER[-1]}, {"mask_key": "share_key"}, {"share_key": "identity_key"}]


def refused_as(client: Keys) -> tuple[int, str]:
    assert client.refused is not None
    return client.refused.status_code, client.refused.json()["type"].rpartition("/")[2]


def test_keys_that_nobody_can_use_are_refused_at_their_sender(coordinator: InThread, leap: Leap) -> None:
    liars = {name: type("Liar", (Keys,), {"keys": keys}) for name, keys in zip("abc", WRONG, strict=True)}
    federation, clients = federation_of(coordinator, *"abcdef", liars=liars, aggregation={"weighting": "uniform"})
    drive(coordinator, clients, leap)
    assert [refused_as(client) for client in clients[:3]] == [(422, "bad-keys")] * 3
    assert coordinator.get(federation)["state"] == "finished"
    (phase,) = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert [(one["client"], one["type"]) for one in phase["failed"]] == [(name, "bad-keys") for name in "abc"]
    assert [one["client"] for one in phase["counted"]] == ["d", "e", "f"]


def test_a_key_of_another_member_is_refused(coordinator: InThread) -> None:
    shared = public_identity(new_identity())
    liars = {name: type("Liar", (Keys,), {"keys": {"share_key": shared.hex()}}) for name in "ab"}
    _, clients = federation_of(coordinator, *"abcde", liars=liars, aggregation={"weighting": "uniform"})
    for client in clients:
        assert client.answer(coordinator.task(client)).status_code == 201
    for client in clients[:2]:
        client.answer(coordinator.task(client))
    assert clients[0].refused.status_code == 201
    assert refused_as(clients[1]) == (422, "bad-keys")


@pytest.mark.parametrize("names", ["abc", "abcd"])
def test_one_that_outweighs_all_is_refused_by_name(coordinator: InThread, names: str) -> None:
    given = {"participation": {"min_clients": len(names), "quorum": 0.5}, "rounds": 1}
    federation = coordinator.create(secure_aggregation={"step_seconds": 3600}, **given)
    clients = [Keys(coordinator.http, federation, name) for name in names]
    token = coordinator.token(federation)
    for client in clients:
        assert client.enrol(token, num_samples=10**9 if client.name == "a" else 10).status_code == 201
    coordinator.start(federation)
    for client in clients:
        client.answer(coordinator.task(client))
    for client in clients:
        client.answer(coordinator.task(client))
    assert refused_as(clients[0]) == (422, "too-heavy")
    assert clients[0].refused is not None
    assert "take aggregation.weighting uniform" in clients[0].refused.json()["detail"]
    assert all(client.refused is not None and client.refused.status_code == 201 for client in clients[1:])


def test_keys_of_small_order_are_none() -> None:
    for key in SMALL_ORDER:
        with pytest.raises(SecureError, match="not a valid X25519 key"):
            expect_exchange_key(bytes.fromhex(key))
    assert is_identity(public_identity(new_identity()))
    y8 = "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc"
    minus8 = "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"  # as RFC 8032 writes the field's −y
    for key in (*SMALL_ORDER[:5], y8 + "05", y8 + "85", minus8, bytes(31).hex() + "80"):
        assert not is_identity(bytes.fromhex(key))
    assert [is_identity(bytes([2, *bytes(size - 1)])) for size in (31, 32, 33)] == [False, True, False]
