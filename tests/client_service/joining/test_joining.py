"""What a client checks before the coordinator learns of it: that it goes on with the data that it began with."""

from __future__ import annotations

import asyncio
import json

import pytest

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining.checks import check_recorded
from promptfed.shared.data import Source
from tests.client_service.conftest import Make
from tests.support.fake_coordinator import made_up_source


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
