"""The state folder: identity, the all-or-nothing of an update, and what a kill at any instant leaves."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.client_service.__main__ import start
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.bodies import Body, SentLog
from promptfed.client_service.joining.checks import Check
from promptfed.client_service.joining.disclosure import Disclosure
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.settings import Settings
from promptfed.client_service.state import private_state, site_log, trained_images
from promptfed.client_service.state.private_state import (
    Pending,
    PrivateState,
    Serving,
    TensorOrigin,
    keep_round,
    select_round,
)
from promptfed.client_service.state.site_log import FILE, HEAD, ChangedLog, SiteLog, chained, read, verify
from promptfed.shared.messages import TaskConfig
from promptfed.shared.plain_text import plain
from promptfed.shared.privacy.accounting import Accountant, Event
from promptfed.shared.service.fault_points import VARIABLE
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors.torch_tensors import decode
from tests.client_service.conftest import Killed, Make
from tests.support.durable import synced_by
from tests.support.fake_coordinator import Wire

ROUND_1 = TensorOrigin("task-1", 1, "train", "peers")


ROUND_2 = TensorOrigin("task-2", 2, "train", "peers")


def vector(value: float) -> dict[str, torch.Tensor]:
    return {"v": torch.full((3,), value)}


def kill_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Let the ``step``-th durable file operation from now on not happen, nor any after it."""
    done = 0

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done >= step:
                raise Killed
            return real(*arguments, **options)

        return operation

    for name in ("open", "rename", "replace", "unlink", "rmdir", "mkdir"):
        patch.setattr(os, name, guarded(getattr(os, name)))


def killed_in(state: PrivateState, change: Callable[[PrivateState], None], step: int) -> bool:
    """Whether ``change`` completed before its ``step``-th durable file operation killed it; the state is closed."""
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, step)
        try:
            change(state)
            completed = True
        except Killed:
            completed = False
    state.close()
    return completed


def survives(folder: Path, change: Callable[[PrivateState], None], look: Callable[[PrivateState], Any]) -> list[Any]:
    """What ``look`` finds after ``change`` was killed at its first, second, ... file operation, until it completes."""
    seen = []
    for step in range(1, 200):
        where = folder / str(step)
        state = PrivateState(where)
        state.write_pending(b"first", vector(1.0), ROUND_1)
        state.commit()
        state.write_pending(b"second", vector(2.0), ROUND_2)
        completed = killed_in(state, change, step)
        again = PrivateState(where)
        seen.append(look(again))
        again.close()
        if completed:
            return seen
    raise AssertionError("the change never completed")


def committed_and_pending(state: PrivateState) -> tuple[float, str | None, bytes | None]:
    tensors, provenance = state.committed()
    pending = state.pending()
    return float(tensors["v"][0]), provenance.task_id, pending.update.read() if pending else None


def test_a_kill_while_committing_leaves_the_state_before_or_after(tmp_path: Path) -> None:
    before, after = (1.0, "task-1", b"second"), (2.0, "task-2", None)
    seen = survives(tmp_path, lambda state: state.commit(), committed_and_pending)
    assert set(seen) == {before, after}
    assert seen == sorted(seen, key=lambda found: found == after)
    assert len(seen) > 3


def test_a_kill_while_discarding_leaves_the_update_whole_or_gone(tmp_path: Path) -> None:
    seen = survives(tmp_path, lambda state: state.discard(), committed_and_pending)
    assert set(seen) == {(1.0, "task-1", b"second"), (1.0, "task-1", None)}


def test_a_kill_while_writing_an_update_leaves_it_whole_or_absent(tmp_path: Path) -> None:
    def change(state: PrivateState) -> None:
        state.write_pending(b"third", vector(3.0), TensorOrigin("task-3", 3, "train", "peers"))

    seen = []
    for step in range(1, 200):
        where = tmp_path / str(step)
        state = PrivateState(where)
        completed = killed_in(state, change, step)
        again = PrivateState(where)
        pending = again.pending()
        seen.append(pending.update.read() if pending else None)
        if pending:
            again.commit()
            assert again.committed()[0]["v"].tolist() == [3.0] * 3
        again.close()
        if completed:
            break
    assert set(seen) == {None, b"third"}


CONFIG = TaskConfig.model_validate({
    "method": {"name": "promptfl"}, "training": {}, "backbone": {}, "class_names": None, "template": "{}",
    "rounds": 2, "seed": 0, "peers": [],
})  # fmt: skip


def test_a_kill_while_keeping_a_payload_leaves_one_that_can_be_served(tmp_path: Path) -> None:
    def change(state: PrivateState) -> None:
        state.save_serving(Serving(2, "train", CONFIG, b"new payload"))

    state = PrivateState(tmp_path / "x")
    state.save_serving(Serving(1, "train", CONFIG, b"old payload"))
    state.close()
    found = set()
    for step in range(1, 30):
        completed = killed_in(PrivateState(tmp_path / "x"), change, step)
        state = PrivateState(tmp_path / "x")
        serving = state.serving()
        assert serving is not None
        found.add((serving.round, serving.payload))
        state.close()
        if completed:
            break
    assert found == {(1, b"old payload"), (2, b"new payload")}
    assert len(list((tmp_path / "x").glob("serving-*.safetensors"))) == 1


def test_the_identity_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    state = PrivateState(tmp_path / "s")
    first = state.identity("a", "trainer")
    assert len(bytes.fromhex(first.secret)) == 32
    first = state.bind(first, "fed-1", "client-1")
    assert state.identity("a", "trainer") == first
    assert stat.S_IMODE((tmp_path / "s" / "identity.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700


@pytest.mark.parametrize(("name", "role"), [("b", "trainer"), ("a", "evaluator")])
def test_a_folder_of_another_client_is_refused(tmp_path: Path, name: str, role: Any) -> None:
    state = PrivateState(tmp_path)
    state.identity("a", "trainer")
    with pytest.raises(ClientError, match="belongs to the trainer 'a'") as refusal:
        state.identity(name, role)
    assert refusal.value.exit is Exit.STATE


@pytest.mark.parametrize("name", ["identity.json", "committed.safetensors", "serving.json", "enrolment.json"])
@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}'])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    state = PrivateState(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ClientError, match=f"{name} is damaged"):
        state.identity("a", "trainer"), state.committed(), state.serving(), state.enrolment()


def test_a_folder_of_another_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    state.identity("a", "trainer", secret="5" * 64)
    known = json.loads((tmp_path / "identity.json").read_bytes())
    older = {key: value for key, value in known.items() if key != "form"}  # as 0.3.0 wrote it
    for told, remedy in ((older, "go on with commit 7368013d"), (known | {"form": 2}, "go on with that version")):
        (tmp_path / "identity.json").write_text(json.dumps(told))
        with pytest.raises(ClientError, match=remedy) as refusal:
            state.identity("a", "trainer")
        assert refusal.value.exit is Exit.STATE
        assert json.loads((tmp_path / "identity.json").read_bytes()) == told


def test_a_damaged_update_is_never_sent(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    state.write_pending(b"update", vector(1.0), ROUND_1)
    (tmp_path / "pending" / "update.safetensors").write_bytes(b"updatE")
    with pytest.raises(ClientError, match="pending is damaged"):
        state.pending()


def told(pending: Pending | None) -> tuple[str, int, str, bytes]:
    """All that an update to be sent is."""
    assert pending is not None
    return pending.task_id, pending.round, pending.phase, pending.update.read()


def test_the_accepted_update_is_kept_until_the_next_one(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    assert state.answered() is None
    for number, update in enumerate((b"first", b"second"), 1):
        state.write_pending(update, vector(1.0), TensorOrigin(f"task-{number}", number, "train"))
        state.commit()
        assert told(state.answered()) == (f"task-{number}", number, "train", update)
    state.write_pending(b"third", vector(1.0), ROUND_1)
    before = set(tmp_path.iterdir()) - {tmp_path / "pending"}
    state.discard()
    assert set(tmp_path.iterdir()) == before, "nothing of it is left"
    assert told(state.answered()) == ("task-2", 2, "train", b"second"), "a refused one takes nobody's place"
    (tmp_path / "answered" / "update.safetensors").write_bytes(b"other")
    assert state.answered() is None, "what is damaged is not sent"
    state.delete_private()
    assert not (tmp_path / "answered").exists()


def test_private_tensors_and_the_update_made_with_them_are_forgotten_together(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    state.reset_private()
    state.commit_prepared({"a": torch.ones(2)}, TensorOrigin(peers="p"))
    state.write_pending(b"update", {"a": torch.zeros(2)}, TensorOrigin("task-1", 1, "train"))
    state.reset_private()
    assert state.committed() == ({}, TensorOrigin())
    assert state.pending() is None


def test_private_tensors_may_share_memory(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    state = PrivateState(tmp_path)
    state.commit_prepared({"a": whole[:3], "b": whole[3:], "all": whole}, TensorOrigin(peers="p"))
    tensors, provenance = state.committed()
    assert tensors["b"].tolist() == [3.0, 4.0, 5.0]
    assert provenance == TensorOrigin(peers="p")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClientError, match=r"state folder .*file/state cannot be used"):
        PrivateState(tmp_path / "file" / "state")


def test_a_folder_that_was_there_before_is_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    PrivateState(folder).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_each_file_is_synced_before_rename_and_folder_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s"
    state = PrivateState(folder)
    state._disk._sync = lambda handle: os.fsync(handle)  # looked up anew, so that it is seen
    assert synced_by(monkeypatch, folder, lambda: state.write_note("note", "text")) == [
        ("sync", "s/note.tmp"), ("rename", "s/note"), ("sync", "s"),
    ]  # fmt: skip
    files = ("update.safetensors", "private.safetensors", "about.json")
    assert synced_by(monkeypatch, folder, lambda: state.write_pending(b"update", vector(1.0), ROUND_1)) == [
        *(("sync", f"s/pending.tmp/{file}") for file in files),
        ("sync", "s/pending.tmp"), ("rename", "s/pending"), ("sync", "s"),
    ]  # fmt: skip
    assert synced_by(monkeypatch, folder, state.commit) == [
        ("rename", "s/committed.safetensors"), ("sync", "s"), ("rename", "s/answered"), ("sync", "s"),
    ]  # fmt: skip
    state.close()


def test_a_client_s_folder_is_synced_by_the_system_s_own_call(tmp_path: Path) -> None:
    state, passing = PrivateState(tmp_path / "s"), PrivateState(tmp_path / "t", ephemeral=True)
    assert state._disk._sync is os.fsync
    assert passing._disk._sync is not os.fsync
    state.close()


# The site's own log: what a client's life leaves in it, and that no line can be changed, cut, moved or forged.


MUTATIONS = 200


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A folder with a log of twelve lines."""
    site = SiteLog(tmp_path)
    for number in range(12):
        site.note("asked" if number % 2 else "sent", {"round": number, "bytes": number * 1000, "left": None})
    return tmp_path


def mutated(content: bytes, draws: random.Random) -> tuple[str, bytes]:
    """One change of a log: its kind and what comes of it."""
    lines = content.splitlines(keepends=True)
    kind = draws.choice(["byte", "bit", "cut", "tail", "line", "swap", "twice", "forged", "appended", "garbage"])
    at, other = sorted(draws.sample(range(len(lines)), 2))
    match kind:
        case "byte" | "bit":
            place = draws.randrange(len(content))
            value = content[place] ^ (1 << draws.randrange(8)) if kind == "bit" else (content[place] + 1) % 256
            return kind, content[:place] + bytes([value]) + content[place + 1 :]
        case "cut":
            return kind, content[: draws.randrange(len(content))]
        case "tail":
            return kind, b"".join(lines[:at])
        case "line":
            return kind, b"".join(lines[:at] + lines[at + 1 :])
        case "swap":
            lines[at], lines[other] = lines[other], lines[at]
            return kind, b"".join(lines)
        case "twice":
            return kind, b"".join([*lines[: at + 1], *lines[at:]])
        case "forged":  # a line is changed, and it and all that follow are chained anew
            return kind, rechained([json.loads(line) for line in lines], at)
        case "appended":
            found = [json.loads(line) for line in lines]
            return kind, rechained([*found, dict(found[-1], n=len(found) + 1, bytes=7)], len(found))
        case _:
            return kind, content + b'{"n": 13'


def rechained(lines: list[dict[str, object]], at: int) -> bytes:
    """The lines with ``at`` changed, and a chain that holds."""
    lines[at]["bytes"] = 123456
    chain, text = "", []
    for line in lines:
        facts = {name: value for name, value in line.items() if name != "chain"}
        chain = chained(chain, facts)
        text.append(json.dumps(facts | {"chain": chain}) + "\n")
    return "".join(text).encode()


def test_each_of_two_hundred_changes_is_found(log: Path) -> None:
    content, draws, kinds = (log / FILE).read_bytes(), random.Random(0), set()
    head = verify(log)
    assert head.n == 12
    for _ in range(MUTATIONS):
        kind, changed = mutated(content, draws)
        assert changed != content
        (log / FILE).write_bytes(changed)
        kinds.add(kind)
        with pytest.raises(ChangedLog):
            verify(log)
    assert len(kinds) == 10
    (log / FILE).write_bytes(content)
    assert verify(log) == head


def test_a_line_is_on_the_disk_once_it_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    found = synced_by(monkeypatch, folder, lambda: SiteLog(folder).note("asked", {}))
    assert ("sync", f"state/{FILE}") in found
    assert found.index(("rename", f"state/{HEAD}")) < found.index(("sync", f"state/{FILE}"))


def test_no_log_is_no_log_that_holds(tmp_path: Path) -> None:
    with pytest.raises(ChangedLog, match="no line, or was never written"):
        verify(tmp_path)


def test_a_log_that_was_written_anew_is_found_by_a_head_that_is_kept_elsewhere(log: Path) -> None:
    head = verify(log).chain
    lines = [json.loads(line) for line in (log / FILE).read_text().splitlines()]
    (log / FILE).write_bytes(rechained(lines, 3))
    last = json.loads((log / FILE).read_text().splitlines()[-1])["chain"]
    (log / HEAD).write_text(json.dumps({"n": 12, "chain": last}))
    assert verify(log).chain == last
    with pytest.raises(ChangedLog, match="written anew"):
        verify(log, head)
    (log / HEAD).unlink()
    with pytest.raises(ChangedLog, match="its end was changed"):
        verify(log)
    with pytest.raises(ClientError, match="to begin another log"):
        SiteLog(log).note("asked", {})


@pytest.mark.parametrize("fault", ["site-log-announced:3", "site-log-written:3"])
def test_a_kill_between_line_and_head_leaves_a_log_that_verifies_and_goes_on(tmp_path: Path, fault: str) -> None:
    code = (
        "from pathlib import Path; from promptfed.client_service.state.site_log import SiteLog\n"
        f"log = SiteLog(Path({str(tmp_path)!r}))\nfor number in range(9): log.note('asked', {{'round': number}})"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {VARIABLE: fault}, check=False)
    assert done.returncode == -signal.SIGKILL
    written = 3 if "written" in fault else 2
    assert verify(tmp_path).n == written
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"n": 3, "at"' if written == 2 else b"")
    assert verify(tmp_path).n == written
    SiteLog(tmp_path).note("sent", {})
    SiteLog(tmp_path).note("sent", {})
    assert verify(tmp_path).n == written + 2


def test_a_clients_life_is_in_it(make: Make) -> None:
    coordinator = make.coordinator()
    worker = make.worker(coordinator)
    assert asyncio.run(worker.run()) == Exit.OK
    folder = worker.settings.state_dir
    lines = site_log.read(folder)
    assert verify(folder).n == len(lines)
    kinds = {line["what"] for line in lines}
    assert {"enrolled", "asked", "trained", "sent", "accepted", "evaluated"} <= kinds
    shown = CliRunner().invoke(app, ["site-log", "verify", str(folder), "--head", lines[-1]["chain"]])
    assert shown.exit_code == 0, shown.output
    assert f"head {lines[-1]['chain']}" in shown.output.replace("\n", "")
    assert "accepted" in CliRunner().invoke(app, ["site-log", "show", str(folder)]).output
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-2])
    assert CliRunner().invoke(app, ["site-log", "verify", str(folder)]).exit_code == 6


def test_what_was_shown_and_agreed_to_is_in_it(make: Make) -> None:
    texts: list[str] = []

    async def agree(checks: Sequence[Check], disclosure: Disclosure) -> bool:
        texts.append("\n".join(map(plain, disclosure.lines())))
        return len(texts) > 1

    first = make.worker(make.coordinator(), consent=agree)
    with pytest.raises(ClientError):
        asyncio.run(first.run())
    assert asyncio.run(make.worker(make.coordinator(), consent=agree).run()) == Exit.OK
    lines = [line for line in site_log.read(first.settings.state_dir) if line["what"] != "questions"]
    verify(first.settings.state_dir)
    assert [line["what"] for line in lines[:4]] == ["shown", "declined", "shown", "agreed"]
    assert [line["text"] for line in lines if line["what"] == "shown"] == texts
    assert all(line["sha256"] == site_log.digest(line["text"]) for line in lines if line["what"] == "shown")
    consent = json.loads((first.settings.state_dir / "consent.json").read_text())
    assert lines[3]["method"] == consent["terms"]["method"]
    assert all(line["what"] != "sent" for line in lines[:4])


TRAINING = TrainingSpec(learning_rate=0.1, batch_size=8).model_dump()


def messages(folder: Path) -> list[dict[str, Any]]:
    verify(folder)
    return [line for line in read(folder) if line["what"] == "sent"]


def test_every_request_is_in_it_before_it_leaves(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = make.coordinator(rounds=2, method={"name": "promptfl", "m": 4}, training=TRAINING)
    bodies, shown = list[bytes](), list[str]()

    def look(request: httpx.Request) -> None:
        lines = [json.loads(line) for line in (make.settings.state_dir / FILE).read_text().splitlines()]
        if request.method == "GET":
            assert any(line["what"] == "questions" for line in lines)
        else:
            bodies.append(request.content)
            assert [line["sha256"] for line in lines if line["what"] == "sent"][-1] == hashlib.sha256(
                request.content
            ).hexdigest()

    assert (
        asyncio.run(make.worker(coordinator, http=httpx.AsyncClient(transport=Wire(coordinator.app, look))).run()) == 0
    )
    recorded = messages(make.settings.state_dir)
    assert [line["sha256"] for line in recorded] == [hashlib.sha256(body).hexdigest() for body in bodies]
    assert [line["bytes"] for line in recorded] == list(map(len, bodies))
    assert recorded[0]["message"] == "enrolment"
    assert set(recorded[0]["fields"]) == {name for name, value in json.loads(bodies[0]).items() if value is not None}
    updates = [(line, body) for line, body in zip(recorded, bodies, strict=True) if line["message"] == "update"]
    assert [line["round"] for line, _ in updates] == [1, 2]
    for line, body in updates:
        shapes = {name: f"F32 {list(tensor.shape)}" for name, tensor in decode(body)[0].items()}
        assert line["tensors"] == shapes
        shown.extend(f"tensor {name}: {shape}" for name, shape in shapes.items())
        assert {"task_id", "metrics", "payload_sha256"} <= set(line["fields"])
    secret = json.loads((make.settings.state_dir / "identity.json").read_text())["secret"]
    assert secret not in (make.settings.state_dir / FILE).read_text()

    assert start(make.settings.model_copy(update={"sent": True})) == Exit.OK
    told = capsys.readouterr().out
    assert f"{len(bodies)} messages of {sum(map(len, bodies)):,} bytes" in told
    assert all(hashlib.sha256(body).hexdigest() in told for body in bodies)
    assert shown
    assert all(text in told for text in shown)


@pytest.mark.parametrize("arrives", [False, True])
def test_a_kill_between_record_and_message_loses_no_record(make: Make, settings: Settings, arrives: bool) -> None:
    coordinator = make.coordinator(rounds=1, method={"name": "promptfl", "m": 4}, training=TRAINING)

    def kill(request: httpx.Request) -> None:
        if request.url.path.endswith("/update"):
            raise Killed

    wire = Wire(coordinator.app, **{"after" if arrives else "before": kill})
    with pytest.raises(Killed):
        asyncio.run(make.worker(coordinator, http=httpx.AsyncClient(transport=wire)).run())
    assert [line["message"] for line in messages(settings.state_dir)].count("update") == 1
    assert asyncio.run(make.worker(coordinator).run()) == 0
    both = [line["sha256"] for line in messages(settings.state_dir) if line["message"] == "update"]
    assert len(both) == 2
    assert both[0] == both[1]


def test_without_room_for_the_record_nothing_leaves(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = make.coordinator(rounds=1)

    def full(self: SiteLog) -> Any:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(SiteLog, "_found", full)
    with pytest.raises(ClientError, match=r"nothing is done unrecorded.*free some space") as caught:
        asyncio.run(make.worker(coordinator).run())
    assert caught.value.exit == Exit.STATE
    assert coordinator.calls == []


def test_two_writers_keep_one_chain_and_resending_at_once_adds_no_line(tmp_path: Path) -> None:
    first, second = (SentLog(SiteLog(tmp_path).note) for _ in range(2))
    first.note("https://c", "POST", "/v1/federations/f/tasks/t0/failure", Body.of(b'{"type": "x"}'))
    second.note("https://c", "POST", "/v1/federations/f/withdrawal", None)
    for _ in range(3):
        first.note("https://c", "PUT", "/v1/federations/f/tasks/t/update", Body.of(b"12345678"))
    first.note("https://other", "PUT", "/v1/federations/f/tasks/t/update", Body.of(b"12345678"))
    assert [line["to"] for line in messages(tmp_path)] == ["https://c"] * 3 + ["https://other"]


def test_an_hour_of_questions_is_one_line(tmp_path: Path) -> None:
    log = SentLog(SiteLog(tmp_path).note)
    for _ in range(50):
        log.note("https://c", "GET", "/v1/federations/f/task?wait=30", None)
    told = read(tmp_path)
    assert len(told) <= 2  # the hour may end meanwhile
    assert told[0]["asked"] == {"task": 1}


def test_a_folder_is_bound_to_one_federation(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    identity = state.identity("a", "trainer")
    bound = state.bind(identity, "fed-1")
    assert (bound.federation_id, bound.client_id) == ("fed-1", None)
    bound = state.bind(bound, "fed-1", "c-1")
    assert state.bind(bound, "fed-1").client_id == "c-1", "it stays"
    state.close()
    state = PrivateState(tmp_path)
    assert state.identity("a", "trainer") == bound
    with pytest.raises(ClientError, match="belongs to federation fed-1, not to fed-2: give another --state-dir") as end:
        state.bind(bound, "fed-2")
    assert end.value.exit is Exit.STATE


def test_notes_that_cannot_be_read_are_damaged(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    assert (state.read_note("a"), state.read_file("a"), state.serving()) == (None, None, None)
    (tmp_path / "a").write_bytes(b"\xff")
    (tmp_path / "b").mkdir()
    (tmp_path / "serving.json").write_text('{"round": 1}')
    for reading in (lambda: state.read_note("a"), lambda: state.read_file("b"), state.serving):
        with pytest.raises(ClientError, match="is damaged: "):
            reading()


@pytest.mark.parametrize("links", [True, False])
def test_a_payload_on_the_disk_is_served_under_a_second_name(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError("no hard links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(private_state, "LARGE", 7)
    state, payload = PrivateState(tmp_path / "state"), tmp_path / "payload"
    for round, content in ((1, b"seven b"), (2, b"sixsix"), (2, b"sixsix")):
        payload.unlink(missing_ok=True)
        payload.write_bytes(content)
        state.save_serving(Serving(round, "evaluate", CONFIG, payload))
        kept = state.serving()
        assert kept is not None
        assert (kept.round, kept.phase, kept.config) == (round, "evaluate", CONFIG)
        read = kept.payload.read_bytes() if isinstance(kept.payload, Path) else kept.payload
        assert (read, isinstance(kept.payload, Path)) == (content, len(content) >= 7)
        [file] = (tmp_path / "state").glob("serving-*.safetensors")
        assert file.samefile(payload) is links
        assert file.name == f"serving-{hashlib.sha256(content).hexdigest()}.safetensors"


def test_the_private_tensors_of_a_chosen_round_come_back(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)

    def own() -> list[float]:
        return [tensor.item() for tensor in state.committed()[0].values()]

    keep_round(state, 0)
    for round in (1, 3):
        state.commit_prepared({"own": torch.tensor(float(round))}, TensorOrigin(f"t-{round}", round, "train"))
        keep_round(state, round)
    select_round(state, 2)
    assert (own(), state.committed()[1].round) == ([1.0], 1), "of the last round before"
    assert [path.name for path in tmp_path.glob("round-*")] == ["round-1.safetensors"]
    select_round(state, 0)
    assert (own(), list(tmp_path.glob("round-*"))) == ([], []), "none is as old: it joined later"


def test_a_record_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="records no message"):
        site_log.sent_lines(tmp_path, "text")
    site = SiteLog(tmp_path)
    site.note("agreed", {"terms": "x"})
    with pytest.raises(ClientError, match="records no message"):
        site_log.sent_lines(tmp_path, "text")
    site.note("sent", {"to": "http://a", "bytes": 3})
    [line] = site_log.sent_lines(tmp_path, "json")
    assert {name: json.loads(line)[name] for name in ("what", "to", "bytes", "n")} == {
        "what": "sent", "to": "http://a", "bytes": 3, "n": 2,
    }  # fmt: skip
    (tmp_path / HEAD).write_text("[1]")
    with pytest.raises(ChangedLog, match=rf"{HEAD} is damaged"):
        verify(tmp_path)
    with pytest.raises(ClientError, match="the site log was changed: ") as end:
        site_log.sent_lines(tmp_path, "text")
    assert end.value.exit is Exit.STATE
    (tmp_path / HEAD).unlink()
    (tmp_path / HEAD).mkdir()
    with pytest.raises(ChangedLog, match="cannot be read"):
        verify(tmp_path)


def test_each_message_is_told_in_words(tmp_path: Path) -> None:
    site, begin = SiteLog(tmp_path), {"to": "http://a"}
    about = {"message": "update", "round": 2, "phase": "train", "bytes": 1234, "sha256": "ab"}
    site.note("questions", {**begin, "asked": {"task": 2, "payload": 1}})
    site.note("questions", {**begin, "asked": {}})
    site.note("agreed", {"terms": "x"})
    site.note("sent", {**begin, "message": "withdrawal"})
    site.note("sent", {**begin, **about, "tensors": {"w": "F32 [2]"}, "fields": ["loss", "steps"]})
    site.note("sent", {**begin, **about, "bytes": 2, "tensors": {}, "fields": []})
    head, *lines = site_log.sent_lines(tmp_path, "text")
    assert head == f"{tmp_path / FILE}: 3 messages of 1,236 bytes; no line was changed or removed"
    assert lines[:2] == ["  update: 2 messages, 1,236 bytes", "  withdrawal: 1 message, 0 bytes"]
    told = [line if line.startswith("    ") else line[21:] for line in lines[2:]]
    asked = "requests without a body to http://a, also later in this hour; since the last such line:"
    assert told == [
        f"{asked} 2 for task, 1 for payload",
        f"{asked} none",
        "withdrawal to http://a",
        "update, round 2, train to http://a, 1,234 bytes, sha256 ab",
        "    tensor w: F32 [2]",
        "    fields loss, steps",
        "update, round 2, train to http://a, 2 bytes, sha256 ab",
    ]
    [written, *_] = read(tmp_path)
    assert lines[2].startswith(f"{written['at'][:10]} {written['at'][11:19]}  ")


def test_what_a_client_keeps_is_closed_to_others_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "account"))
    before = os.umask(0)
    try:
        state = PrivateState(tmp_path / "state")
        state.write_pending(b"an update", vector(1.0), ROUND_1)
        state.write_note("note", "text")
        SiteLog(tmp_path / "state").note("asked", {})
        Ledger(tmp_path / "ledgers" / "one").open(1e-3)
        trained_images.note_trained(tmp_path / "state", "fed-1", ["a"])
        Accountant(1e-3, tmp_path / "ledgers" / "costs").epsilon([Event("gaussian", 1.0, 9.0, 1)])
    finally:
        os.umask(before)
    (named,) = (tmp_path / "account").rglob("fed-1")
    made = [*tmp_path.glob("state/**/*"), *tmp_path.glob("ledgers/**/*"), named, *named.iterdir()]
    assert {site_log.FILE, site_log.HEAD, trained_images.FILE, "lock", "one", "fed-1"} <= {one.name for one in made}
    for one in made:
        assert stat.S_IMODE(one.stat().st_mode) == (0o700 if one.is_dir() else 0o600), one


def test_what_was_trained_on_is_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "account"))
    folder, other = tmp_path / "state", tmp_path / "other"
    folder.mkdir()
    assert (trained_images.read_trained(folder), trained_images.folders_of("fed-1")) == (None, [])
    trained_images.note_trained(folder, "fed-1", ["b", "a"])
    assert (folder / trained_images.FILE).read_text() == "a\nb\n"
    written = (folder / trained_images.FILE).stat().st_mtime_ns
    trained_images.note_trained(folder, "fed-1", ["b"])
    assert (folder / trained_images.FILE).stat().st_mtime_ns == written
    trained_images.note_trained(folder, "fed-1", ["c"])
    assert trained_images.read_trained(folder) == {"a", "b", "c"}
    assert (folder / trained_images.FILE).stat().st_mode & 0o777 == 0o600
    assert (trained_images.folders_of("fed-1"), trained_images.folders_of("fed-2")) == ([folder], [])
    with pytest.raises(ClientError, match="cannot be written: ") as end:
        trained_images.note_trained(other / "none", "fed-1", ["a"])
    assert end.value.exit is Exit.STATE
    (folder / trained_images.FILE).unlink()
    assert trained_images.folders_of("fed-1") == [], "gone"
