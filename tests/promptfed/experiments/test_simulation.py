"""A federation in one process: it runs to its end, comes to one state however it is run, or ends in one line."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import multiprocessing
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
import torch
from sqlalchemy.exc import OperationalError
from typer.testing import CliRunner

import promptfed
from promptfed.cli.app import exit_code
from promptfed.cli.main import app
from promptfed.client_service.exits import ClientError
from promptfed.client_service.privacy.policy import FLOOR, STATES
from promptfed.client_service.privacy.secure import SecureWork
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.training.data import held_out
from promptfed.client_service.training.trainer import TaskWork
from promptfed.console.output import commit
from promptfed.console.progress import Snapshot
from promptfed.coordinator.engine import jobs
from promptfed.experiments.bench import presets, runner
from promptfed.experiments.bench.presets import SEEDS, SUITES, presets_of
from promptfed.experiments.bench.runner import provenance
from promptfed.experiments.simulation import simulation
from promptfed.experiments.simulation.asgi_transport import InProcess
from promptfed.experiments.simulation.simulation import simulate
from promptfed.experiments.simulation.workers import RunningWorkers
from promptfed.export.verification import verify_export
from promptfed.runtime.processes import Site
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.clip.embedded import tiny
from promptfed.shared.data import DataError, open_source
from promptfed.shared.errors import Failed, PromptfedError
from promptfed.shared.methods import METHODS, resolve_spec
from promptfed.shared.methods.core.interface import Classifier, ClientContext, MethodError, TrainResult
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.service.reasons import Exit
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode, state_hash
from tests import ROOT
from tests.shared.spec.test_effects import costs_are_computed_coarsely as costs_are_computed_coarsely
from tests.support import exports
from tests.support.own_images import SHAPES, write_folder
from tests.support.waiting import PATIENCE, wait_for

DATA = "symbols:painting?topic=weather&per_class=4&test_per_class=2&partition=iid&clients=3&client={}"


SITES = [Site(f"site-{k}", DATA.format(k)) for k in range(3)]


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "name": "simulated", "method": {"name": "promptfl", "m": 4}, "rounds": 2,
        "training": {"learning_rate": 0.02, "batch_size": 4}, "participation": {"min_clients": 2}, "seed": 3,
    } | changes  # fmt: skip


def test_it_runs_to_its_end(backbone: Backbone, features: FeatureCache, tmp_path: Path) -> None:
    seen: list[Snapshot] = []
    referee = Site("referee", "symbols:sketch?topic=weather&test_per_class=2", role="evaluator")
    found = simulate(
        spec(), [*SITES, referee], folder=tmp_path, backbone=backbone, features=features, progress=seen.append
    )
    assert found.federation.state == "finished"
    assert seen[-1].state == "finished"
    rounds = [one.round for one in seen]
    assert rounds == sorted(rounds)
    assert rounds[-1] == 2
    assert all(one != other for one, other in pairwise(seen)), "only changes are told"
    assert seen[-1].ended is not None
    assert seen[-1].ended.startswith("round 2: loss ")
    assert "accuracy " in seen[-1].ended
    assert found.state_hash == found.reports[-1]["state_hash"] == state_hash(found.state)
    assert [report["round"] for report in found.reports] == [0, 1, 2]
    assert {one.client for one in found.final()} == {"site-0", "site-1", "site-2", "referee"}
    assert all(one.zero_shot is not None and one.split == "test" for one in found.accuracies())
    assert found.bytes_up > 0
    assert found.bytes_down > found.bytes_up
    assert found.client_seconds > 0
    assert found.spec["method"] == {"name": "promptfl", "m": 4} | found.spec["method"]


def test_a_round_is_one_request_of_each_client(
    backbone: Backbone, features: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[str] = Counter()
    answer = InProcess.handle_async_request

    async def counted(self: InProcess, request: httpx.Request) -> httpx.Response:
        answered = await answer(self, request)
        # A task that was waited for in vain is asked for again: on a busy machine a round takes longer than a wait.
        asked[request.url.path.rpartition("/")[2]] += answered.status_code != 204
        return answered

    monkeypatch.setattr(InProcess, "handle_async_request", counted)
    referees = [Site(f"referee-{k}", "symbols:sketch?topic=weather&test_per_class=2", role="evaluator") for k in "ab"]
    sites = [*SITES, *referees]  # more than have a turn at once, which nobody may keep while a receipt waits
    simulate(spec(rounds=4, evaluation={"every": 1}), sites, backbone=backbone, features=features)
    assert (asked["update"], asked["evaluation"], asked["payload"]) == (3 * 4, 5 * 5, 0)
    assert 5 <= asked["task"] <= 2 * 5, "once before the first round, and once when there are no more"


@pytest.mark.parametrize("changes", [
    {"method": {"name": "fedpgp", "m": 4}},
    {"privacy": {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}},
])  # fmt: skip
def test_an_interrupted_run_goes_on_to_the_same_state(
    changes: dict[str, Any], backbone: Backbone, features: FeatureCache, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"backbone": backbone, "features": features}
    given = spec(rounds=3, **changes)
    whole = simulate(given, SITES, **options)

    def interrupt(snapshot: Snapshot) -> None:
        if snapshot.round > 1:
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        simulate(given, SITES, folder=tmp_path / "run", lasting=True, progress=interrupt, **options)
    with pytest.raises(PromptfedError, match=r"--out .* holds another run"):
        simulate(given | {"seed": 4}, SITES, folder=tmp_path / "run", lasting=True, **options)
    seen: list[Snapshot] = []
    again = simulate(given, SITES, folder=tmp_path / "run", lasting=True, progress=seen.append, **options)
    assert seen[0].round > 0
    assert again.state_hash == whole.state_hash
    assert [one["state_hash"] for one in again.reports] == [one["state_hash"] for one in whole.reports]
    assert again.final() == whole.final()
    assert again.facts.privacy == whole.facts.privacy


def failed_by(cause: OSError) -> PromptfedError:
    """How a client's error ends the simulation."""
    error = Failed(f"client one failed: {cause}")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(("place", "call", "fails"), [
    (jobs, "aggregate", OSError(errno.ENOSPC, "No space left on device")),
    (jobs, "aggregate", OperationalError("insert", {}, sqlite3.OperationalError("database or disk is full"))),
    (PrivateState, "commit", OSError(errno.ENOSPC, "No space left on device")),
    (simulation, "_follow", failed_by(OSError(errno.ENOSPC, "No space left on device"))),
])  # fmt: skip
def test_a_full_disk_ends_it_in_one_line(
    place: object,
    call: str,
    fails: Exception,
    backbone: Backbone,
    features: FeatureCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*arguments: Any) -> None:
        raise fails

    monkeypatch.setattr(place, call, full)
    with pytest.raises(PromptfedError, match=r"^the disk of .* is full: free some space, or set TMPDIR") as end:
        simulate(spec(), SITES, backbone=backbone, features=features)
    assert exit_code(end.value) is Exit.BAD_INPUT
    with pytest.raises(PromptfedError, match="is full: free some space, then give the same command again"):
        simulate(spec(), SITES, backbone=backbone, features=features, folder=tmp_path / "run", lasting=True)


@pytest.mark.parametrize("changes", [
    {"method": {"name": "fedpgp", "m": 4}},
    {"privacy": {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}},
    {"training": {"threads": 2}},
], ids=["personal", "protected", "two threads each"])  # fmt: skip
def test_two_at_once_come_to_same_result(changes: dict[str, Any], backbone: Backbone, features: FeatureCache) -> None:
    """Also each answer on a test image, and what clients tell of their training."""
    one, two = (
        simulate(spec(rounds=1, **changes), SITES, pool=pool, backbone=backbone, features=features) for pool in (1, 2)
    )
    assert one.state_hash == two.state_hash
    assert one.outcomes == two.outcomes
    assert bool(one.outcomes) is ("privacy" not in changes)
    assert _trained(one) == _trained(two)


def _trained(result: FederationResult) -> list[Any]:
    """What each update told, but how long it took."""
    updates = [update for report in result.reports[1:] for phase in report["phases"] for update in phase["updates"]]
    return sorted([one["client"], one["norm"], one["metrics"].get("loss"), str(one["privacy"])] for one in updates)


@pytest.fixture
def site_1_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    train = PromptFL.train

    def failing(self: PromptFL, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        if context.client == "site-1":
            raise MethodError("the loss is not finite")
        return train(self, context, payload, private)

    monkeypatch.setattr(PromptFL, "train", failing)


@pytest.mark.usefixtures("site_1_fails")
@pytest.mark.parametrize("pool", [1, 2])
def test_client_that_fails_is_named_where_all_are_needed(pool: int, backbone: Backbone, features: FeatureCache) -> None:
    with pytest.raises(PromptfedError) as caught:
        simulate(spec(), SITES, pool=pool, backbone=backbone, features=features)
    wanted = "the federation is paused (quorum_missed): client site-1: MethodError: the loss is not finite"
    assert str(caught.value) == wanted
    assert exit_code(caught.value) == Exit.FEDERATION_ENDED_BADLY


@pytest.mark.usefixtures("site_1_fails")
def test_a_client_that_fails_is_done_without_where_quorum_allows(backbone: Backbone, features: FeatureCache) -> None:
    found = simulate(spec(participation={"min_clients": 2, "quorum": 0.6}), SITES, backbone=backbone, features=features)
    counted = [[one["client"] for one in report["phases"][0]["counted"]] for report in found.reports[1:]]
    assert counted == [["site-0", "site-2"]] * 2


@pytest.mark.parametrize("pool", [1, 2])
def test_a_client_that_cannot_evaluate_is_an_error(
    pool: int, backbone: Backbone, features: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = PromptFL.classifier

    def failing(self: PromptFL, context: ClientContext, payload: Tensors, private: Tensors) -> Classifier:
        if context.client == "site-1" and context.round == 1:
            raise MethodError("no classifier")
        return classifier(self, context, payload, private)

    monkeypatch.setattr(PromptFL, "classifier", failing)
    with pytest.raises(PromptfedError, match="client site-1 could not evaluate round 1: MethodError: no classifier"):
        simulate(spec(), SITES, pool=pool, backbone=backbone, features=features)


@pytest.mark.parametrize(("half", "pool"), [("train", 1), ("train", 2), ("classifier", 2), ("aggregate", 1)])
def test_a_wrong_method_ends_it_at_once_with_the_traceback(
    half: str,
    pool: int,
    backbone: Backbone,
    features: FeatureCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds = []

    def wrong_line(*_: Any) -> Any:
        raise ZeroDivisionError("of my own")

    monkeypatch.setattr(PromptFL, half, wrong_line)
    with pytest.raises(PromptfedError, match="ZeroDivisionError: of my own") as caught:
        simulate(
            spec(rounds=50, participation={"min_clients": 2, "quorum": 0.1}), SITES,
            pool=pool, backbone=backbone, features=features, progress=lambda told: rounds.append(told.round),
        )  # fmt: skip
    assert max(rounds, default=0) <= 1
    assert exit_code(caught.value) in (Exit.FAILED, Exit.FEDERATION_ENDED_BADLY, Exit.REFUSED)
    assert "in wrong_line" in caplog.text


def test_it_runs_where_an_event_loop_runs(backbone: Backbone, features: FeatureCache) -> None:
    async def notebook() -> str:
        return simulate(spec(), SITES, backbone=backbone, features=features).state_hash

    assert asyncio.run(notebook()) == simulate(spec(), SITES, backbone=backbone, features=features).state_hash


@pytest.mark.parametrize("pool", [1, 2])
def test_an_interrupt_ends_it_at_once_and_leaves_nothing(
    pool: int, backbone: Backbone, features: FeatureCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(simulation, "LEAVE_SECONDS", PATIENCE)  # a busy machine is slow to leave, too
    before = set(threading.enumerate())
    rounds: list[int] = []

    sent: list[int] = []

    def progress(snapshot: Snapshot) -> None:
        rounds.append(snapshot.round)
        if snapshot.round >= 3 and not sent:
            sent.append(snapshot.round)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        simulate(spec(rounds=10_000), SITES, pool=pool, backbone=backbone, features=features, progress=progress)
    assert rounds[-1] < 1000, "a round takes milliseconds, the end of ten thousand minutes"
    assert list(tmp_path.iterdir()) == []
    assert multiprocessing.active_children() == []
    own = lambda: {thread for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"}  # noqa: E731 tqdm's
    wait_for("the end of its threads", lambda: own() <= before)


def test_another_backbone_than_the_specs_is_refused(backbone: Backbone, features: FeatureCache) -> None:
    named = {"model": tiny.MODEL, "pretrained": None}
    with pytest.raises(
        PromptfedError, match="names the backbone promptfed-tiny None fp32, but promptfed-tiny embedded"
    ):
        simulate(spec(backbone=named), SITES, backbone=backbone, features=features)


def test_nothing_is_left_running_or_changed(backbone: Backbone, features: FeatureCache) -> None:
    torch.set_num_threads(1)
    before, garbage = set(threading.enumerate()), gc.get_threshold()
    simulate(spec(training={"threads": 2}, rounds=1), SITES[:2], backbone=backbone, features=features)
    assert set(threading.enumerate()) <= before
    assert (torch.get_num_threads(), gc.get_threshold()) == (1, garbage)


@pytest.mark.parametrize(("changes", "sites", "says", "exit"), [
    ({}, [*SITES, Site("site-0", DATA.format(0))], "two clients are called 'site-0'", Exit.BAD_INPUT),
    ({}, [*SITES, Site("a name", DATA.format(0))], "client a name: --name: ", Exit.BAD_INPUT),
    ({}, SITES[:1], "1 trainer where participation.min_clients wants 2", Exit.BAD_INPUT),
    ({"rounds": 0}, SITES, "rounds: 0 rounds evaluate an export", Exit.BAD_INPUT),
    ({}, [*SITES, Site("lost", "symbols:nowhere")], "client lost: symbols:nowhere: unknown domain", Exit.BAD_INPUT),
    ({"class_names": ["sun", "moon"]}, SITES, "the federation does not know the classes", Exit.BAD_INPUT),
    ({"backbone": {"model": "no-model"}}, SITES, "open_clip has no model 'no-model'", Exit.BAD_INPUT),
])  # fmt: skip
def test_what_goes_wrong_is_one_line(
    changes: dict[str, Any], sites: list[Site], says: str, exit: Exit, backbone: Backbone, features: FeatureCache
) -> None:
    before = set(threading.enumerate())
    given = None if "backbone" in changes else backbone
    with pytest.raises(PromptfedError) as caught:
        simulate(spec(**changes), sites, backbone=given, features=features)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert exit_code(caught.value) == exit
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("evaluation", ["plain", None])
def test_a_protected_federation_says_what_each_update_cost_and_repeats(
    evaluation: str | None, backbone: Backbone, features: FeatureCache
) -> None:
    """Simulated noise follows from the seed, and is marked so. Accuracies are withheld unless the spec says plain."""
    privacy = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0, "evaluation": evaluation}
    found, again = (
        simulate(spec(privacy=privacy, rounds=1), SITES, backbone=backbone, features=features) for _ in range(2)
    )
    assert state_hash(found.state) == state_hash(again.state)
    assert bool(found.accuracies()) is (evaluation == "plain")
    for one in found.reports[1]["phases"][0]["updates"]:
        assert set(one["metrics"]) == {"steps", "trained_parameters"}
        assert one["privacy"]["noise"] == "seeded"
        assert one["privacy"]["epsilon"] > 1
    assert all(one["withheld"] is (evaluation is None) for one in found.reports[1]["evaluation"]["clients"].values())


RUN = f"""
import torch
torch.set_num_threads(1)
from promptfed.experiments.simulation.simulation import simulate
from promptfed.export.verification import verify_export
from promptfed.runtime.processes import Site
sites = [Site(f"site-{{k}}", {DATA!r}.format(k)) for k in range(3)]
simulate({spec(rounds=10_000)!r}, sites, pool=2, progress=lambda snapshot: print(snapshot.round, flush=True))
"""


def test_a_simulation_that_is_killed_leaves_no_process() -> None:
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True) as simulation:
        assert simulation.stdout is not None
        try:
            assert simulation.stdout.readline()
            children = Path(f"/proc/{simulation.pid}/task/{simulation.pid}/children").read_text().split()
            assert len(children) == 2
        finally:
            simulation.kill()
    wait_for("the end of its processes", lambda: not any(Path(f"/proc/{child}").exists() for child in children))


SMALL = """
title: Two styles
protocol: leave-one-domain-out
setting:
  data: ["symbols:{domain}?topic=weather&per_class=2&test_per_class=2"]
  domains: [neon, chalk]
reduced_targets: [chalk]
m: 2
spec: {rounds: 1, training: {epochs: 1}}
methods:
  ours: promptfl
  the same again: promptfl:m=2
notes: Nothing to be read in one round.
"""


@pytest.mark.parametrize(("suite", "name"), [(suite, name) for suite in SUITES for name in presets_of(suite)])
def test_a_preset_can_be_run(suite: str, name: str) -> None:
    preset = presets_of(suite)[name]
    for uri in preset.setting.data if suite == "photos" else ():
        try:
            open_source(uri.replace("{domain}", next(iter(preset.setting.domains), "")))
        except DataError as error:
            pytest.skip(str(error))
    whole, reduced = preset.bench(SEEDS).jobs(), preset.bench((0,), reduced=True).jobs()
    assert len(reduced) <= len(whole) / len(SEEDS)
    assert {job.entry.label for job in reduced} == set(preset.methods)
    for job in reduced:
        assert resolve_spec(job.spec).method["name"] == preset.methods[job.entry.label].split(":")[0]


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_runs_the_defaults_that_a_user_gets(suite: str) -> None:
    for name, preset in presets_of(suite).items():
        assert preset.m is None
        assert not {"rounds", "training"} & set(preset.spec), name
        for label, text in preset.methods.items():
            named = {option.partition("=")[0].partition(".")[0] for option in text.split(":")[1:]}
            assert not named & {"rounds", "training", "start", "finetune_learning_rate"}, (name, label)


def test_every_method_stands_in_some_table() -> None:
    """The template's accuracy is a row of every table."""
    compared = {text.split(":")[0] for preset in presets_of("embedded").values() for text in preset.methods.values()}
    assert compared == set(METHODS.own()) - {"zero_shot"}


def test_the_commit_is_this_checkouts() -> None:
    command = ["git", "-C", str(ROOT), "rev-parse", "--show-toplevel", "HEAD"]
    asked = subprocess.run(command, capture_output=True, text=True)
    top, _, head = asked.stdout.partition("\n")
    if asked.returncode or Path(top).resolve() != ROOT.resolve():
        pytest.skip("no checkout")
    commit.cache_clear()  # a commit may have come since this process asked
    found = provenance().commit
    assert found is not None
    assert head.startswith(found.removesuffix("-dirty"))


def test_it_runs_reduced_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "presets", tmp_path / "out"
    folder.mkdir()
    (folder / "1-small.yaml").write_text(SMALL)
    monkeypatch.setitem(presets.SUITES, "embedded", folder)
    asked: list[str] = []
    simulate = runner.simulate
    monkeypatch.setattr(runner, "simulate", lambda *args, **more: asked.append("run") or simulate(*args, **more))
    command = ["bench", "embedded", "--reduced", "--json", "--out", str(out)]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.stderr
    assert asked == ["run"], "one target and one seed; two labels of the same spec share their run"
    found = json.loads(first.stdout.splitlines()[-1])
    rows = {row["label"]: row for row in found["1-small"]["table"]}
    assert set(rows) == {"zero-shot", "ours", "the same again"}
    assert rows["ours"]["scores"] == rows["the same again"]["scores"]
    assert set(rows["ours"]["scores"][0]) == {"chalk", "mean", "clients"}
    again = CliRunner().invoke(app, command)
    assert (again.exit_code, asked) == (0, ["run"])


@pytest.mark.parametrize(("client", "command"), [
    (Exit.BAD_INPUT, Exit.BAD_INPUT),
    (Exit.FEDERATION_ENDED_BADLY, Exit.FEDERATION_ENDED_BADLY),
    (Exit.NAME_TAKEN, Exit.FAILED),
    (Exit.BACKBONE, Exit.FAILED),
    (Exit.DECLINED, Exit.FAILED),
])  # fmt: skip
def test_codes_of_a_clients_process_alone_are_a_failure(client: Exit, command: Exit) -> None:
    async def ended() -> None:
        async def fail() -> None:
            raise ClientError(client, "why")

        running = RunningWorkers(1)
        running.tasks[asyncio.create_task(fail())] = "a"
        await running.wait(PATIENCE)

    with pytest.raises(PromptfedError, match=r"^client a: why$") as failed:
        asyncio.run(ended())
    assert exit_code(failed.value) == command


# A federation whose updates nobody sees: in one process, to the same state as in the clear.


SUMMED = "symbols:painting?topic=weather&per_class=4&test_per_class=2&partition=iid&clients=4&client={}"


SITES_SECURE_SIMULATION = [Site(f"site-{k}", SUMMED.format(k)) for k in range(4)]


def spec_of_secure_simulation(**changes: Any) -> dict[str, Any]:
    return spec(participation={"min_clients": 4}) | changes


def test_the_state_is_that_of_the_mean_in_the_clear(backbone: Backbone, features: FeatureCache) -> None:
    def run(**changes: Any) -> Any:
        wanted = spec_of_secure_simulation(method={"name": "fedpgp", "m": 4}, **changes)
        return simulate(wanted, SITES_SECURE_SIMULATION, backbone=backbone, features=features)

    clear, summed = run(), run(secure_aggregation={"threshold": 0.7})
    assert summed.federation.state == "finished"
    for name, tensor in clear.state.items():
        assert (summed.state[name] - tensor).abs().max() < 1e-6, name
    assert run(secure_aggregation={"threshold": 0.7}).state_hash == summed.state_hash, "masks cancel"


PRIVACY = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0, "delta": 1e-3}


def test_noise_for_records_gives_the_state_of_noise_in_clear(backbone: Backbone, features: FeatureCache) -> None:
    def run(**changes: Any) -> Any:
        return simulate(
            spec_of_secure_simulation(rounds=1, privacy=PRIVACY, **changes), SITES_SECURE_SIMULATION,
            backbone=backbone, features=features,
        )  # fmt: skip

    clear, summed = run(), run(secure_aggregation={"threshold": 0.7})
    for name, tensor in clear.state.items():
        assert (summed.state[name] - tensor).abs().max() < 1e-6, name
    spent, told = clear.facts.privacy, summed.facts.privacy
    assert told == spent
    assert (told.clients, told.noise, told.rounds_counted) == (4, "seeded", 1)
    assert summed.facts.secure_aggregation.smallest_sum == 4
    assert all(phase.updates == [] for report in summed.round_reports for phase in report.phases)


@pytest.mark.parametrize(("told", "withheld"), [(None, True), ("plain", False)])
def test_accuracies_stay_with_the_sites_unless_the_spec_says_otherwise(
    told: str | None, withheld: bool, backbone: Backbone, features: FeatureCache
) -> None:
    referee = Site("referee", SUMMED.format(0).replace("painting", "neon"), role="evaluator")
    wanted = spec_of_secure_simulation(rounds=1, secure_aggregation={}, privacy={"evaluation": told} if told else {})
    result = simulate(wanted, [*SITES_SECURE_SIMULATION, referee], backbone=backbone, features=features)
    clients = result.reports[1]["evaluation"]["clients"]
    assert {name: one["withheld"] for name, one in clients.items()} == {
        **dict.fromkeys((site.name for site in SITES_SECURE_SIMULATION), withheld),
        "referee": False,
    }, "an evaluator's own test set is its owner's"
    assert all((one["splits"] == {}) is one["withheld"] for one in clients.values())
    assert all(one["metrics"] == {} and one["zero_shot"] == {} for one in clients.values() if one["withheld"])
    assert result.reports[1]["phases"][0]["metrics"] == {}


@pytest.mark.parametrize(("where", "error"), [
    ((TaskWork, "_train_split"), DataError("image 17 cannot be read")),
    ((SecureWork, "keep"), MemoryError("too many images of class 3")),
])  # fmt: skip
def test_under_protection_the_coordinator_is_not_told_why_training_failed(
    where: tuple[Any, str],
    error: Exception,
    backbone: Backbone,
    features: FeatureCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, failing = getattr(*where), []

    def fail_once(self: Any, *given: Any) -> Any:
        evaluates = where[0] is TaskWork and given[2].split()[1] == "0"  # round 0 is only evaluated
        if not failing and not evaluates:
            failing.append(1)
            raise error
        return original(self, *given)

    monkeypatch.setattr(*where, fail_once)
    wanted = spec_of_secure_simulation(
        rounds=1, privacy={"level": "sample", "clip": 0.3, "noise_multiplier": 4.0}, secure_aggregation={},
        participation={"min_clients": 4, "quorum": 0.75},
    )  # fmt: skip
    run = simulate(wanted, SITES_SECURE_SIMULATION, backbone=backbone, features=features)
    assert [(one.type, one.detail) for one in run.round_reports[1].phases[0].failed] == [
        ("training-failed", "protected training failed; this client's own log says why")
    ]


SPEC = {
    "name": "floor", "method": {"name": "promptfl", "m": 2}, "class_names": list(SHAPES), "rounds": 2,
    "participation": {"min_clients": 2},
}  # fmt: skip


def federation(folder: Path, each: dict[str, int], floor: int, **more: Any) -> Any:
    sites = [
        Site(name, f"folder:{write_folder(folder / name, seed=9 * number, each=count)}", floor=floor)
        for number, (name, count) in enumerate(each.items())
    ]
    return simulate(SPEC | more, sites, backbone=exports.backbone())


def test_sites_with_a_floor_tell_ranges(tmp_path: Path) -> None:
    each = {"large": 29, "small": 12}  # of each class, a fifth to test on
    exact, floored = (federation(tmp_path / str(floor), each, floor) for floor in (1, FLOOR))
    assert [client.num_samples for client in exact.facts.participants] == [92, 40]
    assert [client.num_samples for client in floored.facts.participants] == [90, 40]
    for ours, theirs in zip(floored.reports, exact.reports, strict=True):
        told, known = (report["evaluation"]["clients"] for report in (ours, theirs))
        assert told["small"]["splits"] == told["small"]["zero_shot"] == {}
        assert set(told["large"]["splits"]) == {"test"}
        for name in ("splits", "zero_shot"):
            mine, own = told["large"][name]["test"], known["large"][name]["test"]
            assert mine["num_samples"] == own["num_samples"] - 4 == 20
            assert abs(mine["accuracy"] - own["accuracy"]) < 0.25
            assert "macro_f1" not in mine
            assert ("macro_f1" in own) is (name == "splits")
    assert [told.num_samples for told in floored.accuracies()] == [20] * 3


def test_more_evaluations_than_states_end_no_round_and_the_last_is_told(tmp_path: Path) -> None:
    """Of a trainer and of an evaluator alike; those between are withheld, and are no failures."""
    sites = [
        Site(name, f"folder:{write_folder(tmp_path / name, seed=number, each=30)}", role=role, floor=FLOOR)
        for number, (name, role) in enumerate({"a": "trainer", "b": "trainer", "c": "evaluator"}.items())
    ]
    run = simulate(SPEC | {"rounds": STATES + 5}, sites, backbone=exports.backbone())
    asked = [report["evaluation"] for report in run.reports]
    assert len(asked) == STATES + 6
    assert not any(one["failed"] for one in asked)
    for name in ("a", "b", "c"):
        told = [bool(one["clients"][name]["splits"]) for one in asked]
        assert told == [not one["clients"][name]["withheld"] for one in asked]
        assert sum(told) == STATES
        assert (told[0], told[-1]) == (True, True)
    assert {row.client for row in run.final()} == {"a", "b", "c"}


def test_fractions_of_training_images_stay_at_a_site_with_a_floor(tmp_path: Path) -> None:
    for floor in (1, FLOOR):
        method = {"name": "diprompt", "m": 2, "candidates": ["a photo of a {}.", "a drawing of a {}."]}
        run = federation(tmp_path / str(floor), {"a": 8, "b": 8}, floor, rounds=1, method=method)
        told = run.reports[-1]["phases"][0]["updates"][0]["metrics"]
        assert "loss" in told
        assert ("domain_share_0" in told) is (floor == 1)


ROUNDS = 3


TRAINING = {"learning_rate": 0.2, "epochs": 2, "batch_size": 4}  # so fast that the best round is not the last one


METHOD = {"name": "fedpgp", "m": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    return {name: f"folder:{write_folder(folder / name, seed=seed, each=8)}" for seed, name in enumerate(("a", "b"))}


def run(method: dict[str, Any], data: dict[str, str], **more: Any) -> promptfed.Result:
    options = {"rounds": ROUNDS, "class_names": list(SHAPES), "training": TRAINING, "selection": {"share": 0.25}}
    return promptfed.run(method, data, backbone=exports.backbone(), **(options | more))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "selected"


@pytest.fixture(scope="module")
def selected(data: dict[str, str], folder: Path) -> promptfed.Result:
    return run(METHOD, data, folder=folder)


def test_the_result_is_the_best_rounds(selected: promptfed.Result, tmp_path: Path) -> None:
    result = selected.taken
    view = result.federation.selection
    assert view is not None
    assert (view.metric, view.split, view.share, view.compared) == ("accuracy", "validation", 0.25, ROUNDS + 1)
    assert result.round == view.round
    by_round = {
        report["round"]: [client["splits"] for client in report["evaluation"]["clients"].values()]
        for report in result.reports
    }
    for round, splits in by_round.items():
        mean = fmean(split["validation"]["accuracy"] for split in splits)
        assert mean <= view.value + 1e-12
        assert (mean == pytest.approx(view.value)) or round != view.round
        # Test images are looked at once: with the state of the chosen round.
        assert all(set(split) == {"validation", *(["test"] if round == view.round else [])} for split in splits)
    selected.export(tmp_path / "export")
    card = json.loads((tmp_path / "export" / "card.json").read_text())
    assert card["round"] == view.round
    assert card["selection"]["value"] == view.value
    assert "the best of 4 by a mean accuracy" in (tmp_path / "export" / "card.md").read_text()
    assert card["accuracy"]["mean"]["trainer"]["adapted"] > 0


def test_personalised_clients_end_with_the_private_state_of_the_chosen_round(
    selected: promptfed.Result, folder: Path, data: dict[str, str], tmp_path: Path
) -> None:
    view = selected.taken.federation.selection
    assert view is not None
    assert 0 < view.round < ROUNDS
    # The same federation without selection, which ends with that round and trains on the same images.
    seed = selected.taken.spec["seed"]
    apart = {name: held_out(open_source(uri), 0.25, seed) for name, uri in data.items()}
    run(METHOD, apart, folder=tmp_path / "short", rounds=view.round, selection=None)
    run(METHOD, apart, folder=tmp_path / "long", selection=None)
    for name in data:
        chosen, short, longer = (
            decode((place / f"client-{name}" / "committed.safetensors").read_bytes())[0]
            for place in (folder, tmp_path / "short", tmp_path / "long")
        )
        assert chosen.keys() == short.keys() != set()
        assert all(bool((chosen[key] == short[key]).all()) for key in chosen)
        assert any(bool((chosen[key] != longer[key]).any()) for key in chosen)
        assert [path.name for path in (folder / f"client-{name}").glob("round-*")] == [
            f"round-{view.round}.safetensors"
        ]


def test_it_stops_where_it_no_longer_helps_and_the_export_has_both_states(data: dict[str, str], tmp_path: Path) -> None:
    stopped = run(METHOD, data, rounds=30, stop={"patience": 2})
    result, view = stopped.taken, stopped.taken.federation.selection
    assert view is not None
    last = result.federation.round
    assert (result.round, last) == (view.round, view.round + 2)
    said = f"stopped after round {last}: no rise for 2 evaluations"
    assert result.federation.reason == said
    stopped.export(tmp_path / "export")
    tensors, _ = decode((tmp_path / "export" / "final.safetensors").read_bytes())
    assert state_hash(tensors) != result.state_hash
    assert f"finished ({said})" in (tmp_path / "export" / "card.md").read_text()
    assert verify_export(tmp_path / "export", None, recompute=False).card.stopped == said


def test_a_selection_under_protection_is_refused_with_a_reason(data: dict[str, str]) -> None:
    for more, text in (
        ({"privacy": {"level": "sample", "clip": 1.0, "noise_multiplier": 1.0}}, "protection withholds"),
        ({"secure_aggregation": {}}, "protection withholds"),
        ({"retention": "last_round"}, "give retention all"),
    ):
        with pytest.raises(PromptfedError, match=text):
            run({"name": "promptfl", "m": 2}, data, **more)


def test_a_suite_tells_all_that_is_missing_in_a_line_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = 'data: ["symbols:{domain}?topic=weather&per_class=2&test_per_class=2"]'
    for number, name in enumerate(("absent", "gone", "gone?shots=1"), 2):
        missing = SMALL.replace(wanted, f'data: ["folder:{tmp_path}/{name}"]').replace("[neon, chalk]", "[]")
        (tmp_path / f"{number}-missing.yaml").write_text(missing.replace("leave-one-domain-out", "personalisation"))
    (tmp_path / "1-small.yaml").write_text(SMALL)
    monkeypatch.setitem(presets.SUITES, "photos", tmp_path)
    ended = CliRunner().invoke(app, ["bench", "photos", "--out", str(tmp_path / "out")])
    assert (ended.exit_code, ended.stdout) == (Exit.BAD_INPUT, "")
    assert [ended.stderr.count(part) for part in ("\n", f"{tmp_path}/absent;", f"{tmp_path}/gone;")] == [1, 1, 1]
    assert not (tmp_path / "out").exists()
