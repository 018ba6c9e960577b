"""What each answer to a step of a secure sum is refused for, and which refusal makes its client fail."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from promptfed.coordinator.aggregation.secure_sums import MASKED
from promptfed.coordinator.problems import Refusal
from promptfed.coordinator.resources.tasks import exchanges
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.secagg import SecureError
from promptfed.shared.tensors import encode

Nothing: Any = None
SECURE = SimpleNamespace(spec=SimpleNamespace(secure_aggregation="yes", admission=SimpleNamespace(max_bytes=10)))
SECURE.id, SECURE.name = "fed-1", "eyes"
A: Any = SimpleNamespace(name="a", identity_key="aa", num_samples=7)


@pytest.mark.parametrize(
    ("most", "limit"), [(1, 4 << 20), (2 << 20, 4 << 20), ((2 << 20) + 1, (4 << 20) + 2), (9 << 20, 18 << 20)]
)
def test_an_answer_may_be_twice_an_update_but_always_some_megabytes(most: int, limit: int) -> None:
    federation: Any = SimpleNamespace(spec=SimpleNamespace(admission=SimpleNamespace(max_bytes=most)))
    assert exchanges.limit(federation) == limit


@pytest.mark.parametrize(
    ("error", "kind", "fails"),
    [
        (None, None, False), (SecureError("bad-shares", "x"), "bad-shares", True),
        (SecureError("bad-keys", "x"), "bad-keys", True), (SecureError("too-heavy", "x"), "too-heavy", True),
        (SecureError("wrong-roster", "x"), "wrong-roster", False), (SecureError("other", "x"), "bad-exchange", False),
        ("not JSON", "bad-exchange", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("step", ["train", "mask"])
def test_only_what_nobody_could_use_makes_its_client_fail(
    error: Any, kind: str | None, fails: bool, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, tried = list[Any](), list[Any]()

    def examine(*about: Any) -> Any:
        tried.append(about[-1])
        if error == "not JSON":
            TypeAdapter(int).validate_json(b"{")
        elif error is not None:
            raise error
        return {"z": 1.0}

    task = SimpleNamespace(kind=step, round=1, step=2)
    monkeypatch.setattr(exchanges, "asked_task", lambda *about: task)
    monkeypatch.setattr(exchanges, "decided", lambda federation, task, kind, digest: digest == "known")
    monkeypatch.setattr(exchanges, "attempt_of", lambda *about: about[-2:])
    monkeypatch.setattr(exchanges, "_examine_step", examine)
    monkeypatch.setattr(exchanges, "accept_failure", lambda *about: failures.append(about[-1]))
    registry: Any = SimpleNamespace(database=None)

    def admit(federation: Any = SECURE, **upload: Any) -> Any:
        body = Upload(**{"path": Path("x"), "size": 2, "sha256": "s", "content": b"ab"} | upload)
        return exchanges._admit_step(registry, federation, A, "t", body)

    attempt = None if step == "train" else (1, 2)
    with nullcontext() if kind is None else pytest.raises(Refusal, match=f"step {step}: ") as told:
        assert admit() == ({"digest": "s", "body": b"ab", "bytes": 2, "spent": {"z": 1.0}}, attempt)
    assert tried == [attempt]
    assert (told.value.kind if kind is not None else None) == kind
    assert [(one.type, one.detail) for one in failures] == [(kind, f"refused in step {step}: x")] * fails
    assert admit(sha256="known") is None
    plain: Any = SimpleNamespace(name="eyes", spec=SimpleNamespace(secure_aggregation=None))
    for more, expected in (({"federation": plain}, "not-secure"), ({"too_large": True}, "too-large")):
        with pytest.raises(Refusal) as told:
            admit(**more)
        assert told.value.kind == expected
    assert len(tried) == 1


@pytest.mark.parametrize(("known", "new"), [(True, False), (False, True), (False, False)])
def test_the_bytes_of_an_answer_count_once(known: bool, new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, entered = list[int](), list[Any]()

    async def submit(answer: Any) -> bool:
        entered.append((answer.row, answer.attempt, answer.digest, answer.kind))
        return new

    registry: Any = SimpleNamespace(
        committer=SimpleNamespace(submit=submit), metrics=SimpleNamespace(bytes_up=SimpleNamespace(inc=counted.append))
    )
    monkeypatch.setattr(exchanges, "_admit_step", lambda *about: None if known else ({"bytes": 9}, "attempt"))
    upload = Upload(Path("x"), 9, "s", content=b"ab")
    federation: Any = SECURE
    assert asyncio.run(exchanges.accept_exchange(registry, federation, A, "t", upload)) is new
    assert entered == ([] if known else [({"bytes": 9}, "attempt", "s", None)])
    assert counted == ([9] if new else [])


ENTRY = {"federation_id": "fed-1", "round": 1, "phase": "train", "attempt": 2, "identity_key": "aa", "samples": 7}
ENTRY |= {"payload_sha256": "p", "terms": "of the task"}


@pytest.mark.parametrize(
    ("changes", "signed", "weighting", "kind"),
    [
        ({}, True, "samples", None), ({}, False, "samples", "bad-signature"), ({"samples": 1}, True, "uniform", None),
        ({}, True, "uniform", "bad-exchange"),
        *(({name: "another"}, True, "samples", "bad-exchange") for name in ENTRY),
    ],
)  # fmt: skip
def test_keys_are_of_this_attempt_and_signed(
    changes: dict[str, Any], signed: bool, weighting: str, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, owners, light = SimpleNamespace(secure=SimpleNamespace(phase="train", attempt=2)), {"k": "b"}, list[str]()
    keys = ["x", "y"]
    spec = SimpleNamespace(aggregation=SimpleNamespace(weighting=weighting))
    federation: Any = SimpleNamespace(id="fed-1", rules=SimpleNamespace(plan=lambda round, step: plan), spec=spec)
    monkeypatch.setattr(exchanges, "config_of", lambda federation: SimpleNamespace(terms=lambda: "of the task"))
    monkeypatch.setattr(exchanges, "is_entry_signed", lambda answer: signed)
    monkeypatch.setattr(exchanges, "expect_keys", lambda entry: keys)
    monkeypatch.setattr(exchanges.sums, "keys_of", lambda *about: owners)
    monkeypatch.setattr(exchanges, "_expect_light", lambda federation, client: light.append(client.name))
    answer: Any = SimpleNamespace(entry=SimpleNamespace(model_dump=lambda: ENTRY | changes))
    task: Any = SimpleNamespace(round=1, step=0, payload_sha256="p")
    for _ in range(2):  # a client may send its own keys again
        with (
            nullcontext()
            if kind is None
            else pytest.raises(Refusal, match=", ".join(changes) or "samples|signed") as told
        ):
            exchanges._examine_keys(Nothing, federation, A, task, answer)
    if kind is not None:
        assert (told.value.kind, light, owners) == (kind, [], {"k": "b"})
        return
    assert (owners, light) == ({"k": "b", "x": "a", "y": "a"}, ["a", "a"])
    keys[:] = ["z", "k"]
    with pytest.raises(SecureError, match="another member has one of these keys") as taken:
        exchanges._examine_keys(Nothing, federation, A, task, answer)
    assert taken.value.kind == "bad-keys"

    def unusable(entry: object) -> list[str]:
        raise SecureError("other", "no point of the curve")

    monkeypatch.setattr(exchanges, "expect_keys", unusable)
    with pytest.raises(SecureError, match="no point of the curve") as taken:
        exchanges._examine_keys(Nothing, federation, A, task, answer)
    assert taken.value.kind == "bad-keys"


@pytest.mark.parametrize(
    ("step", "check", "given"),
    [
        ("train", "_examine_keys", ("registry", "federation", A, "task", "KeysAnswer")),
        ("share", "check_shares", ("roster", 3, "SharesAnswer")),
        ("confirm", "check_confirmation", ("roster", 3, [1, 2], "ConfirmAnswer")),
        ("unmask", "check_reveal", ("roster", 3, "job", "UnmaskAnswer", "shares")),
        ("mask", "_examine_vector", ("federation", "task", b"body", "ab")),
    ],
)
def test_each_step_is_held_against_what_came_before(
    step: str, check: str, given: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    task, federation, registry = SimpleNamespace(kind=step), SimpleNamespace(), SimpleNamespace(database="database")
    names = {id(task): "task", id(federation): "federation", id(registry): "registry"}
    for answer in ("KeysAnswer", "SharesAnswer", "ConfirmAnswer", "UnmaskAnswer"):
        read = SimpleNamespace(model_validate_json=lambda body, answer=answer: answer if body == b"body" else None)
        monkeypatch.setattr(exchanges, answer, read)

    def noting(name: str) -> Any:
        def note(*about: Any) -> str:
            shown = tuple("job" if one is job else "roster" if one is roster else one for one in about)
            seen.append((name, tuple(names.get(id(one), one) for one in shown)))
            return "cost"

        return note

    roster = SimpleNamespace(sha256=b"\xab")
    job = SimpleNamespace(alive=[1, 2])
    for name in ("check_shares", "check_confirmation", "check_reveal"):
        monkeypatch.setattr(exchanges.opening, name, noting(name))
    monkeypatch.setattr(exchanges, "_examine_keys", noting("_examine_keys"))
    monkeypatch.setattr(exchanges, "_examine_vector", noting("_examine_vector"))
    monkeypatch.setattr(exchanges, "spent_by", lambda *about: {"of": about[-1]})
    places = {"a": 3}
    attempt: Any = SimpleNamespace(roster=roster, place=places.get, confirm=job, shares="shares")
    told: Any = (registry, federation, A, task, b"body", None if step == "train" else attempt)
    assert exchanges._examine_step(*told) == ({"of": "cost"} if step == "mask" else None)
    assert seen == [(check, given)]


@pytest.mark.parametrize(("heavy", "fails"), [((), False), (("b",), False), (("a", "b"), True)])
def test_who_outweighs_all_who_are_asked_is_told_so(
    heavy: tuple[str, ...], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(exchanges, "too_heavy", lambda samples, rule: seen.append((samples, rule)) or heavy)
    monkeypatch.setattr(exchanges.Weighting, "of", lambda aggregation: "rule")
    stage = SimpleNamespace(having=lambda *statuses: ["a", "b"] if statuses == ("open", "answered") else [])
    federation: Any = SimpleNamespace(
        run=SimpleNamespace(stage=stage), clients={"a": A, "b": SimpleNamespace(num_samples=2)},
        spec=SimpleNamespace(aggregation=None),
    )  # fmt: skip
    with pytest.raises(SecureError, match=r"its 7 samples a sum of 2 clients .*: take") if fails else nullcontext():
        exchanges._expect_light(federation, A)
    assert seen == [({"a": 7, "b": 2}, "rule")]
    federation.run.stage = None
    exchanges._expect_light(federation, A)


VECTOR = np.full(4, 1 << 60, np.int64)


@pytest.mark.parametrize(
    ("tensors", "about", "kind"),
    [
        ({MASKED: VECTOR}, {"roster_sha256": "r"}, None),
        ({MASKED: VECTOR, "more": VECTOR}, {"roster_sha256": "r"}, "bad-exchange"),
        ({"other": VECTOR}, {"roster_sha256": "r"}, "bad-exchange"),
        ({MASKED: VECTOR[:3]}, {"roster_sha256": "r"}, "bad-exchange"),
        ({MASKED: VECTOR.reshape(2, 2)}, {"roster_sha256": "r"}, "bad-exchange"),
        ({MASKED: VECTOR.astype(np.int32)}, {"roster_sha256": "r"}, "bad-exchange"),
        (None, {}, "bad-exchange"),
        ({MASKED: VECTOR}, {"roster_sha256": "another"}, "wrong-roster"),
        ({MASKED: VECTOR}, {"roster_sha256": "r", "more": 1}, "wrong-roster"),
        ({MASKED: VECTOR}, ["roster_sha256"], "wrong-roster"),
    ],
)
def test_a_vector_is_masked_whole_and_of_this_roster(
    tensors: Any, about: Any, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges.secure_sums, "shapes", lambda federation, phase: {"context": (2, 2)})
    federation: Any = SimpleNamespace(method_phase=lambda round, step: None)
    task: Any = SimpleNamespace(round=1, step=2)
    body = b"no tensors" if tensors is None else encode(tensors, about)
    with nullcontext() if kind is None else pytest.raises(Refusal) as told:
        assert exchanges._examine_vector(federation, task, body, "r") is None
    assert (told.value.kind if kind is not None else None) == kind
    if kind is None:
        cost = {"events": [], "epsilon": 1.0, "delta": 1e-5, "noise": "secret"}
        cost["events"] = [{"mechanism": "gaussian", "q": 0.5, "z": 1.0, "count": 3}]
        spent = exchanges._examine_vector(federation, task, encode(tensors, about | {"privacy": cost}), "r")
        assert spent is not None
        assert (spent.epsilon, spent.events[0].count) == (1.0, 3)
        monkeypatch.setattr(exchanges, "looks_unmasked", lambda words: words.tolist() == VECTOR.tolist())
        with pytest.raises(exchanges.LooksUnmasked):
            exchanges._examine_vector(federation, task, body, "r")
