"""What a client checks before the coordinator learns of it: that it goes on with the data that it began with."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest
import torch

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.connection import Refused
from promptfed.client_service.joining import joining as joining_module
from promptfed.client_service.joining.checks import ACCEPT, check_recorded
from promptfed.client_service.joining.disclosure import Disclosure
from promptfed.client_service.joining.joining import Joining
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import Identity, PrivateState
from promptfed.client_service.training.compute import Compute
from promptfed.shared.data import DataError, Source
from promptfed.shared.data.identity import DataIdentity, identity_of
from tests.client_service.conftest import Make
from tests.support.fake_coordinator import made_up_source


@pytest.mark.extended
def test_a_client_goes_on_with_its_own_data_alone(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is sent before it has said what changed; what it keeps is closed to others, and leaves with nothing."""
    caplog.set_level("INFO")
    first, other = made_up_source(), made_up_source(3)

    def start(source: Source, accept: bool = False) -> str:
        coordinator = make.coordinator(rounds=1)
        own = make.settings.model_copy(update={"new_data": accept})
        try:
            assert asyncio.run(make.worker(coordinator, settings=own, source=source).run()) is Exit.OK
        except ClientError as error:
            assert not coordinator.calls
            return str(error)
        sent = b"".join(coordinator.received).decode(errors="replace")
        kept = json.loads((own.state_dir / "data.json").read_text())
        digests = [split[name] for split in kept["splits"].values() for name in ("images", "labelled")]
        assert not any(digest in sent for digest in digests)
        return ""

    assert start(first) == ""
    assert start(first) == ""
    assert make.settings.state_dir.stat().st_mode & 0o077 == 0
    told = start(other)
    assert "the data have changed since this client last started: other train images (of 24)" in told
    assert "give --new-data to go on with them" in told
    assert start(other, accept=True) == ""
    assert start(other) == ""
    assert "did not know" not in caplog.text
    for accept, verdict in ((False, "fail"), (True, "warn")):  # as `--check` and `doctor` tell
        (check,) = check_recorded(make.settings.state_dir, first, {}, accept)
        assert (check.name, check.verdict) == ("recorded data", verdict)
        assert f"{check.text}; {check.advice}" in start(first)
    (make.settings.state_dir / "data.json").unlink()  # as of today
    assert check_recorded(make.settings.state_dir, first, {}, False) == []
    assert start(first) == ""
    assert "this client's folder did not know its data" in caplog.text
    assert "have changed" in start(other)


def joining_of(settings: Settings, state: PrivateState) -> Any:
    return Joining(settings, *cast(Any, (None, state, None, Compute(), None)), None)


def test_which_data_a_folder_goes_on_with(settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    known, other = made_up_source(), made_up_source(3)
    first, second = Identity("a", "trainer", "secret"), Identity("a", "trainer", "secret", "fed-1", "client-1")
    joining = joining_of(settings, PrivateState(tmp_path))
    now = joining._expect_data(first, known, {})
    joining._keep_data(now)
    assert joining.state.read_as("data.json", DataIdentity) == now == identity_of(known, {})
    written = (tmp_path / "data.json").stat().st_mtime_ns
    joining._keep_data(joining._expect_data(second, known, {}))
    assert (tmp_path / "data.json").stat().st_mtime_ns == written, "nothing to write"
    assert joining._expect_data(first, other, {}) == identity_of(other, {}), "who has not enrolled is free"
    with pytest.raises(ClientError, match=rf"other train images \(of 24\).*; {ACCEPT}") as end:
        joining._expect_data(second, other, {})
    assert (end.value.exit, caplog.text) == (Exit.BAD_INPUT, "")
    joining.settings = settings.model_copy(update={"new_data": True})
    now = joining._expect_data(second, other, {"more": known})
    assert "as the owner accepts" in caplog.text
    joining._keep_data(now)
    joining._keep_data(identity_of(known, {}))
    kept = joining.state.read_as("data.json", DataIdentity)
    assert (kept.splits["train"], set(kept.splits)) == (identity_of(known, {}).splits["train"], {*now.splits})
    assert "more test" in kept.splits, "a test set that is not given today is known again when it is"
    (tmp_path / "data.json").unlink()
    for rejoins in (False, True):
        joining._rejoins = rejoins
        joining._keep_data(now)
        assert ("did not know its data" in caplog.text) is rejoins
        (tmp_path / "data.json").unlink()
    joining._keep_data(None)
    assert not (tmp_path / "data.json").exists()
    assert joining_of(settings, PrivateState(tmp_path / "b", ephemeral=True))._expect_data(second, other, {}) is None

    def fails(*given: Any) -> None:
        raise DataError("a.png cannot be read")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ClientError, match=r"a\.png cannot be read"):
        patch.setattr("promptfed.client_service.joining.joining.identity_of_data", fails)
        joining._expect_data(first, known, {})


def test_patch_features_that_do_not_fit_are_refused_before_one_is_computed(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    joining, done = joining_of(settings, PrivateState(tmp_path)), list[str]()
    cost = SimpleNamespace(images=0, bytes=2_500_000, free=1_200_000, folder="f", fits=False)
    data = SimpleNamespace(tests={"novel": None}, patch_cost=lambda parts: cost)
    data.features, data.keep_patches = lambda name, watched: done.append(name), lambda name: done.append(f"{name}+")
    work, info = SimpleNamespace(data=data), SimpleNamespace(training=SimpleNamespace(threads=1))
    joining.parts = SimpleNamespace(consent=None)

    def warm(**needs: bool) -> list[str]:
        done.clear()
        joining._warm(work, SimpleNamespace(needs=SimpleNamespace(**needs)), info)
        return done

    assert warm(cached_features=False, patch_tokens=False) == []
    assert warm(cached_features=True, patch_tokens=False) == ["train", "test", "novel"]
    both = ["train", "train+", "test", "test+", "novel", "novel+"]
    assert (warm(cached_features=True, patch_tokens=True), caplog.text) == (both, "")
    cost.images = 1_000
    with pytest.raises(ClientError, match=r"of 1,000 images take 2\.5 MB in f; 1\.2 MB are free there: give") as end:
        warm(cached_features=True, patch_tokens=True)
    assert (end.value.exit, done) == (Exit.BAD_INPUT, [])
    cost.fits, joining.settings = True, settings.model_copy(update={"role": "evaluator"})
    assert warm(cached_features=True, patch_tokens=True) == both[2:]
    assert "take 2.5 MB in f; 1.2 MB are free there" in caplog.text


@pytest.mark.parametrize(("agrees", "changes", "said"), [
    (True, ("x",), None), (False, (), "not joined, as you decided"),
    (False, ("a is 2", "b"), r"\(a is 2; b\).*--agree 0f"),
])  # fmt: skip
def test_who_does_not_agree_does_not_join(
    agrees: bool, changes: tuple[str, ...], said: str | None, settings: Settings, tmp_path: Path, source: Source
) -> None:
    shown: list[list[str]] = []

    async def consent(checks: Any, disclosure: Disclosure) -> bool:
        shown.append([check.name for check in checks])
        return agrees

    disclosure = SimpleNamespace(changes=changes, terms=SimpleNamespace(digest="0f"))
    asking = joining_of(settings, PrivateState(tmp_path))._ask(consent, disclosure, source)
    if said is None:
        asyncio.run(asking)
    else:
        with pytest.raises(ClientError, match=said) as end:
            asyncio.run(asking)
        assert end.value.exit is Exit.DECLINED
    assert shown == [["data", "images", "device"]]


@pytest.mark.parametrize("number", [None, "client-1"])
def test_who_had_enrolled_joins_again(
    number: str | None, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining = joining_of(settings, PrivateState(tmp_path))
    joining.parts = SimpleNamespace(secret=None)
    asked = Mock(return_value=Identity("a", "trainer", "secret", "fed-1", number))
    monkeypatch.setattr(PrivateState, "identity", asked)
    monkeypatch.setattr(Joining, "_data", AsyncMock(side_effect=DataError("a.png cannot be read")))
    joining.settings = settings.model_copy(update={"name": "a", "role": "evaluator"})
    with pytest.raises(DataError):
        asyncio.run(joining.join())
    asked.assert_called_once_with("a", "evaluator", None)
    assert joining._rejoins is (number is not None)


@pytest.mark.parametrize(("number", "status", "goes_on"), [
    ("client-1", 401, True), ("client-1", 410, True), ("client-1", 403, False), ("client-1", 409, False),
    (None, 401, False), (None, 410, False),
])  # fmt: skip
def test_who_has_enrolled_needs_no_token_that_still_holds(
    number: str | None, status: int, goes_on: bool, settings: Settings, tmp_path: Path
) -> None:
    refused = Refused(status, "x", "why")
    joining = joining_of(settings, PrivateState(tmp_path))
    joining.coordinator = SimpleNamespace(token=None, enrol=AsyncMock(side_effect=refused))
    joining.monitor = Mock()
    identity = Identity("a", "trainer", "secret", "fed-1", number)
    enrolling = joining._enrol(identity, "token", None, SimpleNamespace(train=[1, 2], test=[3]))
    if goes_on:
        asyncio.run(enrolling)
        joining.monitor.tell.assert_called_once_with("enrolled", client_id="client-1", train=2, test=1)
        assert joining.coordinator.token == "secret"
    else:
        with pytest.raises(Refused) as end:
            asyncio.run(enrolling)
        assert end.value is refused
        joining.monitor.tell.assert_not_called()


@pytest.mark.parametrize(("missing", "needs", "soon"), [
    (0, (True, False), False), (1, (True, False), True), (24, (True, False), True), (25, (True, False), False),
    (24, (True, True), False), (24, (False, False), False),
])  # fmt: skip
def test_features_that_take_up_to_a_minute_are_computed_after_the_enrolment(
    missing: int, needs: tuple[bool, bool], soon: bool, settings: Settings, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An image is timed alone, after one that warms the tower up: 2.5 seconds here."""
    ticks, asked, parts = iter([5.0, 7.5]), list[tuple[int, ...]](), list[list[str]]()
    monkeypatch.setattr(joining_module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    encode = lambda images: asked.append(tuple(images.shape)) or images  # noqa: E731
    data = SimpleNamespace(tests={"novel": None}, missing_features=lambda names: parts.append(names) or missing)
    work: Any = SimpleNamespace(data=data, backbone=SimpleNamespace(image_size=(2, 3), encode_images=encode))
    method: Any = SimpleNamespace(needs=SimpleNamespace(cached_features=needs[0], patch_tokens=needs[1]))
    info: Any = SimpleNamespace(training=SimpleNamespace(threads=3))
    joining, threads = joining_of(settings, PrivateState(tmp_path)), list[int]()
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert joining._soon_computed(work, method, info) is soon
    assert asked == [(1, 3, 2, 3)] * (2 if missing and needs == (True, False) else 0)
    assert (parts, threads) == (([["train", "test", "novel"]], [3]) if needs == (True, False) else ([], []))
    data.missing_features = Mock(side_effect=DataError("a.png cannot be read"))
    with pytest.raises(ClientError, match=r"a\.png cannot") if needs == (True, False) else nullcontext() as end:
        joining._soon_computed(work, method, info)
    assert end is None or end.value.exit is Exit.BAD_INPUT
