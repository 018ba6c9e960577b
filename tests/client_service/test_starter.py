"""The process that forks a machine's clients: what it answers, and what a client is begun with."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.client_service import starter


class Left(BaseException):
    """The process would end here."""


def test_requests_are_answered_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, written = list[dict[str, Any]](), list[tuple[int, bytes]]()
    asked = [{"arguments": ["--name=a"], "log": "log", "environment": {}}, {"ended": 70}, {"ended": 71}, {"ended": 72}]
    lines = "".join(f"{json.dumps(one)}\n" for one in asked)
    ended = {70: (0, 0), 71: (71, 3 << 8), 72: (72, 9)}
    waited = lambda pid, how: ended[pid] if how == os.WNOHANG else None  # noqa: E731
    for forked in (70, 0):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines.encode())))
        for name in ("standard_streams", "collect_seldom"):
            monkeypatch.setattr(starter, name, lambda name=name: begun.append({name: True}))
        monkeypatch.setattr(starter, "_be_client", lambda **request: begun.append(request))
        fake = SimpleNamespace(fork=lambda forked=forked: forked, waitpid=waited, WNOHANG=os.WNOHANG)
        fake.write, fake.waitstatus_to_exitcode = lambda *what: written.append(what), os.waitstatus_to_exitcode
        monkeypatch.setattr(starter, "os", fake)
        starter.serve()
    first = [{"standard_streams": True}, {"collect_seldom": True}]
    assert begun == [*first, *first, asked[0]]
    assert written[:4] == [(1, b"70\n"), (1, b"null\n"), (1, b"3\n"), (1, b"-9\n")]


@pytest.mark.parametrize(("ends", "code", "said"), [
    (lambda: 7, 7, ""), (lambda: sys.exit(5), 5, ""), (lambda: sys.exit("why"), 1, ""),
    (lambda: [][0], 1, "IndexError"),
])  # fmt: skip
def test_a_client_has_its_own_session_log_and_environment(
    ends: Any, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    comm, seen, log = Path("/proc/self/comm"), dict[str, Any](), tmp_path / "log"
    called, places = comm.read_text(), dict[int, str]()
    log.write_text("before\n")

    def main(arguments: list[str]) -> Any:
        seen.update(arguments=arguments, name=comm.read_text().strip(), environment=dict(starter.os.environ))
        comm.write_text(called)
        return ends()

    def put(handle: int, place: int) -> None:
        places[place] = os.readlink(f"/proc/self/fd/{handle}")
        if place:
            os.write(handle, f"{place}\n".encode())

    def leave(code: int) -> None:
        raise Left(code)

    own = {"environ": {"A": "1", "B": "2"}, "dup2": put, "setsid": lambda: seen.update(session=True)}
    inherited = {"set_inheritable": lambda place, yes: places.update({place: f"{places[place]} {yes}"})}
    monkeypatch.setattr(starter, "os", SimpleNamespace(**vars(os) | own | inherited))
    monkeypatch.setattr(starter, "main", main)
    monkeypatch.setattr(starter, "leave", leave)
    with pytest.raises(Left) as left:
        starter._be_client(["--data=x", "--name=hospital-of-somewhere"], str(log), {"B": "3"})
    assert left.value.args == (code,)
    assert seen == {
        "session": True, "arguments": ["--data=x", "--name=hospital-of-somewhere"], "name": "hospital-of-som",
        "environment": {"A": "1", "B": "3"},
    }  # fmt: skip
    assert places == {0: f"{os.devnull} True", 1: f"{log} True", 2: f"{log} True"}
    assert log.read_text() == "before\n1\n2\n"
    assert said in capsys.readouterr().err
