"""The lines and the exit code of ``--verify``, and by which rule each kind of state is computed again."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from promptfed.coordinator.engine.jobs import FORGOTTEN
from promptfed.coordinator.problems import UpdatesGone
from promptfed.coordinator.resources.results import verification
from promptfed.coordinator.resources.results.verification import Step


class Flushed(io.StringIO):
    """What is printed; ``seen``: as far as others see it by now."""

    seen = ""

    def flush(self) -> None:
        self.seen = self.getvalue()


def broken(error: Exception) -> Iterator[str]:
    yield "the first"
    raise error


BAD = OperationalError("SELECT", {}, Exception("malformed\ndisk image"))


@pytest.mark.parametrize(
    ("found", "lines", "code"),
    [
        ({"a": lambda: iter(()), "b": lambda: iter(())}, ["all of /db and its blobs is what was stored"], 0),
        ({"a": lambda: iter("x"), "b": lambda: iter(())}, ["damaged: x", "1 damaged in /db"], 1),
        ({"a": lambda: iter(()), "b": lambda: iter("xy")}, ["damaged: x", "damaged: y", "2 damaged in /db"], 1),
        (
            {"specs": lambda: broken(BAD), "b": lambda: broken(ValueError("no\nJSON"))},
            [
                "damaged: the first",
                "damaged: specs cannot be read: malformed disk image",
                "damaged: the first",
                "damaged: b cannot be read: no JSON",
                "4 damaged in /db",
            ],
            1,
        ),
    ],
)
def test_each_damage_is_a_line_at_once_and_counts(
    found: dict[str, Callable[[], Iterator[str]]], lines: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed, begun = Flushed(), []

    @contextmanager
    def read() -> Iterator[None]:
        assert printed.seen == printed.getvalue(), "a check may take an hour"
        begun.append(None)
        yield

    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr(verification, "CHECKS", {name: lambda *_, of=of: of() for name, of in found.items()})
    store: Any = SimpleNamespace(blobs=None, database=SimpleNamespace(read=read, backend=SimpleNamespace(place="/db")))
    assert verification._look(store) == code
    assert printed.getvalue().splitlines() == lines
    assert printed.seen.splitlines()[: len(lines) - 1] == lines[:-1]
    assert len(begun) == 2, "each check reads in a transaction of its own"


TOTAL: Any = SimpleNamespace(body=(5).to_bytes(8, "little"), weight=2.0)
UPDATES: Any = SimpleNamespace(updates=[], gone=False)


def step(origin: str = "train", phase_id: int | None = 1, **about: Any) -> Step:
    state: Any = SimpleNamespace(origin=origin, phase_id=phase_id, round=3, state_hash="h", sha256="after")
    before: Any = SimpleNamespace(sha256="before", state_hash="b")
    given = {"before": before, "roster": ["a", "b"], "names": ["c"], "number": 4, "given": UPDATES} | about
    return Step(state, **given)


@pytest.mark.parametrize(
    ("asked", "computed"),
    [
        (step(before=None, phase_id=None), ("initial", ["c"])),
        (step(FORGOTTEN, None), ("forgotten", "c", ["a", "b"])),
        (step("join", None), ("joined", ["a", "b"], ["c"])),
        (step(terms="terms"), ("noised", (3, 4), "terms", ["a", "b"])),
        (step(total=TOTAL), ("summed", (3, 4), [5], 2.0)),
        (step(), ("aggregated", (3, 4), ["a", "b"])),
    ],
)
def test_each_kind_of_state_is_computed_by_its_own_rule(
    asked: Step, computed: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, summed = verification.global_state, verification.sums
    for module, name, does in (
        (made, "initial_state", lambda blobs, one, context: ("initial", context)),
        (made, "forgotten", lambda one, before, name, context: ("forgotten", name, context)),
        (made, "joined", lambda one, before, roster, names: ("joined", roster, names)),
        (made, "stored_updates", lambda blobs, updates: "updates"),
        (made, "after_phase", lambda one, before, phase, updates, rule, context: ("aggregated", phase, context)),
        (summed, "noised", lambda one, b, phase, updates, terms, context: (("noised", phase, terms, context), None)),
        (summed, "state_after", lambda one, b, phase, sum_, w, c: (("summed", phase, sum_.tolist(), w), 1.0)),
    ):
        monkeypatch.setattr(module, name, does)
    monkeypatch.setattr(verification, "Rule", lambda spec, before: SimpleNamespace())
    monkeypatch.setattr(verification, "room", lambda blobs: nullcontext())
    registry: Any = SimpleNamespace(blobs=None)
    federation: Any = SimpleNamespace(
        context=lambda names: names,
        method_phase=lambda round, number: (round, number),
        spec=SimpleNamespace(aggregation=None),
    )
    before: Any = {}
    assert verification._computed(registry, federation, asked, before) == computed


@pytest.mark.parametrize(
    ("replayed", "before", "stored", "first", "same"),
    [
        ("h", "b", "h", False, True), ("x", "b", "h", False, False), ("h", "x", "h", False, False),
        ("h", "b", "x", False, False), ("h", "x", "h", True, True), ("h", "x", "x", True, False),
    ],
)  # fmt: skip
def test_a_state_is_the_same_if_all_that_it_came_from_is(
    replayed: str, before: str, stored: str, first: bool, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry: Any = SimpleNamespace(blobs=SimpleNamespace(tensors=lambda digest: (before, None)))
    federation: Any = None
    monkeypatch.setattr(verification, "_computed", lambda *about: replayed)
    monkeypatch.setattr(verification, "state_hash", lambda tensors: tensors)
    monkeypatch.setattr(verification, "_state_hash", lambda blobs, digest: stored if digest == "after" else "")
    told = verification._again(registry, federation, step(**({"before": None} if first else {})))
    assert (told.same, told.state_hash, told.replayed_hash, told.origin) == (same, "h", replayed, "train")


@pytest.mark.parametrize(
    ("protects", "key", "terms"),
    [(False, None, None), (False, "k", None), (True, "k", "terms"), (True, None, UpdatesGone)],
)
def test_noise_is_computed_again_while_its_key_is_there(
    protects: bool, key: str | None, terms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SimpleNamespace(privacy=SimpleNamespace(protects_clients=protects), retention="all")
    federation: Any = SimpleNamespace(spec=spec)
    phase: Any = SimpleNamespace(id=7, noise_key=key, round=3, step=2)
    session: Any = SimpleNamespace(get=lambda table, id: ("sum", id))
    monkeypatch.setattr(verification.sums, "terms_of", lambda federation, phase: "terms")
    monkeypatch.setattr(verification, "given", lambda session, federation, id: ("given", id))
    if terms is UpdatesGone:
        with pytest.raises(UpdatesGone, match=r"round 3 are no longer kept \(retention: all"):
            verification._of_phase(session, federation, step(), phase)
    else:
        found = verification._of_phase(session, federation, step(), phase)
        assert (found.terms, found.number, found.given, found.total) == (terms, 2, ("given", 7), ("sum", 7))
