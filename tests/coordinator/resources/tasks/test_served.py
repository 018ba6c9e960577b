"""What is served of a task and counted, and the limits of what is taken for it, at their boundaries."""

from __future__ import annotations

import asyncio
import threading
from base64 import b64encode
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from promptfed.coordinator.domain import clock
from promptfed.coordinator.problems import NormTooLarge, NotFound, PayloadGone, PrivacyMismatch
from promptfed.coordinator.resources.tasks import reports, served, updates
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.messages import EvaluationRequest
from promptfed.testing.clients import CLASSES
from tests.support.coordinators import InProcess
from tests.support.open_phases import open_first_phase


def registry_of(place: bytes | Path) -> tuple[Any, list[int]]:
    counted: list[int] = []
    blobs = SimpleNamespace(place=lambda digest: place, remembered=lambda digest: None)
    metrics = SimpleNamespace(bytes_down=SimpleNamespace(inc=lambda size: counted.append(size)))
    last_seen = SimpleNamespace(served=lambda task_id, size: counted.append(size))
    return SimpleNamespace(blobs=blobs, metrics=metrics, last_seen=last_seen, database=None), counted


@pytest.mark.parametrize(
    ("place", "begin", "counted"),
    [
        (b"x" * 10, 0, 10), (b"x" * 10, 4, 10), (Path("x"), 0, 10), (Path("x"), 4, 6), (Path("x"), 9, 1),
        (Path("x"), 10, 10), (Path("x"), 11, 10),
    ],
)  # fmt: skip
def test_what_is_sent_of_a_payload_counts_once(
    place: bytes | Path, begin: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, sizes = registry_of(place)
    task = SimpleNamespace(id="t", round=1, payload_sha256="sha256:0", payload_bytes=10, payload_stored=True)
    monkeypatch.setattr(served, "asked_task", lambda *about: task)
    nothing: Any = None
    assert served.served_payload(registry, nothing, nothing, "t", begin) == ("sha256:0", place)
    assert sizes == [counted] * 2, "for the task and for the metrics"
    for change, kind in (({"payload_stored": False}, PayloadGone), ({"payload_sha256": None}, NotFound)):
        monkeypatch.setattr(served, "asked_task", lambda *about, c=change: SimpleNamespace(**vars(task) | c))
        with pytest.raises(kind):
            served.served_payload(registry, nothing, nothing, "t")
    assert len(sizes) == 2


def test_a_small_payload_in_memory_comes_within_the_task(
    coordinator: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, _, (task, _) = open_first_phase(coordinator, class_names=CLASSES)
    registry, size = coordinator.registry, task["payload"]["bytes"]
    found = registry.get(federation)
    ends = found.run.stage.deadline if found.run.stage else 0.0
    own = found.tasks["a"]
    content = registry.blobs.read(own.payload_sha256 or "")
    sizes: list[int] = []
    monkeypatch.setattr(served, "note_served", lambda registry, id, size: sizes.append(size))
    for most, inline, there in ((size, True, True), (size - 1, True, False), (size, False, False)):
        monkeypatch.setattr(served, "INLINE_BYTES", most)
        told = served.message(registry, found, own, inline)
        assert told.payload.data == (b64encode(content).decode() if there else None)
    assert sizes == [size]
    assert (told.round, told.phase, told.secure, told.selected) == (1, own.phase, None, None)
    assert told.deadline.isoformat(timespec="milliseconds") == (found.deadline or "").replace("Z", "+00:00")
    for left, shown in ((12.34567, 12.346), (-1.0, 0.0)):
        told_by = {"monotonic": lambda left=left: ends - left, "parse": clock.parse, "now": clock.now}
        monkeypatch.setattr(served, "clock", SimpleNamespace(**told_by))
        assert served.message(registry, found, own, False).seconds_left == pytest.approx(shown, abs=1e-6)
    caller: Any = SimpleNamespace(federation=found, client=SimpleNamespace(name="a"))
    assert served.is_at_hand(registry, caller, own.id)
    assert not served.is_at_hand(registry, caller, "another")
    monkeypatch.setattr(registry.blobs, "remembered", lambda digest: None)
    assert served.message(registry, found, own, True).payload.data is None
    assert not served.is_at_hand(registry, caller, own.id)
    caller.client.name = "nobody"
    assert not served.is_at_hand(registry, caller, own.id)


@pytest.mark.parametrize("own", [None, 9.0])
def test_a_change_is_as_long_as_it_may_be(own: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    admission = SimpleNamespace(max_update_norm=own)
    federation: Any = SimpleNamespace(spec=SimpleNamespace(admission=admission), method=SimpleNamespace(name="x"))
    tensors = {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)}
    payload = {name: tensor - 1 for name, tensor in tensors.items()}
    length = float(np.sqrt(10))
    for limit, fits in ((length, True), (np.nextafter(length, 0), False)):
        monkeypatch.setattr(updates, "change_limit", lambda spec, method, n, limit=limit: seen.append(n) or limit)
        if fits:
            assert updates._check_change(federation, tensors, payload) == pytest.approx(length)
        else:
            with pytest.raises(
                NormTooLarge, match=r"admission.max_update_norm\)" if own else "x's limit for 10 numbers"
            ):
                updates._check_change(federation, tensors, payload)
    assert seen == [10, 10]


@pytest.mark.parametrize("content", [b"x", None])
def test_an_update_is_as_long_as_any_may_be(content: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its payload was; one in memory is at hand for the aggregate."""
    kept: list[Any] = []
    blobs = SimpleNamespace(place=lambda digest: b"", admitted=SimpleNamespace(add=lambda *what: kept.append(what)))
    federation: Any = SimpleNamespace(
        method=SimpleNamespace(expected_update=lambda *_: None), method_phase=lambda *_: None, context=lambda: None,
        privacy=None,
    )  # fmt: skip
    about = {"task_id": "t", "payload_sha256": "sha256:" + "0" * 64, "metrics": {"loss": 0.5}}
    upload: Any = SimpleNamespace(tensors=lambda: ({}, about), content=content, sha256="s", size=9)
    task: Any = SimpleNamespace(id="t", round=1, step=0, payload_sha256=about["payload_sha256"])
    for name, found in {"_check_change": 0.25, "_payload_tensors": {}, "spent_by": None, "kept_numbers": {}}.items():
        monkeypatch.setattr(updates, name, lambda *_, found=found: found)
    monkeypatch.setattr(updates.client_numbers, "of_training", lambda *_, **how: [])
    registry, nobody = SimpleNamespace(blobs=blobs, database=None), None
    given: Any = (registry, federation, nobody, task, upload)
    longest = updates.LARGEST_NORM
    for size in (longest, np.nextafter(longest, np.inf)):
        monkeypatch.setattr(updates, "check", lambda *_, size=size: size)
        if size == longest:
            assert updates._examine(*given) == {"norm": size, "metrics": {}, "spent": None}
        else:
            with pytest.raises(NormTooLarge, match=r"no federation takes more than 1e\+09: training has diverged"):
                updates._examine(*given)
    assert kept == ([("s", ({}, 0.25), 9)] if content is not None else [])


COUNTS = {"mechanism": "laplace", "q": 1.0, "z": 0.1, "count": 3}


@pytest.mark.parametrize(
    ("event", "fits"),
    [
        (None, True), (COUNTS, True), (COUNTS | {"count": 1}, True), (COUNTS | {"count": 4}, False),
        (COUNTS | {"z": 0.2}, False), (COUNTS | {"q": 0.5}, False), (COUNTS | {"mechanism": "gaussian"}, False),
    ],
)  # fmt: skip
def test_noisy_counts_cost_what_the_terms_give(event: dict[str, Any] | None, fits: bool) -> None:
    result = {"accuracy": 0.5, "num_samples": 3}
    body: dict[str, Any] = {"splits": {"test": result, "val": result}, "zero_shot": {"test": result}}
    request = EvaluationRequest.model_validate(body)
    if event is not None:
        one = SimpleNamespace(**event, model_dump=lambda: event)
        request = request.model_copy(update={"privacy": SimpleNamespace(events=[one])})
    federation: Any = SimpleNamespace(spec=SimpleNamespace(privacy=SimpleNamespace(evaluation_epsilon=0.1)))
    if fits:
        reports._check_counts(federation, request)
    else:
        with pytest.raises(PrivacyMismatch, match=r"at most 3 counts with laplace noise of 0\.1"):
            reports._check_counts(federation, request)


@pytest.mark.parametrize(
    ("header", "accounted", "remembered", "quick"),
    [
        (10, False, True, True), (updates.QUICK_HEADER_BYTES, False, True, True),
        (updates.QUICK_HEADER_BYTES + 1, False, True, False), (None, False, True, False), (10, True, True, False),
        (10, False, False, False),
    ],
)  # fmt: skip
def test_an_update_is_checked_where_nobody_waits_for_it(
    header: int | None, accounted: bool, remembered: bool, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the event loop if that is sure to be quick; one from the disk, or that asks the database, on a thread."""
    here, found = threading.get_ident(), list[bool]()
    monkeypatch.setattr(updates, "_admit", lambda *about: found.append(threading.get_ident() == here))
    task = SimpleNamespace(payload_sha256="p")
    registry: Any = SimpleNamespace(blobs=SimpleNamespace(remembered=lambda digest: b"" if remembered else None))
    privacy = SimpleNamespace(protects_records=accounted)
    federation: Any = SimpleNamespace(spec=SimpleNamespace(privacy=privacy), tasks={"a": task})
    content = None if header is None else header.to_bytes(8, "little") + b"\xff" * 8
    client: Any = SimpleNamespace(name="a")
    upload = Upload(Path("x"), 16, "s", content=content)
    assert not asyncio.run(updates.accept_update(registry, federation, client, "t", upload))
    assert found == [quick]
    for tasks in ({}, {"b": task}, {"a": SimpleNamespace(payload_sha256=None)}):
        assert not updates._is_remembered(registry, SimpleNamespace(tasks=tasks), client)


def test_what_all_tasks_tell_is_made_again_once_the_clients_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Any = SimpleNamespace(configs={})
    monkeypatch.setattr(served, "config_of", lambda federation: object())

    def of(members: object, clients: object, id: str = "f") -> Any:
        federation: Any = SimpleNamespace(id=id, run=SimpleNamespace(members=members), clients=clients)
        return served._config(registry, federation)

    members, clients = ["a"], ["a"]
    first = of(members, clients)
    assert of(members, clients) is first
    made = [first, of(members, clients, "another"), of(members, ["a"]), of(["a"], clients), of(members, clients)]
    assert len(set(map(id, made))) == 5


@pytest.mark.parametrize(
    ("content", "sha256", "new"), [(b"x", "sent", True), (b"x", "sent", False), (None, "expanded", True)]
)
def test_an_update_is_kept_with_the_digest_it_came_with_and_counted_once(
    content: bytes | None, sha256: str, new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is moved and synced on a thread."""
    here, kept, entered, counted = threading.get_ident(), list[bool](), list[Any](), list[int]()
    whole = SimpleNamespace(
        content=content, sha256=sha256, keep=lambda held: kept.append(threading.get_ident() == here)
    )
    monkeypatch.setattr(updates, "_admit", lambda *about: (whole, {"norm": 2.0}))

    async def submit(answer: Any) -> bool:
        assert len(kept) == 1, "before its row is written"
        entered.append(answer)
        return new

    registry: Any = SimpleNamespace(
        blobs=SimpleNamespace(hold=lambda: nullcontext("held")),
        committer=SimpleNamespace(submit=submit),
        metrics=SimpleNamespace(bytes_up=SimpleNamespace(inc=counted.append)),
    )
    spec, client = SimpleNamespace(privacy=SimpleNamespace(protects_records=True)), SimpleNamespace(name="a")
    federation: Any = SimpleNamespace(id="f", spec=spec)
    upload: Any = Upload(Path("x"), 16, "sent", content=content)
    assert asyncio.run(updates.accept_update(registry, federation, client, "t", upload)) is new
    assert kept == [content is not None]
    [answer] = entered
    row = {"norm": 2.0, "sha256": sha256, "sent": None if sha256 == "sent" else "sent", "bytes": 16, "stored": True}
    assert (answer.row, answer.digest, answer.kind, answer.held) == (row, "sent", "train", "held")
    assert counted == ([16] if new else [])
