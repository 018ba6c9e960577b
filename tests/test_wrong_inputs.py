"""Sixty wrong inputs: each row of tests/wrong_inputs.txt is a command, its exit code and its last line."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.numpy import save_file
from typer.testing import CliRunner

from promptfed.cli.commands import services
from promptfed.cli.main import app
from promptfed.sdk.client import CA_VARIABLE, TOKEN_VARIABLE, URL_VARIABLE
from tests import ROOT
from tests.support.coordinators import in_thread

PAGE = ROOT / "tests" / "wrong_inputs.txt"
ROW = re.compile(r"\| `promptfed (.+?)` \| (\d+) \| (.+) \|")
WAY_OUT = re.compile(
    r"\b(give|write|use|check|mend|name a|did you mean|must be|must hold|remove|choose|put|[Rr]estore|export it again|"
    r"start it|enrol more|leave|list at|names the|missing|known are|has photo|add it|Possible options|should be|"
    r"must have|must not be|lists|ask for|accepted are|needs|copy the|is not one of|save it|make one|name the|rename|"
    r"writes one|count them|take|wait|see|another|as in|with: --export|is it running)\b"
)
RAW = ("Errno", "Traceback", "Error(", "httpx", "pydantic", "ssl.c", "_io.", "<class", "Exception", "codec")
CLIENTS = [{"name": name, "data": "symbols:neon?topic=weather&per_class=2&test_per_class=1"} for name in "ab"]
RUN = {
    "name": "pets", "method": {"name": "promptfl", "m": 4}, "rounds": 1, "participation": {"min_clients": 2},
    "clients": CLIENTS,
}  # fmt: skip
CHANGED: dict[str, dict[str, Any]] = {
    "run": {},
    "typo": {"ruonds": 3},
    "text": {"rounds": "many"},
    "none": {"rounds": 0},
    "method": {"method": {"name": "promptlf"}},
    "option": {"method": {"name": "promptfl", "mm": 4}},
    "rate": {"training": {"learning_rate": -1}},
    "name": {"name": "my pets"},
    "rule": {"aggregation": {"rule": "medain"}},
    "noise": {"privacy": {"level": "sample", "clip": 0.3}},
    "nobody": {"clients": []},
    "nothing": {"clients": [{"name": "a"}]},
    "domain": {"clients": [CLIENTS[0], {"name": "b", "data": "symbols:noen"}]},
    "model": {"backbone": {"model": "ViT-B-17"}},
    "twice": {"clients": [CLIENTS[0], CLIENTS[0]]},
    "few": {"participation": {"min_clients": 5}},
    "optimizer": {"training": {"optimizer": "adamm"}},
    "epochs": {"training": {"epochs": "two"}},
    "classes": {"class_names": ["Sun", "sun"]},
    "template": {"template": "a photo"},
    "context": {"method": {"name": "promptfl", "context_init": "a very " * 60}},
    "unnamed": {"backbone": {"model": ""}},
    "epsilon": {"privacy": {"level": "sample", "epsilon": -1, "clip": 0.3}},
    "guarded": {"method": {"name": "plan"}, "privacy": {"level": "sample", "epsilon": 3, "clip": 0.3}},
    "part": {"clients": [{"name": "a", "data": "digits?partition=iid&clients=2&client=2"}, CLIENTS[1]]},
    "weights": {"backbone": {"model": "promptfed-tiny", "pretrained": "laion"}},
}
TABLES = {
    "age": ("path,cat,age", "pets/cat/0.png,1,57"), "gone": ("path,cat,dog", "pets/cat/7.png,1,0"),
    "double": ("path,labels", "pets/cat/0.png,cat||dog"), "nameless": ("path,labels", "pets/cat/0.png,"),
    "short": ("path,cat,dog", "pets/cat/0.png,1"),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A row of the page. ``PORT`` stands for a port that is in use."""

    command: str
    exit: int
    message: str


CASES = [Case(found[1], int(found[2]), found[3]) for found in map(ROW.match, PAGE.read_text().splitlines()) if found]


@pytest.fixture(scope="module")
def busy() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield str(taken.getsockname()[1])


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of an operator whose coordinator has the federation `pets`, not started."""
    with in_thread(tmp_path_factory.mktemp("wrong") / "data") as server:
        server.create(name="pets")
        token = (server.settings.data_dir / "operator.token").read_text().strip()
        yield {URL_VARIABLE: server.url, TOKEN_VARIABLE: token}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands of the page name."""
    folder = tmp_path_factory.mktemp("files")
    for name, change in CHANGED.items():
        (folder / f"{name}.yaml").write_text(json.dumps(RUN | change))
        spec = {key: value for key, value in (RUN | change).items() if key != "clients"}
        (folder / f"{name}-spec.yaml").write_text(json.dumps(spec))
    (folder / "broken.yaml").write_text("rounds: [\n")
    (folder / "list.yaml").write_text("- rounds\n")
    (folder / "tab.yaml").write_text("rounds:\n\tmany: 1\n")
    (folder / "keys.yaml").write_text("name: pets\nname: dogs\n")
    (folder / "colon.yaml").write_text("name: pets: dogs\n")
    (folder / "latin.csv").write_bytes("path,label\nä.png,x\n".encode("latin-1"))
    (folder / "policy.yaml").write_text("min_epsilon: 3\n")
    (folder / "bytes").write_bytes(bytes(range(256)))
    (folder / "token").write_text("x" * 43)
    (folder / "blank").write_text("\n")
    (folder / "plain.txt").write_text("plain\n")
    (folder / "loop").symlink_to("loop")
    (folder / "empty").mkdir()
    for label in ("cat", "dog"):
        (folder / "pets" / label).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (40 * number, 90, 0)).save(folder / "pets" / label / f"{number}.png")
    (folder / "pets" / "cat" / "9.png").write_bytes(b"no picture")
    for name, lines in TABLES.items():
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (folder / "flat").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "flat" / "a.png")
    for name, card in (("half", '{"format": '), ("old", '{"format": "promptfed-export-99"}'), ("bare", "{}")):
        (folder / name).mkdir()
        (folder / name / "card.json").write_text(card)
    save_file({}, folder / "weights.safetensors")
    return folder


@pytest.fixture
def run(
    files: Path, busy: str, coordinator: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Any]:
    """Runs a command in the folder of the files; the exit code and what it prints on stderr."""
    root, environment = logging.getLogger(), dict(os.environ)
    handlers, level = root.handlers[:], root.level

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(services, "leave", leave)
    monkeypatch.chdir(files)
    for name, value in {CA_VARIABLE: "", "HOME": str(files), **coordinator}.items():
        monkeypatch.setenv(name, value)

    def invoke(command: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [word.strip("'") for word in command.replace("PORT", busy).split(" ")])
        assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
        return done.exit_code, done.stderr.replace(busy, "PORT").replace(
            coordinator[URL_VARIABLE], "http://coordinator"
        )

    yield invoke
    os.environ.clear()  # commands name files and authorities there
    os.environ.update(environment)
    root.handlers[:] = handlers
    root.setLevel(level)


def last_line(stderr: str) -> str:
    """The message, without its program's name, the time of a log line, or what typer puts before an error of usage."""
    line = stderr.strip().splitlines()[-1]
    return re.sub(r"^(promptfed: |coordinator: |Error: |\d\d:\d\d:\d\d error: )", "", line)


@pytest.mark.parametrize("case", CASES, ids=[case.command[:60] for case in CASES])
def test_a_wrong_input_has_the_message_of_the_page(case: Case, run: Any) -> None:
    code, stderr = run(case.command)
    assert (code, last_line(stderr).replace("|", "\\|")) == (case.exit, case.message)
    assert "Traceback" not in stderr
    assert not any(raw in last_line(stderr) for raw in RAW)
    assert WAY_OUT.search(case.message)


def test_there_are_sixty_of_all_commands() -> None:
    assert len({case.command for case in CASES}) >= 60
    assert {case.command.split()[0] for case in CASES} >= {
        "simulate", "launch", "bench", "tune", "client", "coordinator", "federation", "operator", "audit-log", "export",
        "predict", "score", "verify", "track", "data", "policy", "ledger", "privacy", "methods", "demo",
    }  # fmt: skip
