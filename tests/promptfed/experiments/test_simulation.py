"""A federation in one process: it runs to its end, comes to one state however it is run, or ends in one line."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import multiprocessing
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sqlalchemy.exc import OperationalError
from torch import Tensor
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.client_service.exits import ClientError
from promptfed.client_service.state.private_state import PrivateState
from promptfed.coordinator.engine import jobs
from promptfed.experiments.bench import presets, runner
from promptfed.experiments.bench.presets import SEEDS, embedded_presets
from promptfed.experiments.bench.runner import commit, provenance
from promptfed.experiments.simulation import simulation
from promptfed.experiments.simulation.preparation import PATIENCE_SECONDS, SimulationSetup, open_site
from promptfed.experiments.simulation.simulation import SimulationOptions, simulate
from promptfed.experiments.simulation.workers import _exit, run_workers
from promptfed.runtime.processes import Site
from promptfed.sdk.client import CommandError, Exit
from promptfed.sdk.progress import Snapshot
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache, tiny
from promptfed.shared.clip.caches import agreeing_slots
from promptfed.shared.clip.towers.prefix import PrefixEncoder
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.methods import METHODS, resolve_spec
from promptfed.shared.methods.core.interface import Classifier, ClientContext, MethodError, TrainResult
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import state_hash
from tests import ROOT
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
    assert found.state_hash == found.reports[-1]["state_hash"] == state_hash(found.state)
    assert [report["round"] for report in found.reports] == [0, 1, 2]
    assert {one.client for one in found.final()} == {"site-0", "site-1", "site-2", "referee"}
    assert all(one.zero_shot is not None and one.split == "test" for one in found.accuracies())
    assert found.bytes_up > 0
    assert found.bytes_down > found.bytes_up
    assert found.client_seconds > 0
    assert found.spec["method"] == {"name": "promptfl", "m": 4} | found.spec["method"]


@pytest.mark.parametrize("changes", [
    {},
    {"method": {"name": "fedpgp", "m": 4}},
    {"privacy": {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}},
])  # fmt: skip
def test_an_interrupted_run_goes_on_to_the_same_state(
    changes: dict[str, Any], backbone: Backbone, features: FeatureCache, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"backbone": backbone, "features": features}
    given = spec(rounds=4, **changes)
    whole = simulate(given, SITES, **options)

    def interrupt(snapshot: Snapshot) -> None:
        if snapshot.round > 1:
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        simulate(given, SITES, folder=tmp_path / "run", lasting=True, progress=interrupt, **options)
    with pytest.raises(CommandError, match=r"--out .* holds another run"):
        simulate(given | {"seed": 4}, SITES, folder=tmp_path / "run", lasting=True, **options)
    seen: list[Snapshot] = []
    again = simulate(given, SITES, folder=tmp_path / "run", lasting=True, progress=seen.append, **options)
    assert seen[0].round > 0
    assert again.state_hash == whole.state_hash
    assert [one["state_hash"] for one in again.reports] == [one["state_hash"] for one in whole.reports]
    assert again.final() == whole.final()
    assert again.tally.spent == whole.tally.spent


def failed_by(cause: OSError) -> CommandError:
    """How a client's error ends the simulation."""
    error = CommandError(f"client one failed: {cause}", Exit.FAILED)
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
    with pytest.raises(CommandError, match=r"^the disk of .* is full: free some space, or set TMPDIR") as end:
        simulate(spec(), SITES, backbone=backbone, features=features)
    assert end.value.exit is Exit.BAD_INPUT
    with pytest.raises(CommandError, match="is full: free some space, then give the same command again"):
        simulate(spec(), SITES, backbone=backbone, features=features, folder=tmp_path / "run", lasting=True)


def test_the_first_steps_of_a_round_share_a_pass_of_the_text_tower(
    backbone: Backbone, features: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, passes = PrefixEncoder.encode, []

    def counting(*arguments: Any) -> Any:
        passes.append(torch.is_grad_enabled())
        return encode(*arguments)

    monkeypatch.setattr(PrefixEncoder, "encode", counting)
    found = simulate(spec(), SITES, backbone=backbone, features=features)
    later = sum(math.ceil(client.num_samples / 4) - 1 for client in found.clients)
    assert later > 0
    assert sum(passes) == 2 * (1 + later)
    assert backbone.starts is None


@pytest.mark.parametrize("changes", [
    {},
    {"method": {"name": "fedpgp", "m": 4}},
    {"privacy": {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}},
    {"training": {"threads": 2}},
], ids=["shared", "personal", "protected", "two threads each"])  # fmt: skip
def test_two_at_once_come_to_same_result(changes: dict[str, Any], backbone: Backbone, features: FeatureCache) -> None:
    """Also each answer on a test image, with other clients' prompts too, and what clients tell of their training."""
    options: dict[str, Any] = {
        "backbone": backbone,
        "features": features,
        "options": SimulationOptions(swap_prompts=True),
    }
    one, two = (simulate(spec(rounds=1, **changes), SITES, pool=pool, **options) for pool in (1, 2))
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
    with pytest.raises(CommandError) as caught:
        simulate(spec(), SITES, pool=pool, backbone=backbone, features=features)
    wanted = "the federation is paused (quorum_missed): client site-1: MethodError: the loss is not finite"
    assert str(caught.value) == wanted
    assert caught.value.exit == Exit.FEDERATION_ENDED_BADLY


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
    with pytest.raises(CommandError, match="client site-1 could not evaluate round 1: MethodError: no classifier"):
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
    with pytest.raises(CommandError, match="ZeroDivisionError: of my own") as caught:
        simulate(
            spec(rounds=50, participation={"min_clients": 2, "quorum": 0.1}), SITES,
            pool=pool, backbone=backbone, features=features, progress=lambda told: rounds.append(told.round),
        )  # fmt: skip
    assert max(rounds, default=0) <= 1
    assert caught.value.exit in (Exit.FAILED, Exit.FEDERATION_ENDED_BADLY, Exit.REFUSED)
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


def test_features_are_computed_in_whole_batches_before_anybody_enrols(backbone: Backbone, tmp_path: Path) -> None:
    sizes: list[int] = []
    encode = backbone.encode_images
    cache = FeatureCache(tmp_path)

    def counted(images: Tensor, **options: Any) -> Tensor:
        sizes.append(int((images != 0).flatten(1).any(dim=1).sum()))
        return encode(images, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backbone, "encode_images", counted)
        simulate(spec(rounds=1), SITES, backbone=backbone, features=cache)
    assert cache.images_computed == 40 + 20  # ten classes, each image once
    whole = len(agreeing_slots(backbone))  # 32 places, or as many of them as agree on this CPU
    wanted = [min(whole, 60 - first) for first in range(0, 60, whole)]
    assert sorted(sizes[1:]) == sorted(wanted)  # the first measures which places of a batch agree


def test_another_backbone_than_the_specs_is_refused(backbone: Backbone, features: FeatureCache) -> None:
    named = {"model": tiny.MODEL, "pretrained": None}
    with pytest.raises(CommandError, match="names the backbone promptfed-tiny None fp32, but promptfed-tiny embedded"):
        simulate(spec(backbone=named), SITES, backbone=backbone, features=features)


def test_nothing_is_left_running_or_changed(backbone: Backbone, features: FeatureCache) -> None:
    torch.set_num_threads(1)
    before = set(threading.enumerate())
    simulate(spec(training={"threads": 2}, rounds=1), SITES[:2], backbone=backbone, features=features)
    assert set(threading.enumerate()) <= before
    assert torch.get_num_threads() == 1


def test_a_data_set_can_be_handed_in_opened(backbone: Backbone, features: FeatureCache) -> None:
    sources = SharedSources()
    for k, site in enumerate(SITES):
        sources.add(f"part {k}", sources.open(site.data))
    handed = [Site(site.name, f"part {k}") for k, site in enumerate(SITES)]
    given = simulate(spec(), handed, sources=sources, backbone=backbone, features=features)
    assert given.state_hash == simulate(spec(), SITES, backbone=backbone, features=features).state_hash


@pytest.mark.parametrize(("changes", "sites", "says", "exit"), [
    ({}, [*SITES, Site("site-0", DATA.format(0))], "two clients are called 'site-0'", Exit.BAD_INPUT),
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
    with pytest.raises(CommandError) as caught:
        simulate(spec(**changes), sites, backbone=given, features=features)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit == exit
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


@pytest.mark.parametrize(("options", "seconds"), [({}, PATIENCE_SECONDS), ({"patience": 1234.5}, 1234.5)])
def test_a_clients_patience_is_the_one_that_was_asked_for(
    options: dict[str, Any], seconds: float, backbone: Backbone, features: FeatureCache, tmp_path: Path
) -> None:
    """A crew's clients outlast a coordinator that starts again, which takes longer than a simulation's would wait."""
    shared = SharedSources()
    clients = tuple(open_site(site, shared) for site in SITES)
    record = list[Any]().append
    setup = SimulationSetup(resolve_spec(spec()), clients, tmp_path, 1, backbone, features, record, **options)

    async def given() -> list[float]:
        nobody = httpx.MockTransport(lambda asked: httpx.Response(503))
        async with (
            httpx.AsyncClient(transport=nobody, base_url="http://127.0.0.1") as http,
            run_workers(setup, http, "federation", "token") as running,
        ):
            return [worker.settings.give_up_after for worker in running.workers]

    assert asyncio.run(given()) == [seconds] * len(SITES)


RUN = f"""
import torch
torch.set_num_threads(1)
from promptfed.experiments.simulation.simulation import simulate
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


@pytest.mark.parametrize("name", embedded_presets())
def test_a_preset_can_be_run(name: str) -> None:
    preset = embedded_presets()[name]
    whole, reduced = preset.bench(SEEDS).jobs(), preset.bench((0,), reduced=True).jobs()
    assert len(reduced) <= len(whole) / len(SEEDS)
    assert {job.entry.label for job in reduced} == set(preset.methods)
    for job in reduced:
        assert resolve_spec(job.spec).method["name"] == preset.methods[job.entry.label].split(":")[0]


def test_every_method_stands_in_some_table() -> None:
    """The template's accuracy is a row of every table."""
    compared = {text.split(":")[0] for preset in embedded_presets().values() for text in preset.methods.values()}
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
    monkeypatch.setattr(presets, "EMBEDDED", folder)
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


# What ends a simulated client, as the command ends.


@pytest.mark.parametrize(("client", "command"), [
    (Exit.BAD_INPUT, Exit.BAD_INPUT),
    (Exit.FEDERATION_ENDED_BADLY, Exit.FEDERATION_ENDED_BADLY),
    (Exit.NAME_TAKEN, Exit.FAILED),
    (Exit.BACKBONE, Exit.FAILED),
    (Exit.DECLINED, Exit.FAILED),
    (Exit.INTERRUPTED, Exit.INTERRUPTED),
])  # fmt: skip
def test_codes_of_a_clients_process_alone_are_a_failure(client: Exit, command: Exit) -> None:
    assert _exit(ClientError(client, "why")) == command
