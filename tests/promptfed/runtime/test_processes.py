"""Managed processes: started again at most three times, left alone when done, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from promptfed.client_service.settings import ledger_path
from promptfed.runtime.processes import (
    CLIENT,
    MAX_RESTARTS,
    Forked,
    LocalFederation,
    Processes,
    ProcessFailed,
    Site,
    client_options,
    interrupt_on_sigterm,
)
from promptfed.runtime.run_file import RunFile, read_run
from promptfed.shared.errors import PromptfedError
from tests.support.waiting import PATIENCE, wait_for

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_process_is_started_again_three_times(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        managed = processes.start("client", ["-c", SLEEP])
        for count in range(1, MAX_RESTARTS + 1):
            assert processes.watch() == []
            managed.process.kill()
            managed.process.wait()
            assert processes.watch() == ["client"]
            assert managed.restarts == count
        managed.process.kill()
        managed.process.wait()
        with pytest.raises(ProcessFailed, match="client ended with -9 for the 4th time"):
            processes.watch()


def test_the_reason_stands_in_the_error(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        managed = processes.start("client", ["-c", "raise SystemExit('no such folder')"])
        with pytest.raises(ProcessFailed, match="no such folder"):
            for _ in range(MAX_RESTARTS + 1):
                managed.process.wait()
                processes.watch()


def test_a_process_that_has_done_its_work_is_left_alone(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        managed = processes.start("client", ["-c", "pass"])
        managed.process.wait()
        assert processes.watch() == []
        assert managed.restarts == 0


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    with (
        pytest.raises(KeyboardInterrupt),
        Processes(tmp_path, stop_seconds=PATIENCE) as patient,
        Processes(tmp_path, stop_seconds=0.1) as impatient,
    ):
        started = [patient.start("polite", ["-c", SLEEP]), impatient.start("stubborn", ["-c", stubborn])]
        wait_for("start", lambda: all("up" in managed.log.read_text() for managed in started))
        raise KeyboardInterrupt
    assert not any(alive(managed.process.pid) for managed in started)
    assert started[0].process.returncode == -signal.SIGTERM
    assert started[1].process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("again", [False, True])
def test_an_interrupt_in_a_start_leaves_nothing_behind(
    sent: int, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        """Between the start of a process and the note of it, we are told to end."""

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            started.append(self)
            signal.raise_signal(sent)

    before = signal.getsignal(signal.SIGTERM)
    interrupt_on_sigterm()
    try:
        with pytest.raises(KeyboardInterrupt), Processes(tmp_path) as processes:
            if again:
                processes.start("client", ["-c", "raise SystemExit(1)"]).process.wait()
            monkeypatch.setattr(subprocess, "Popen", Interrupted)
            processes.watch()
            processes.start("other", ["-c", SLEEP])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [process.returncode is None for process in started] == [False]


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="clients are forked on Linux")
def test_a_forked_client_is_a_process_of_its_own(tmp_path: Path) -> None:
    lasting = ["--coordinator=http://127.0.0.1:9", "--federation=f", "--name=ward-4", "--data=digits", "--yes"]
    lasting += [f"--state-dir={tmp_path / 'state'}", f"--enrolment-token-file={tmp_path / 'token'}"]
    (tmp_path / "token").write_text("token")
    with Processes(tmp_path, {"PROMPTFED_CLIENT_LOG_FORMAT": "json"}) as processes:
        processes.fork_clients()
        done, refused = (processes.start(name, [*CLIENT, name]) for name in ("--help", "--what"))
        managed = processes.start("client-ward-4", [*CLIENT, *lasting])
        assert isinstance(managed.process, Forked)
        assert (done.process.wait(PATIENCE), refused.process.wait(PATIENCE)) == (0, 2)
        assert "usage: client_service" in done.log.read_text()
        with pytest.raises(subprocess.TimeoutExpired):
            managed.process.wait(0.1)

        def speaks() -> bool:
            return '"message"' in managed.tail(5)  # the format is of its own environment

        wait_for("its first line", speaks)
        assert os.getsid(managed.process.pid) == managed.process.pid
        assert Path(f"/proc/{managed.process.pid}/comm").read_text() == "ward-4\n"
        processes.running = {"client-ward-4": managed}
        managed.process.kill()
        assert managed.process.wait() == -signal.SIGKILL
        managed.log.write_text("")
        assert processes.watch() == ["client-ward-4"]
        wait_for("its first line after a restart", speaks)
        managed.process.send_signal(signal.SIGTERM)
        assert managed.process.wait(PATIENCE) == 0
        managed.start_again()
        # Whose starter is gone is started as elsewhere.
        assert processes.starter is not None
        orphan = managed.process
        processes.starter.close()
        assert processes.watch() == ["client-ward-4"]
        wait_for("its end", lambda: not alive(orphan.pid))
        assert isinstance(managed.process, subprocess.Popen)
    assert not alive(managed.process.pid)


# A federation of processes on this machine: what its clients are told.


class Recording:
    """Processes that are only noted; the coordinator answers by its files at once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.commands: dict[str, list[str]] = {}

    def start(self, name: str, arguments: Sequence[str]) -> Any:
        self.commands[name] = list(arguments)
        if name == "coordinator":
            (self.folder / "coordinator").mkdir()
            (self.folder / "coordinator" / "operator.token").write_text("token\n")
            (self.folder / "coordinator.url").write_text("http://127.0.0.1:1234\n")
        return SimpleNamespace(command=list(arguments))

    def watch(self) -> list[str]:
        return []


def test_clients_of_a_launch_pay_from_a_ledger_of_the_run(tmp_path: Path) -> None:
    processes = Recording(tmp_path)
    federation = LocalFederation(processes, tmp_path)
    for name in ("a", "b"):
        federation.start_client("f-1", Site(name, "symbols:painting"), None)
    ledgers = [
        Path(option.removeprefix("--ledger="))
        for name in ("client-a", "client-b")
        for option in processes.commands[name]
        if option.startswith("--ledger=")
    ]
    assert ledgers == [tmp_path / "ledgers" / "a.jsonl", tmp_path / "ledgers" / "b.jsonl"]
    assert ledger_path("default") not in ledgers


# Run files: what they hold, how many clients they make, and what is wrong with a bad one.


HEAD = "name: run\nmethod: {name: promptfl}\nrounds: 2\n"


def run(tmp_path: Path, text: str, clients: int | None = None) -> RunFile:
    path = tmp_path / "spec.yaml"
    path.write_text(HEAD + text)
    return read_run(path, clients)


LISTED = """
clients:
  - {name: a, data: "symbols:sketch"}
  - {name: b, data: "symbols:neon", tests: {target: "symbols:photo"}}
  - {name: referee, data: "symbols:photo", role: evaluator}
"""


COUNTED = """
clients:
  - {name: "site-{index}", count: 3, data: "digits?partition=iid&clients={count}&client={index}"}
  - {name: referee, data: "digits", role: evaluator, tests: {novel: "digits?classes=novel"}}
"""


def test_listed_clients_keep_their_order(tmp_path: Path) -> None:
    found = run(tmp_path, LISTED)
    backbone = {"model": "promptfed-tiny"}  # of embedded drawings
    assert found.spec == {"name": "run", "method": {"name": "promptfl"}, "rounds": 2, "backbone": backbone}
    assert found.sites == (
        Site("a", "symbols:sketch"),
        Site("b", "symbols:neon", tests={"target": "symbols:photo"}),
        Site("referee", "symbols:photo", "evaluator"),
    )


ROWS = ("fedtaskres", "fedlp", "fedrod")


@pytest.mark.parametrize("method", ROWS)
def test_class_names_are_those_of_the_data_where_the_method_needs_them(tmp_path: Path, method: str) -> None:
    def names(data: list[str], head: str = "") -> list[str] | None:
        path = tmp_path / "spec.yaml"
        clients = [{"name": f"c{number}", "data": uri} for number, uri in enumerate(data)]
        path.write_text(f"method: {{name: {method}}}\n{head}\n" + yaml.dump({"clients": clients}))
        return read_run(path).spec.get("class_names")

    two = "symbols:{}?only=sun,moon"
    assert sorted(names([two.format("neon"), two.format("chalk")]) or []) == ["moon", "sun"]
    assert names([two.format("neon"), "symbols:chalk?only=sun,cloud"]) is None
    assert names([two.format("neon")], "class_names: [sun, star]") == ["sun", "star"]
    assert names([two.format("neon"), "folder:/nowhere/here"]) is None  # said when the data are opened


def test_other_methods_take_each_client_s_own_names(tmp_path: Path) -> None:
    assert "class_names" not in run(tmp_path, LISTED).spec


def test_a_counted_entry_numbers_its_clients(tmp_path: Path) -> None:
    names = [site.name for site in run(tmp_path, COUNTED).sites]
    assert names == ["site-0", "site-1", "site-2", "referee"]
    five = run(tmp_path, COUNTED, clients=5).sites
    assert [site.name for site in five] == [*(f"site-{k}" for k in range(5)), "referee"]
    assert five[4].data == "digits?partition=iid&clients=5&client=4"


def test_fewer_listed_trainers_leave_the_evaluators(tmp_path: Path) -> None:
    assert [site.name for site in run(tmp_path, LISTED, clients=1).sites] == ["a", "referee"]


def test_the_file_names_the_federation_where_the_spec_does_not(tmp_path: Path) -> None:
    path = tmp_path / "eyes.yaml"
    path.write_text("method: {name: promptfl}\nclients: {count: 2, data: digits}\n")
    found = read_run(path)
    assert found.spec["name"] == "eyes"
    assert [site.name for site in found.sites] == ["client-0", "client-1"]


@pytest.mark.parametrize(("text", "clients", "complaint"), [
    ("", None, "has no `clients`"),
    ("clients: []", None, "`clients` is empty"),
    ("clients: [{name: a}]", None, r"clients\.0\.data: is missing"),
    ("clients: [{data: digits, colour: red}]", None, r"clients\.0\.colour: unknown key"),
    ("clients: {data: digits, count: 0}", None, r"clients\.count: must be greater"),
    ("clients: [{data: digits, role: boss}]", None, r"clients\.0\.role"),
    ("clients: {data: digits, name: a, count: 2}", None, "two clients are named a"),
    ("clients: [{data: digits, name: a b}]", None, "'a b' is no client name"),
    ("clients: [{data: digits, role: evaluator}]", None, "no client is a trainer"),
    ("clients: [{data: digits, tests: {'a@b': digits}}]", None, r"clients\.0\.tests"),
    (LISTED, 3, "lists 2 trainers, not 3"),
])  # fmt: skip
def test_a_bad_run_file_is_refused_in_one_line(tmp_path: Path, text: str, clients: int | None, complaint: str) -> None:
    with pytest.raises(PromptfedError, match=complaint) as refused:
        run(tmp_path, text, clients)
    assert "\n" not in str(refused.value)


def test_clients_have_words_for_their_domains_which_reach_their_command_line(tmp_path: Path) -> None:
    listed = """
clients:
  - {name: "site-{index}", count: 2, data: "digits", domain: "pen number {index} of a {}"}
  - {name: referee, data: "digits", role: evaluator}
"""
    sites = run(tmp_path, listed).sites
    assert [site.domain for site in sites] == ["pen number 0 of a {}", "pen number 1 of a {}", None]
    assert "--domain=pen number 1 of a {}" in client_options(sites[1], ())
    assert not [option for option in client_options(sites[2], ()) if option.startswith("--domain")]
