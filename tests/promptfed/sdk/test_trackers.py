"""Experiment trackers, read back: TensorBoard's event file and MLflow's database hold what the reports say."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.sdk.client import CommandError, Coordinator, Exit
from promptfed.sdk.result import FederationResult
from promptfed.sdk.trackers import metrics_of, open_tracker, record, track
from promptfed.shared.api.api_schemas import BackboneView, ClientCounts, FederationView
from promptfed.shared.api.report_schemas import RoundReport
from promptfed.shared.spec.spec import FederationSpec
from promptfed.testing.clients import drive
from tests.support.coordinators import in_thread

SPEC = FederationSpec(name="styles", method={"name": "promptfl", "m": 4})
NOW = datetime(2026, 1, 1, tzinfo=UTC)
FEDERATION = FederationView(
    name="styles", id="fed-1", state="finished", reason=None, round=2, phase=None, spec=SPEC, created_at=NOW,
    started_at=NOW, ended_at=NOW, backbone=BackboneView(fingerprint=None, shape=None, confirmed=True),
    clients=ClientCounts(trainers=2, evaluators=0, withdrawn=0), stage=None, asked=[], answered=[], failed=[],
    awaited=[], state_hash=None,
)  # fmt: skip
TIME = NOW.isoformat()
STAGE: dict[str, Any] = {
    "opened_at": TIME, "deadline": TIME, "closed_at": TIME, "completed_at": TIME, "seconds": 1.0, "asked": ["a", "b"],
    "answered": ["a"], "failed": [], "expired": [], "withdrawn": [], "bytes_up": 1, "bytes_down": 1,
}  # fmt: skip


def report(round: int) -> dict[str, Any]:
    """As the coordinator makes one; the numbers are the round's own."""
    update = {"client": "a", "task_id": "t", "sha256": "0", "bytes": 1, "norm": 2.0, "received_at": TIME, "metrics": {}}
    phase = STAGE | {
        "phase": "train", "sample_size": 2, "extended": False, "metrics": {"loss": 1.0 / (round + 1)},
        "measured": {"phase": {"spread": 0.25}}, "counted": [{"client": "a", "sha256": "0", "weight": 1.0}],
        "updates": [update | {"verdict": "counted", "weight": 1.0, "influence": None, "distance": None}],
        "state_hash": None,
    }  # fmt: skip
    splits = {"test": {"accuracy": 0.75, "num_samples": 4}}
    evaluation = STAGE | {
        "by_split": {"trainer": {"test@adapted": {"accuracy": 0.5 + round / 10}, "test": {"zero_shot": 0.25}}},
        "mean": {},
        "clients": {
            "a": {
                "role": "trainer", "domain": None, "splits": splits, "zero_shot": {}, "metrics": {},
                "received_at": TIME,
            }
        },
    }  # fmt: skip
    return {
        "round": round, "state_hash": None, "started_at": TIME, "ended_at": TIME, "bytes_up": 10 * round,
        "bytes_down": 20, "seconds": 1.5, "phases": [phase] if round else [], "evaluation": evaluation,
    }  # fmt: skip


RESULT = FederationResult(FEDERATION.model_dump(mode="json"), [report(0), report(1), report(2)])


def test_a_reports_numbers_have_names_of_their_own() -> None:
    found = metrics_of(RoundReport.model_validate(report(1)))
    assert found["loss/train"] == 0.5
    assert found["spread/train"] == 0.25
    assert found["accuracy/trainer/test@adapted"] == pytest.approx(0.6)
    assert found["zero_shot/trainer/test"] == 0.25
    assert found["accuracy/client a/test"] == 0.75


@pytest.mark.parametrize("ended", [True, False])
def test_a_federation_is_followed(tmp_path: Path, ended: bool) -> None:
    rounds: list[tuple[str, int]] = []
    seen: list[tuple[str, int]] = []
    with in_thread(tmp_path / "data") as server:
        federation = server.create(name="styles", rounds=1, participation={"deadline_seconds": 3600})
        drivers = server.enrol(federation, "a", "b")
        server.post(f"{federation}/start")
        if ended:
            drive(drivers)
        else:
            server.post(f"{federation}/cancel")
        with Coordinator(server.url, server.operator["Authorization"].split()[1]) as api:
            writers = [lambda view, report: rounds.append((view.name, report.round))]
            end = track(api, federation, writers, lambda snapshot, last: seen.append((snapshot.state, last)))
    assert rounds == ([("styles", 0), ("styles", 1)] if ended else [("styles", 0)])
    assert seen == [(end.state, rounds[-1][1])]
    assert end.state == ("finished" if ended else "cancelled")


@pytest.mark.parametrize("where", ["tensorboard", "tensorboard:", "wandb:x", ""])
def test_an_unknown_tracker(where: str) -> None:
    with pytest.raises(CommandError, match="tensorboard:FOLDER or mlflow:URI"):
        open_tracker(where).__enter__()


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module, where in (("torch.utils.tensorboard", f"tensorboard:{tmp_path}"), ("mlflow", "mlflow:sqlite://")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(CommandError, match=r"pip install 'promptfed\["):
            open_tracker(where).__enter__()


def events(folder: Path) -> dict[str, dict[int, float]]:
    """Scalars by name and step, of an event file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {name: {one.step: one.value for one in found.Scalars(name)} for name in found.Tags()["scalars"]}


def test_tensorboards_event_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="trackers: make test-all")
    for _ in range(2):  # a second time replaces the first
        with open_tracker(f"tensorboard:{tmp_path}") as write:
            record(write, RESULT)
    found = events(tmp_path / "styles-fed-1")
    assert found["loss/train"] == pytest.approx({1: 0.5, 2: 1 / 3})
    assert found["accuracy/trainer/test@adapted"] == pytest.approx({0: 0.5, 1: 0.6, 2: 0.7})


@pytest.mark.slow
def test_mlflows_database(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="trackers: make test-all")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with open_tracker(f"mlflow:{uri}") as write:
        record(write, RESULT)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("promptfed")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "styles"
    history = client.get_metric_history(run.info.run_id, "accuracy/trainer/test:adapted")
    assert [(one.step, one.value) for one in history] == [(0, 0.5), (1, 0.6), (2, pytest.approx(0.7))]
    losses = client.get_metric_history(run.info.run_id, "loss/train")
    assert {one.step: one.value for one in losses} == pytest.approx({1: 0.5, 2: 1 / 3})
    with pytest.raises(CommandError, match="MLflow"), open_tracker("mlflow:nowhere://x"):
        pass


def test_the_command_follows_a_federation(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="trackers: make test-all")
    with in_thread(tmp_path / "data") as server:
        federation = server.create(name="styles")
        server.enrol(federation, "a", "b")
        server.post(f"{federation}/start")
        server.post(f"{federation}/cancel")
        token = server.settings.data_dir / "operator.token"
        arguments = ["track", "styles", "--to", f"tensorboard:{tmp_path / 'events'}"]
        options = ["--coordinator", server.url, "--token-file", str(token), "--json"]
        done = CliRunner().invoke(app, [*arguments, *options])
        assert done.exit_code == Exit.FEDERATION_ENDED_BADLY, done.output
        assert json.loads(done.stdout)["state"] == "cancelled"
        assert json.loads(done.stdout)["last_round"] == 0
        found = events(tmp_path / "events" / f"styles-{federation}")
        assert found == {}  # no client has answered
        missing = CliRunner().invoke(app, ["track", "nothing", "--to", f"tensorboard:{tmp_path}", *options])
        assert missing.exit_code == Exit.REFUSED


def test_a_simulation_is_tracked_too(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="trackers: make test-all")
    run = tmp_path / "run.yaml"
    site = "{name: site-%s, data: 'symbols:neon?topic=music&per_class=2&test_per_class=1'}"
    run.write_text(f"name: small\nmethod: {{name: promptfl, m: 4}}\nrounds: 1\nclients: [{site % 'a'}, {site % 'b'}]\n")
    done = CliRunner().invoke(app, ["simulate", str(run), "--track", f"tensorboard:{tmp_path / 'events'}", "--json"])
    assert done.exit_code == Exit.OK, done.output
    (folder,) = (tmp_path / "events").iterdir()
    found = events(folder)
    assert set(found["accuracy/trainer/test"]) == {0, 1}
    assert set(found["loss/train"]) == {1}
