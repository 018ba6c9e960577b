"""The privacy budget of an owner's data set, in a file that outlives federations and state folders.

The state folder keeps its head as it was seen last, which exposes an old copy.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from promptfed.client_service.exits import ClientError, Exit
from promptfed.shared import machine
from promptfed.shared.api.api_schemas import SpendList, SpendView
from promptfed.shared.privacy.accounting import ACCOUNTANT, RELATION, Accountant, Event, PrivacyError
from promptfed.shared.service.fault_points import point
from promptfed.shared.service.reasons import why

if TYPE_CHECKING:
    from promptfed.client_service.state.private_state import PrivateState

Part = Literal["train", "test"]
START = hashlib.sha256(b"").hexdigest()
FILE = "ledger-head.json"


class BudgetExhausted(ValueError):
    """The cost of a task exceeds the budget. The text tells ε spent, wanted and allowed, which are public."""


@dataclass(frozen=True)
class Head:
    """How many lines a ledger has, and the SHA-256 of the last of them."""

    count: int
    sha256: str


class Spend(BaseModel):
    """One release: of which part of the data, for whom, and at what cost. ``epsilon`` is the ledger's after it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    split: Part
    federation_id: str
    coordinator: str
    round: int
    phase: str
    task_id: str
    release: str
    noise: str
    events: tuple[Event, ...]
    epsilon: float
    federation: str = ""  # its name
    at: str = ""  # when it was written down; the line's own


class Ledger:
    """One data set's budget at one δ. Without a ``path`` it is kept in memory, for simulations."""

    def __init__(self, path: Path | None, dataset: str = "default"):
        self.path, self.dataset = path, dataset
        self._memory = b""

    # Reading

    def delta(self) -> float | None:
        """The ledger's δ; None before it is opened."""
        lines = self._lines(self._bytes())
        return float(lines[0]["delta"]) if lines else None

    def kept_unit(self) -> str | None:
        """What one unit of the ledger is, record or group; None before it is opened."""
        lines = self._lines(self._bytes())
        return str(lines[0]["unit"]) if lines else None

    def spends(self) -> list[Spend]:
        """All releases, in the order in which they were written.

        Raises:
            ClientError: LEDGER where a line does not follow from the one before.
        """
        return self._spends(self._lines(self._bytes()))

    def epsilon(self, split: Part = "train", more: Sequence[Event] = (), replace_one: bool = False) -> float:
        """ε of everything that was spent on ``split``, with ``more`` on top; of zero-out neighbours unless told."""
        return self._cost(self.spends(), split, more, replace_one)

    def head(self, count: int | None = None) -> Head:
        """The head of the ledger, or of its first ``count`` lines."""
        content = self._bytes()
        self._lines(content)
        return _head(_whole_lines(content)[:count])

    # Writing

    def open(self, delta: float, unit: str = "record") -> None:
        """Begin the ledger, unless it has begun: with ``delta``, of records or groups.

        Raises:
            ClientError: LEDGER where it cannot be written.
        """
        with self._locked() as handle:
            if self._lines(self._bytes()):
                return
            about = {"kind": "open", "dataset": self.dataset, "unit": unit, "delta": delta}
            self._append(handle, about | {"relation": RELATION, "accountant": ACCOUNTANT})

    def expect(self, events: Sequence[Event], most: float, split: Part = "train") -> float:
        """ε with ``events`` on top.

        Raises:
            BudgetExhausted: it is more than ``most``.
        """
        return self._expect(self.spends(), events, most, split)

    def spend(self, release: str, events: Sequence[Event], most: float, about: dict[str, Any], split: Part) -> bool:
        """Note a release before it is sent; False where it is noted already, which costs nothing.

        Raises:
            BudgetExhausted: it no longer fits; nothing is written.
            ClientError: LEDGER where the file does not hold together or cannot be written.
        """
        with self._locked() as handle:
            spends = self._spends(self._lines(self._bytes()))
            if any(spend.release == release for spend in spends):
                return False
            epsilon = self._expect(spends, events, most, split)
            point("spend-locked")
            self._write_down(
                handle, Spend(split=split, release=release, events=tuple(events), epsilon=epsilon, **about)
            )
        point("spend-written")
        return True

    def _expect(self, spends: list[Spend], events: Sequence[Event], most: float, split: Part) -> float:
        epsilon = self._cost(spends, split, events)
        if epsilon <= most:
            return epsilon
        spent = self._cost(spends, split, ())
        raise BudgetExhausted(
            f"the data set {self.dataset!r} has spent ε = {spent:.4g} of {most:g}, and this would make it {epsilon:.4g}"
        )

    def _cost(self, spends: list[Spend], split: Part, more: Sequence[Event], replace_one: bool = False) -> float:
        events = [event for spend in spends if spend.split == split for event in spend.events]
        if not events and not more:
            return 0.0
        delta = self.delta()
        if delta is None:
            raise PrivacyError("the ledger has not been opened: it has no δ yet")
        cache = self.path.with_suffix(".cache") if self.path is not None else None
        return Accountant(delta, cache).epsilon([*events, *more], replace_one)

    # Old copies

    def lacks(self, spend_list: SpendList) -> list[SpendView]:
        """The spends that a coordinator has and that are not written here."""
        spends = self.spends()
        releases = {spend.release for spend in spends}
        phases = {(spend.federation_id, spend.round, spend.phase) for spend in spends}
        return [
            spend
            for spend in spend_list.spends
            if spend.release not in releases
            and (spend.release is not None or (spend_list.federation_id, spend.round, spend.phase) not in phases)
        ]

    def expect_whole(self, spend_list: SpendList) -> None:
        """Raise ClientError (LEDGER) if the coordinator has had something that is not written here."""
        missing = self.lacks(spend_list)
        if missing:
            rounds = ", ".join(str(spend.round) for spend in missing[:5])
            text = f"ledger-behind: the ledger {self.path} lacks {len(missing)} releases (of round {rounds})"
            told_by = "that the coordinator has had of this client: it is an old copy, or another data set's"
            raise ClientError(
                Exit.LEDGER, f"{text} {told_by}. `promptfed ledger adopt` writes down what is missing; nothing was sent"
            )

    def adopt(self, spend_list: SpendList, coordinator: str) -> int:
        """Write down the spends that a coordinator knows and this ledger lacks; their number.

        A coordinator's word can add to a ledger, and never takes from it; no limit holds what has been sent back.

        Raises:
            ClientError: LEDGER where the file does not hold together or cannot be written.
        """
        if spend_list.spends and self.delta() is None:
            self.open(max(spend.delta for spend in spend_list.spends))
        with self._locked() as handle:
            missing = self.lacks(spend_list)
            for spend in missing:
                events = [event.event() for event in spend.events]
                fields = {
                    "federation_id": spend_list.federation_id,
                    "coordinator": coordinator,
                    "release": spend.release or f"adopted {spend.task_id}",
                    "events": events,
                    "epsilon": self._cost(self._spends(self._lines(self._bytes())), spend.split, events),
                }
                told_of = spend.model_dump(include={"split", "round", "phase", "task_id", "noise"})
                self._write_down(handle, Spend.model_validate(told_of | fields))
        return len(missing)

    # The file

    def _spends(self, lines: list[dict[str, Any]]) -> list[Spend]:
        spends = []
        for line in lines[1:]:
            try:
                spends.append(
                    Spend.model_validate({key: line[key] for key in line if key not in ("n", "prev", "kind")})
                )
            except ValidationError:
                raise self._broken(line.get("n", "?")) from None
        return spends

    def _lines(self, content: bytes) -> list[dict[str, Any]]:
        previous, lines = START, []
        for number, raw in enumerate(_whole_lines(content)):
            try:
                line = json.loads(raw)
                follows = line["n"] == number and line["prev"] == previous
                kind = "open" if number == 0 else "spend"
                if not follows or line["kind"] != kind:
                    raise ValueError("out of order")
            except (ValueError, KeyError, TypeError, RecursionError):
                raise self._broken(number) from None
            previous = hashlib.sha256(raw).hexdigest()
            lines.append(line)
        return lines

    def _broken(self, number: object) -> ClientError:
        text = f"the ledger {self.path} does not hold together at line {number}: it was changed, or its disk is broken"
        return ClientError(Exit.LEDGER, f"{text}. Restore it from a backup; nothing is sent without it")

    def _write_down(self, handle: int | None, spend: Spend) -> None:
        self._append(handle, {"kind": "spend", **spend.model_dump(mode="json", exclude={"at"})})

    def _append(self, handle: int | None, line: dict[str, Any]) -> None:
        content = self._bytes()
        whole, head = content[: content.rfind(b"\n") + 1], _head(_whole_lines(content))
        chained = {"n": head.count, "prev": head.sha256, "at": datetime.now(UTC).isoformat(timespec="seconds"), **line}
        raw = json.dumps(chained, sort_keys=True).encode() + b"\n"
        if handle is None:
            self._memory = whole + raw
            return
        try:
            os.ftruncate(handle, len(whole))  # what a killed writer left unfinished
            half = len(raw) // 2
            _write(handle, raw[:half])
            point("spend-half-written")
            _write(handle, raw[half:])
            os.fsync(handle)
        except OSError as error:
            os.ftruncate(handle, len(whole))
            raise self._unusable(error) from None

    def _bytes(self) -> bytes:
        if self.path is None:
            return self._memory
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise self._unusable(error) from None

    @contextmanager
    def _locked(self) -> Iterator[int | None]:
        """The open file, which nobody else appends to meanwhile; None in memory."""
        if self.path is None:
            yield None
            return
        try:
            new = not self.path.exists()
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | machine.O_CLOEXEC, 0o600)
            if new:
                machine.sync_folder(self.path.parent)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            machine.lock(handle)
            yield handle
        finally:
            os.close(handle)

    def _unusable(self, error: OSError) -> ClientError:
        text = f"the ledger {self.path} cannot be used: {why(error)}"
        return ClientError(Exit.LEDGER, f"{text}: nothing is sent without it; give --ledger another place")


def _whole_lines(content: bytes) -> list[bytes]:
    """Without the unfinished last one of a writer that was killed."""
    return content.split(b"\n")[:-1]


def _head(lines: Sequence[bytes]) -> Head:
    return Head(len(lines), hashlib.sha256(lines[-1]).hexdigest() if lines else START)


def _write(handle: int, content: bytes) -> None:
    while content:
        content = content[os.write(handle, content) :]


def keep_head(ledger: Ledger, state: PrivateState) -> None:
    """Note the head of ``ledger``. A ledger in memory has none that outlives the process."""
    if ledger.path is not None:
        state.write_as(FILE, ledger.head())


def expect_head(ledger: Ledger, state: PrivateState) -> None:
    """Raise ClientError (LEDGER) if ``ledger`` does not begin with the lines that this client has seen."""
    kept = _known(ledger, state)
    if kept is None:
        return
    head = ledger.head(kept.count)
    if head != kept:
        there = "another line" if head.count == kept.count else f"{head.count} lines"
        raise ClientError(
            Exit.LEDGER,
            f"ledger-behind: the ledger {ledger.path} has {there} where {state.folder} knows of {kept.count}: it is "
            "an old copy, or another data set's. Restore the newest one, or write down what is missing by `promptfed "
            "ledger adopt` with every state folder that has used it; nothing was sent",
        )


def adopt_head(ledger: Ledger, state: PrivateState) -> None:
    """Note the head of a ledger to which the missing lines have been added.

    Raises:
        ClientError: LEDGER where it has fewer lines than this client knew of: something is missing still.
    """
    kept = _known(ledger, state)
    if kept is None:
        return
    if ledger.head().count < kept.count:
        expect_head(ledger, state)
    keep_head(ledger, state)


def _known(ledger: Ledger, state: PrivateState) -> Head | None:
    return state.read_as(FILE, Head) if ledger.path is not None else None
