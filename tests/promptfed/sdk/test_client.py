"""The operator's client: what it sends, how it reads answers of another version, and one mapping of refusals."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import promptfed
from promptfed.cli.app import exit_code
from promptfed.cli.main import app
from promptfed.console.progress import describe_round, metrics_of, open_tracker, record, track
from promptfed.sdk import client as sdk_client
from promptfed.sdk import operations
from promptfed.sdk.client import CA_VARIABLE, PLAIN_VARIABLE, Answer, AsyncCoordinator, Coordinator, Request
from promptfed.sdk.result import FederationReports
from promptfed.shared.api.api_schemas import BackboneView, ClientCounts, FederationPage, FederationView, Health
from promptfed.shared.api.report_schemas import RoundReport
from promptfed.shared.errors import PromptfedError
from promptfed.shared.service.reasons import Exit
from promptfed.shared.spec.spec import FederationSpec
from promptfed.testing.clients import drive
from tests.support.coordinators import InThread, in_thread
from tests.support.proxy import DAMAGES, ProxiedRequest, Proxy, Trouble
from tests.support.waiting import PATIENCE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    with in_thread(tmp_path_factory.mktemp("coordinator") / "data") as running:
        running.create(name="eyes")
        yield running


@pytest.fixture
def api(server: InThread) -> Iterator[Coordinator]:
    with Coordinator(server.url, server.operator["Authorization"].split()[1]) as coordinator:
        yield coordinator


def answer(raw: Any) -> Answer[FederationView]:
    return Answer(FederationView, "http://coordinator/", {}, json.dumps(raw).encode())


def test_keys_of_a_later_version_are_passed_over_and_kept_for_programs(api: Coordinator) -> None:
    raw = api.send(operations.get_federation("eyes")).json
    raw["spec"]["aggregation"]["later"] = 1
    raw["later"] = 2
    later = answer(raw)
    assert (later.view.name, later.view.spec.rounds) == ("eyes", raw["spec"]["rounds"])
    assert later.json["later"] == 2


def test_what_is_no_answer_of_this_version_is_said_in_one_line(api: Coordinator) -> None:
    raw = api.send(operations.get_federation("eyes")).json
    with pytest.raises(PromptfedError, match=r"understand .* \(spec.aggregation.rule: .*use the coordinator's version"):
        _ = answer(raw | {"spec": raw["spec"] | {"aggregation": {"rule": "newest"}}}).view
    with pytest.raises(PromptfedError, match="answers no JSON: is that a coordinator's address"):
        _ = Answer(FederationView, "http://elsewhere/", {}, b"<html>").view


def test_what_is_created_is_what_was_written(api: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator fills in what was left open by its own defaults, which may be others than this command's."""
    bodies: list[Any] = []
    send = Coordinator.send

    def listening(self: Coordinator, request: Any) -> Any:
        if request.verb == "POST" and request.path == operations.FEDERATIONS:
            bodies.append(request.options["json"])
        return send(self, request)

    monkeypatch.setattr(Coordinator, "send", listening)
    written = {"method": {"name": "fedpgp", "m": 4}, "rounds": 3, "class_names": ["sun", "anchor"]}
    (tmp_path / "spec.json").write_text(json.dumps({"name": "by-command", **written}))
    (tmp_path / "token").write_text(api._http.headers["Authorization"].split()[1])
    options = ["--coordinator", api.url, "--token-file", str(tmp_path / "token")]
    done = CliRunner().invoke(app, ["federation", "create", str(tmp_path / "spec.json"), *options])
    assert done.exit_code == Exit.OK, done.output
    with promptfed.connect(api.url, token_file=tmp_path / "token") as coordinator:
        coordinator.create(name="by-library", **written)
    for body, name in zip(bodies, ("by-command", "by-library"), strict=True):
        backbone = body.pop("backbone")
        assert backbone["fingerprint"].startswith("sha256:")
        assert body == {"name": name, **written}


def test_pages_are_read_to_the_end(server: InThread, api: Coordinator) -> None:
    for name in "abc":
        server.create(name=name)

    pages = api.run(operations._pages(operations.FEDERATIONS, FederationPage, limit=2))
    names = [view.name for page in pages for view in page.view.federations]
    assert (names[0], names[-3:]) == ("eyes", ["a", "b", "c"])
    assert len(pages) == -(-len(names) // 2)


def now_and_then(trouble: Trouble, every: int = 2) -> Callable[[ProxiedRequest], Trouble]:
    return lambda asked: trouble if asked.number % every == 0 else "none"


def token_of(server: InThread) -> str:
    return server.operator["Authorization"].split()[1]


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk_client, "RETRY_SECONDS", 0.02)


@pytest.mark.parametrize("trouble", DAMAGES)
def test_what_was_damaged_on_the_way_is_asked_for_again(server: InThread, trouble: Trouble) -> None:
    spec = {"name": trouble, "method": {"name": "promptfl"}, "rounds": 3}
    with Proxy(server.url, now_and_then(trouble)) as proxy, Coordinator(proxy.url, token_of(server)) as damaged:
        for _ in range(3):
            assert damaged.send(operations.get_federation("eyes")).view.name == "eyes"
            assert damaged.send(operations.get_metrics("eyes")).body.startswith(b"round,")
            if trouble == "flipped-request":  # with a damaged answer it would not be sent again
                assert damaged.send(operations.dry_run(spec)).view.spec.rounds == 3
        assert proxy.seen[trouble] > 5


@pytest.mark.parametrize("trouble", DAMAGES[1:])
def test_what_was_done_with_a_damaged_answer_is_not_done_again(
    server: InThread, api: Coordinator, trouble: Trouble
) -> None:
    with Proxy(server.url, lambda asked: trouble) as proxy, Coordinator(proxy.url, token_of(server)) as damaged:
        with pytest.raises(PromptfedError, match=r"look before you repeat it; something on the way") as error:
            damaged.send(operations.mint_token("eyes", name=f"{trouble}-1"))
        assert exit_code(error.value) == Exit.UNREACHABLE
        made = [token.name for page in api.run(operations.list_tokens("eyes")) for token in page.view.tokens]
        assert made.count(f"{trouble}-1") == 1


@pytest.mark.parametrize("trouble", DAMAGES)
def test_damage_that_lasts_is_said(server: InThread, trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk_client, "TAKEOVER_SECONDS", 0.2)
    request = operations.dry_run({}) if trouble == "flipped-request" else operations.get_federation("eyes")

    async def asynchronous(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
            await AsyncCoordinator(http, token_of(server)).send(request)

    with Proxy(server.url, lambda asked: trouble) as proxy, Coordinator(proxy.url, token_of(server)) as damaged:
        for use in (lambda: damaged.send(request), lambda: asyncio.run(asynchronous(proxy.url))):
            before = proxy.seen[trouble]
            with pytest.raises(PromptfedError, match=r"something on the way, such as a proxy .* changes what") as error:
                use()
            assert exit_code(error.value) == Exit.UNREACHABLE
            assert proxy.seen[trouble] - before > 1


def test_the_asynchronous_client_asks_again_too(server: InThread) -> None:
    async def asynchronous(url: str) -> FederationView:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
            return (await AsyncCoordinator(http, token_of(server)).send(operations.get_federation("eyes"))).view

    for trouble in DAMAGES:
        with Proxy(server.url, now_and_then(trouble)) as proxy:
            assert asyncio.run(asynchronous(proxy.url)).name == "eyes"


@pytest.mark.parametrize("first", [True, False])
def test_a_proxy_s_page_passes_once_the_coordinator_has_answered(server: InThread, first: bool) -> None:
    """At first contact it may as well be the wrong address: that is said at once."""
    pages = (0,) if first else (1, 2)
    with (
        Proxy(server.url, lambda asked: "too-large" if asked.number in pages else "none") as proxy,
        Coordinator(proxy.url, token_of(server)) as between,
    ):
        if first:
            with pytest.raises(PromptfedError, match="is that a coordinator's address"):
                between.send(operations.get_federation("eyes"))
        for _ in range(2):
            assert between.send(operations.get_federation("eyes")).view.name == "eyes"


def test_a_proxy_that_wants_a_login_is_told() -> None:
    """A proxy before an `http://` coordinator answers in its place."""
    refusing = httpx.MockTransport(lambda request: httpx.Response(407))

    async def asynchronous() -> None:
        async with httpx.AsyncClient(base_url="http://c.test", transport=refusing) as http:
            await AsyncCoordinator(http, "token").send(operations.get_federation("eyes"))

    with pytest.raises(PromptfedError, match=r"the proxy wants a login before it connects to http://c\.test:") as told:
        asyncio.run(asynchronous())
    assert exit_code(told.value) == Exit.UNREACHABLE


def test_both_transports_refuse_alike(server: InThread, api: Coordinator, tmp_path: Path) -> None:
    async def asynchronous() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http:
            token = server.operator["Authorization"].split()[1]
            await AsyncCoordinator(http, token).run(operations.take("nothing"))

    texts = []
    for call in (lambda: api.run(operations.take("nothing")), lambda: asyncio.run(asynchronous())):
        with pytest.raises(PromptfedError) as refusal:
            call()
        assert exit_code(refusal.value) == Exit.REFUSED
        texts.append(str(refusal.value))
    assert texts[0] == texts[1]
    with (
        Coordinator(server.url, "0" * 64) as stranger,
        pytest.raises(PromptfedError, match="operator token") as refusal,
    ):
        stranger.send(operations.get_federation("eyes"))
    assert exit_code(refusal.value) == Exit.NOT_ALLOWED


def test_the_operator_s_token_goes_to_other_machines_encrypted_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(PLAIN_VARIABLE, "")
    monkeypatch.setenv(CA_VARIABLE, "")
    for url in (
        "http://coordinator.example.org",
        "http://10.0.0.7:8080",
        "http://127.0.0.1.example.org",
        f"{A},http://b.example",
        f"http://b.example,{A}",
    ):
        with pytest.raises(PromptfedError, match="would carry the operator token unencrypted"):
            Coordinator(url, "token")
        found = CliRunner().invoke(
            app, ["federation", "list", "--coordinator", url], env={"PROMPTFED_OPERATOR_TOKEN": "t"}
        )
        assert found.exit_code == Exit.BAD_INPUT
    for url in ("https://coordinator.example.org", "http://localhost:1", "http://[::1]:1", "http://127.0.0.1:1"):
        Coordinator(url, "token").close()
    monkeypatch.setenv(PLAIN_VARIABLE, "1")
    Coordinator("http://coordinator.example.org", "token").close()
    monkeypatch.setenv(CA_VARIABLE, str(tmp_path / "none.pem"))
    with pytest.raises(PromptfedError, match=r"--ca-file .* cannot be used"):
        Coordinator("https://coordinator.example.org", "token")


def test_the_options_of_the_connection_stand_before_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PLAIN_VARIABLE, "")
    monkeypatch.setenv(CA_VARIABLE, "")
    environment = {"PROMPTFED_OPERATOR_TOKEN": "t"}
    line = ["--ca-file", str(tmp_path / "none.pem"), "federation", "list", "--coordinator", "https://127.0.0.1:9"]
    found = CliRunner().invoke(app, line, env=environment)
    assert found.exit_code == Exit.BAD_INPUT
    asked: list[object] = []

    def not_found(host: object, *_: object, **__: object) -> None:  # in no time, and whoever answers for names here
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", not_found)
    line = ["--allow-plain-http", "federation", "list", "--coordinator", "http://coordinator.invalid:9"]
    assert CliRunner().invoke(app, line, env=environment).exit_code == Exit.UNREACHABLE
    assert set(asked) == {"coordinator.invalid"}


# The operator's client of several coordinators: it goes on when one of them is gone.


A, B = "https://a.example", "https://b.example"


READ, ACT = Request("GET", "/v1/federations/f", Health), Request("POST", "/v1/federations/f/start", Health)


Handler = Callable[[httpx.Request], httpx.Response]


def silent(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("nothing comes", request=request)


def fine(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"status": "ok"})


def moving(request: httpx.Request) -> httpx.Response:
    kind = "https://promptfed.invalid/problems/waiting"
    return httpx.Response(503, json={"type": kind, "detail": "wait"})


class Group:
    """Coordinators by host, and which of them was asked for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **handlers: Handler):
        self.handlers = handlers
        self.asked: list[tuple[str, str]] = []
        monkeypatch.setattr(sdk_client, "RETRY_SECONDS", 0.0)
        monkeypatch.setattr(sdk_client, "TAKEOVER_SECONDS", 0.3)

    def answer(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host.partition(".")[0]
        self.asked.append((host, request.url.path.rpartition("/")[2]))
        return self.handlers[host](request)

    def api(self, given: str) -> Coordinator:
        api = Coordinator(given, "token")
        api._http = httpx.Client(transport=httpx.MockTransport(self.answer))
        return api


def test_what_only_reads_is_asked_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, a=silent, b=fine)
    api = group.api(f"{A}, {B}/")
    assert api.send(READ).view.status == "ok"
    assert group.asked == [("a", "f"), ("b", "f")]
    api.send(READ)
    assert group.asked[-1] == ("b", "f")


def test_what_changes_something_is_sent_to_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, a=silent, b=fine)
    assert group.api(f"{A},{B}").send(ACT).view.status == "ok"
    assert group.asked == [("a", "readyz"), ("b", "readyz"), ("b", "start")]


def test_who_needs_long_but_is_there_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk_client, "QUIET_SECONDS", 0.05)
    looked_at = threading.Semaphore(0)

    def slow(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            looked_at.release()
            return httpx.Response(200)
        assert all(looked_at.acquire(timeout=PATIENCE) for _ in range(3))
        return fine(request)

    group = Group(monkeypatch, a=slow, b=fine)
    assert group.api(f"{A},{B}").send(READ).view.status == "ok"
    assert "b" not in dict(group.asked)


def test_a_change_is_given_up_soon_where_its_coordinator_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk_client, "QUIET_SECONDS", 0.05)
    hangs, healthy = threading.Event(), iter([True, True])

    def hanging(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            return httpx.Response(200) if next(healthy, False) else silent(request)
        assert hangs.wait(PATIENCE)
        return fine(request)

    group = Group(monkeypatch, a=hanging, b=fine)
    begun = time.monotonic()
    with pytest.raises(PromptfedError, match=f"{A} took the request and gives no answer") as refusal:
        group.api(f"{A},{B}").send(ACT)
    assert time.monotonic() - begun < PATIENCE / 2
    assert exit_code(refusal.value) is Exit.UNREACHABLE
    assert group.asked.count(("a", "start")) == 1, "it is not sent twice"
    assert ("b", "start") not in group.asked
    hangs.set()


def test_a_change_that_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk_client, "QUIET_SECONDS", 0.05)
    asked = threading.Semaphore(0)

    def slow(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            asked.release()
            return httpx.Response(200)
        assert all(asked.acquire(timeout=PATIENCE) for _ in range(4))
        return fine(request)

    assert Group(monkeypatch, a=slow, b=fine).api(f"{A},{B}").send(ACT).view.status == "ok"


def test_a_takeover_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    def takes_over(request: httpx.Request) -> httpx.Response:
        nonlocal turns
        turns += 1
        return moving(request) if turns < 3 else fine(request)

    group = Group(monkeypatch, a=silent, b=takes_over)
    assert group.api(f"{A},{B}").send(READ).view.status == "ok"
    assert group.asked.count(("a", "f")) == 1, "who was silent just now comes last"


def test_if_nobody_answers_all_addresses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, a=silent, b=silent)
    with pytest.raises(PromptfedError, match=f"cannot reach the coordinator at {A},{B}") as refusal:
        group.api(f"{A},{B}").send(READ)
    assert exit_code(refusal.value) is Exit.UNREACHABLE


def test_one_coordinator_alone_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    away = {"type": "https://promptfed.invalid/problems/store-away", "detail": "away"}
    group = Group(monkeypatch, a=lambda request: httpx.Response(503, json=away))
    with pytest.raises(PromptfedError, match="away"):
        group.api(A).send(READ)
    assert group.asked == [("a", "f")]


def test_behind_one_address_one_that_works_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([moving, moving])
    group = Group(monkeypatch, a=lambda request: next(answers, fine)(request))
    assert group.api(A).send(ACT).view.status == "ok"
    assert group.asked == [("a", "start")] * 3


# Experiment trackers, read back: TensorBoard's event file and MLflow's database hold what the reports say.


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


RESULT = FederationReports(FEDERATION.model_dump(mode="json"), [report(0), report(1), report(2)])


def test_a_reports_numbers_have_names_of_their_own() -> None:
    found = metrics_of(RoundReport.model_validate(report(1)))
    assert found["loss/train"] == 0.5
    assert found["spread/train"] == 0.25
    assert found["accuracy/trainer/test@adapted"] == pytest.approx(0.6)
    assert found["zero_shot/trainer/test"] == 0.25
    assert found["accuracy/client a/test"] == 0.75


def test_a_round_in_words() -> None:
    means = {"trainer": {"accuracy": 0.5, "zero_shot": 0.25}, "evaluator": {"accuracy": 0.4}}
    told = report(1)
    told["evaluation"]["mean"] = means
    wanted = "round 1: loss 0.5, accuracy 50.0 % (zero-shot 25.0 %), unseen 40.0 %, 1.5 s"
    assert describe_round(RoundReport.model_validate(told)) == wanted
    empty = report(0) | {"evaluation": None, "seconds": None}
    assert describe_round(RoundReport.model_validate(empty)) == "round 0: over"


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


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module, where in (("torch.utils.tensorboard", f"tensorboard:{tmp_path}"), ("mlflow", "mlflow:sqlite://")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(PromptfedError, match=r"install promptfed\[\w+\]: pip install"):
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
