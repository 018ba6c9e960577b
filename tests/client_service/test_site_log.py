"""The site's own log: what a client's life leaves in it, and that no line can be changed, cut, moved or forged."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.client_service.__main__ import main, start
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.bodies import Body
from promptfed.client_service.http.sent_log import SentLog
from promptfed.client_service.joining.checks import Check
from promptfed.client_service.joining.disclosure import Disclosure
from promptfed.client_service.joining.sent import ENROLMENT, EVALUATION, FAILURE, SECURE_SUM, SENT, UPDATE, help_lines
from promptfed.client_service.settings import Settings
from promptfed.client_service.state import site_log
from promptfed.client_service.state.durable_files import VARIABLE
from promptfed.client_service.state.site_log import FILE, HEAD, ChangedLog, SiteLog, chained, read, verify
from promptfed.shared.messages import EnrolRequest, EvaluationRequest, FailureRequest, UpdateMetadata
from promptfed.shared.plain_text import plain
from promptfed.shared.secagg.messages import ConfirmAnswer, KeysAnswer, SharesAnswer, UnmaskAnswer
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors.torch_tensors import decode
from tests.client_service.conftest import Killed, Make
from tests.support.fake_coordinator import Wire

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


# The list of what a client sends is that of the messages' fields, and both helps show it.


def test_the_list_has_every_field_of_every_message() -> None:
    assert ENROLMENT.keys() == EnrolRequest.model_fields.keys()
    assert UPDATE.keys() == UpdateMetadata.model_fields.keys() | {"tensors"}
    assert EVALUATION.keys() == EvaluationRequest.model_fields.keys()
    assert FAILURE.keys() == FailureRequest.model_fields.keys()
    answers = (KeysAnswer, SharesAnswer, ConfirmAnswer, UnmaskAnswer)
    assert SECURE_SUM.keys() == {name for answer in answers for name in answer.model_fields} | {"masked"}


def test_both_helps_show_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = CliRunner().invoke(app, ["client", "--help"]).output
    with pytest.raises(SystemExit):
        main(["--help"])
    for text in (command, capsys.readouterr().out):
        lines = [line.strip() for line in text.splitlines()]
        assert all(line.strip() in lines for line in help_lines())
        assert any("domain's name and description" in line for line in lines)
    assert len(help_lines()) > sum(map(len, SENT.values()))


# The record of what left: complete, and written before the message leaves.


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
