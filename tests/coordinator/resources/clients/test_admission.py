"""Who is let in: each rule on both sides of its boundary, on a federation in memory."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.coordinator.domain.federation import Client, EnrolmentToken, Federation, new_federation
from promptfed.coordinator.domain.run_state import Member
from promptfed.coordinator.problems import Ended, NotFound, PhaseClosed, Refusal
from promptfed.coordinator.resources.clients import operations
from promptfed.coordinator.store.tokens import digest
from promptfed.shared.messages import MOST_PEERS, EnrolRequest
from promptfed.shared.methods import resolve_spec
from promptfed.shared.methods.core.interface import MethodError
from promptfed.shared.secagg.keys import is_signed, new_identity, public_identity, sign
from promptfed.shared.spec.spec import BackboneShape
from promptfed.testing.clients import enrolment, secret_of, spec

PRIVATE = new_identity()
KEY, SMALL_ORDER = public_identity(PRIVATE).hex(), "01" + "00" * 31
FORGED = SMALL_ORDER + "00" * 32
"""Of any message: the point of order 1 with the scalar 0, which needs no private key."""
SUM: dict[str, Any] = {"secure_aggregation": {}, "participation": {"min_clients": 3}}
DOMAINS: dict[str, Any] = {"method": {"name": "fast_pt"}}
LISTED: dict[str, Any] = {"class_names": ["circle", "square", "star"]}


def federation(clients: int = 0, **changes: Any) -> Federation:
    made = new_federation("fed-1", resolve_spec(spec(**changes)))
    names = [f"c{number}" for number in range(clients)]
    made = made.with_clients(*(known(name) for name in names))
    return replace(made, run=replace(made.run, members={name: Member("trainer", joined=True) for name in names}))


def known(name: str, **changes: Any) -> Client:
    about: dict[str, Any] = {"id": f"cli-{name}", "secret_digest": digest(secret_of(name))} | changes
    return Client(name, "trainer", 10, ("circle", "square", "star"), **about)


def request(name: str = "a", signs: bytes | None = None, **changes: Any) -> EnrolRequest:
    asked = EnrolRequest.model_validate(enrolment(name) | changes)
    if signs is None:
        return asked
    proof = sign(signs, "identity", asked.proof_body()).hex()
    return asked.model_copy(update={"identity_key": KEY, "identity_proof": proof} | changes)


def refusal(call: Any, *arguments: Any) -> str | None:
    try:
        call(*arguments)
    except Refusal as refused:
        return refused.kind
    return None


PLAN = {"units": 10, "noise_multiplier": 1.0, "epsilon_planned": 1.0, "delta": 1e-5}
SAMPLE = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}
SAMPLED: dict[str, Any] = {"privacy": SAMPLE}
GROUP, BUDGET = SAMPLE | {"unit": "group"}, {"level": "sample", "clip": 0.3, "epsilon": 8.0, "delta": 1e-5}


@pytest.mark.parametrize(
    ("privacy", "told", "kind"),
    [
        ({}, {}, None),
        ({}, {"protection": PLAN}, "privacy-mismatch"),
        (SAMPLE, {"role": "evaluator"}, None),
        (SAMPLE, {"role": "evaluator", "protection": PLAN}, "privacy-mismatch"),
        (SAMPLE, {}, None),
        (SAMPLE, {"protection": PLAN}, None),
        (SAMPLE, {"protection": PLAN | {"units": 9}}, "privacy-mismatch"),
        (SAMPLE, {"protection": PLAN | {"units": 11}}, "privacy-mismatch"),
        (SAMPLE, {"protection": PLAN | {"noise_multiplier": 1.5}}, "privacy-mismatch"),
        (BUDGET, {"protection": PLAN | {"noise_multiplier": 1.5}}, None),
        (GROUP, {}, "privacy-missing"),
        (GROUP, {"protection": PLAN | {"units": 3}}, None),
        (GROUP, {"protection": PLAN}, None),
        (GROUP, {"protection": PLAN | {"units": 11}}, "privacy-mismatch"),
    ],
)
def test_a_trainer_s_protection_is_the_federation_s(privacy: dict[str, Any], told: dict[str, Any], kind: str) -> None:
    assert refusal(operations._check_protection, federation(privacy=privacy), request(**told)) == kind


@pytest.mark.parametrize(
    ("token", "former", "kind"),
    [
        (None, None, "unauthorized"),
        ({}, None, None),
        ({"uses": 3, "used": 2}, None, None),
        ({"uses": 3, "used": 3}, None, "token-used-up"),
        ({"closed": True}, None, "token-used-up"),
        ({"role": "trainer"}, None, None),
        ({"role": "evaluator"}, None, "other-token"),
        ({"client": "a"}, known("a"), None),
        ({"client": "b"}, None, "other-token"),
        ({}, known("a"), "name-taken"),
    ],
)
def test_a_token_lets_in_whom_it_is_for(token: dict[str, Any] | None, former: Client | None, kind: str | None) -> None:
    minted = EnrolmentToken("tok-1", "ward", datetime.now(UTC), **(token or {}))
    asked = replace(federation(), tokens={"t": minted} if token is not None else {})
    assert refusal(operations._check_token, asked, "t", request(), former) == kind
    assert refusal(operations._check_token, replace(asked, starting=True), "t", request(), former) == (
        "unauthorized" if token is None else "starting"
    )


@pytest.mark.parametrize(
    ("changes", "told", "kind"),
    [
        ({}, {}, None),
        ({}, {"num_samples": 1}, None),
        ({}, {"num_samples": 0}, "no-samples"),
        ({}, {"num_samples": 0, "role": "evaluator"}, None),
        ({}, {"secret": secret_of("c0")}, "secret-taken"),
        (DOMAINS, {}, "domain-missing"),
        (DOMAINS, {"role": "evaluator"}, None),
        (DOMAINS, {"domain": {"name": "x", "description": "a sketch of a {}"}}, None),
        (SUM, {}, "identity-missing"),
        (SAMPLED, {"protection": PLAN | {"units": 9}}, "privacy-mismatch"),
        (LISTED, {"class_names": ["dog"]}, "unknown-class"),
    ],
)
def test_newcomers_have_what_the_method_needs(changes: dict[str, Any], told: dict[str, Any], kind: str | None) -> None:
    asked = federation(1, **changes)
    assert refusal(operations._check, asked, request(**told)) == kind
    for state in ("finished", "failed", "cancelled"):
        over = replace(asked, run=replace(asked.run, state=state))
        assert refusal(operations._check, over, request(**told)) == "wrong-state"


def test_no_more_clients_than_a_task_can_describe() -> None:
    asked = federation(MOST_PEERS)
    members = asked.run.members
    for name, others, kind in (
        ("a", members, "unfit-client"),
        ("c0", members, None),
        ("a", members | {"c0": replace(members["c0"], active=False)}, None),
    ):
        assert refusal(operations._check_peers, replace(asked, run=replace(asked.run, members=others)), name) == kind


@pytest.mark.parametrize(
    ("changes", "asked", "kind"),
    [
        ({}, request(), None),
        (SUM, request(signs=PRIVATE), None),
        (SUM, request(), "identity-missing"),
        (SUM, request(signs=PRIVATE, identity_proof=None), "identity-missing"),
        (SUM, request(signs=PRIVATE, identity_key=None), "identity-missing"),
        (SUM, request(signs=new_identity()), "bad-signature"),
        (SUM, request(signs=PRIVATE).model_copy(update={"name": "b"}), "bad-signature"),
        (SUM, request(signs=PRIVATE, identity_key=SMALL_ORDER), "bad-signature"),
        (SUM, request().model_copy(update={"identity_key": SMALL_ORDER, "identity_proof": FORGED}), "bad-signature"),
    ],
)
def test_in_secure_sums_a_client_proves_its_key(changes: dict[str, Any], asked: EnrolRequest, kind: str | None) -> None:
    one = federation(2, **changes)
    assert refusal(operations._check_identity, one, asked) == kind
    if changes and kind is None:
        other = one.with_clients(known("c0", identity_key=KEY))
        assert refusal(operations._check_identity, other, asked) == "key-taken"
        assert refusal(operations._check_identity, one.with_clients(known("a", identity_key=KEY)), asked) is None
        assert refusal(operations._recognise, *recognised(one, KEY, asked)) is None
        assert refusal(operations._recognise, *recognised(one, "00" * 32, asked)) == "identity-changed"
    assert is_signed(bytes.fromhex(SMALL_ORDER), bytes.fromhex(FORGED), "identity", {"any": "message"})
    plain = recognised(federation(), "00" * 32, request(signs=PRIVATE))
    assert refusal(operations._recognise, *plain) is None, "where none signs it has no meaning"
    assert refusal(operations._recognise, *recognised(one, None, request(), active=False)) == "withdrawn"
    assert refusal(operations._recognise, *recognised(one, None, request(secret="0" * 64))) == "name-taken"


def recognised(
    one: Federation, key: str | None, asked: EnrolRequest, active: bool = True
) -> tuple[Federation, Client, EnrolRequest]:
    members = {**one.run.members, "a": Member("trainer", active=active)}
    return replace(one, run=replace(one.run, members=members)), known("a", identity_key=key), asked


def test_delta_stays_below_one_in_the_trainers_with_one_more() -> None:
    privacy = {"level": "client", "clip": 1.0, "noise_multiplier": 0.5, "accept_noise": True, "delta": 0.25}
    changes = {"privacy": privacy, "aggregation": {"weighting": "uniform", "max_weight_share": 1}}
    shape = BackboneShape(d_t=8, d_e=8, d_v=8)
    for clients, name, kind in ((2, "a", None), (3, "a", "unfit-client"), (3, "c0", None)):
        one = replace(federation(clients, **changes), shape=shape)
        assert refusal(operations._check_method, one, known(name), shape) == kind
        evaluator = replace(known(name), role="evaluator")
        assert refusal(operations._check_method, one, evaluator, shape) is None or name == "c0"


@pytest.mark.parametrize("check", ["check_fits", "check_sizes", "check_hopeless", "dims"])
def test_what_the_method_says_of_the_first_backbone_keeps_it_out(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*about: object) -> None:
        raise MethodError("not with this one")

    shape = BackboneShape(d_t=8, d_e=8, d_v=8)
    one, of = federation(), operations if check != "dims" else type(federation().method)
    assert refusal(operations._check_method, one, known("a"), shape) is None
    monkeypatch.setattr(of, check, refuses)
    assert refusal(operations._check_method, one, known("a"), shape) == "cannot-start"
    if check != "dims":
        assert refusal(operations._check_method, replace(one, shape=shape), known("a"), shape) is None, "it is known"


def test_who_has_joined_is_held_against_what_it_was_and_all_against_the_other_active_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(operations, "check_admission", lambda method, *about: seen.append((*about[:2], about[2]())))
    shape, one = BackboneShape(d_t=8, d_e=8, d_v=8), federation(4)
    members = one.run.members | {"c1": Member("trainer", joined=False), "c2": Member("trainer", active=False)}
    one = replace(one, run=replace(one.run, members=members))
    for name, former, others in (
        ("c0", True, ["c1", "c3"]),
        ("c1", False, ["c0", "c3"]),
        ("a", False, ["c0", "c1", "c3"]),
    ):
        operations._check_method(one, known(name), shape)
        client, was, context = seen.pop()
        assert (client.name, was) == (name, one.clients[name] if former else None)
        assert [other.name for other in context.clients] == others


def test_unknown_classes_are_named_in_order() -> None:
    names = ["hen", "dog", "cow", "ape", "fly"]
    with pytest.raises(Refusal, match="has no class 'ape', 'cow', 'dog', 'fly', 'hen'"):
        operations._check_class_names(federation(**LISTED), request(class_names=["circle", *names]))


def test_class_names_are_bounded_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    size = federation().with_named(("circle", "square", "star")).named_bytes
    for most, kind in ((size, None), (size - 1, "too-many-class-names")):
        monkeypatch.setattr(operations, "CLASS_NAME_BYTES", most)
        assert refusal(operations._check_class_names, federation(), request()) == kind
        listed = federation(**LISTED)
        assert refusal(operations._check_class_names, listed, request()) is None
        assert refusal(operations._check_class_names, listed, request(class_names=["circle"])) is None
        assert refusal(operations._check_class_names, listed, request(class_names=["dog"])) == "unknown-class"


@pytest.mark.parametrize(
    ("refused", "path", "kept"),
    [
        (Ended("over"), "/v1/f/task", False), (PhaseClosed("over"), "/v1/f/task", False),
        (Ended("over"), "/v1/f/tasks/t/update", True), (PhaseClosed("over"), "/v1/f/tasks/t/update", True),
        (NotFound("x" * 3000), "/v1/f/task", True), (NotFound("x"), "/v1/" + "f" * 600, True),
    ],
)  # fmt: skip
def test_the_last_real_refusal_of_a_client_is_kept(refused: Refusal, path: str, kept: bool) -> None:
    entries: list[Any] = []

    async def submit(entry: Any) -> bool:
        entries.append(entry)
        return True

    registry: Any = SimpleNamespace(committer=SimpleNamespace(submit=submit))
    asyncio.run(operations.record_refusal(registry, "fed-1", "a", refused, path))
    assert [entry.about | {"at": None} for entry in entries] == [
        {
            "type": refused.kind,
            "status": refused.status,
            "detail": refused.detail[:2000],
            "path": path[:500],
            "at": None,
        }
    ] * kept


@pytest.mark.parametrize(
    ("state", "active", "awaited", "kind"),
    [
        ("running", True, False, "wrong-state"), ("running", False, True, "wrong-state"),
        ("running", False, False, None),
        ("enrolling", True, False, "wrong-state"), ("finished", True, True, None), ("cancelled", False, True, None),
    ],
)  # fmt: skip
def test_updates_are_deleted_of_who_takes_part_no_more(
    state: Any, active: bool, awaited: bool, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations.retention, "awaits_computing", lambda session, id, name: awaited)
    one = federation(1)
    one = replace(one, run=replace(one.run, state=state, members={"c0": Member("trainer", active=active)}))
    for name in ("c0", "cli-c0"):
        assert refusal(operations._expect_deletable, one, None, name) == kind
    assert refusal(operations._expect_deletable, one, None, "nobody") == "not-found"


def test_operators_are_told_of_each_other_reason_once_and_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    minted = SimpleNamespace(name="ward")
    change: Any = SimpleNamespace(
        federation=SimpleNamespace(tokens={"t": minted}), session=None, emit=lambda kind, **about: told.insert(0, about)
    )
    registry: Any = SimpleNamespace(change=lambda id: nullcontext(change))
    monkeypatch.setattr(operations, "refused_enrolments", lambda session, id: [(about, "now") for about in told])
    monkeypatch.setattr(operations, "MOST_REFUSED", 3)

    def refuse(name: str, why: str, token: str = "t") -> int:
        operations.record_refused_enrolment(registry, "fed-1", name, token, NotFound(why))
        return len(told)

    counts = [
        refuse("a", "x"),
        refuse("a", "x"),
        refuse("a", "y"),
        refuse("a", "x", "revoked"),
        refuse("b", "y" * 3000),
    ]
    assert counts == [1, 1, 2, 2, 3]
    assert told[0] == {"client": "b", "token": "ward", "type": "not-found", "detail": "y" * 2000}
    assert refuse("c", "z") == 3, "names are the newcomers' choice"
