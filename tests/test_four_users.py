"""Four new users, each by the lines that the documentation gives, on pictures that are drawn here.

A data owner looks at folders of their own and joins; an operator invites sites and steers a federation; a researcher
compares and tunes methods; an end user scores, serves and continues a result.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from promptfed.cli.commands import services as site_commands
from promptfed.cli.main import app
from promptfed.cli.predicting import model_of_export
from promptfed.client_service.serving.api import create_export_app
from promptfed.export.adapted_model import predictor_of
from promptfed.sdk.client import CA_VARIABLE, TOKEN_VARIABLE, URL_VARIABLE
from promptfed.shared.service.reasons import Exit
from tests import ROOT
from tests.support import exports
from tests.support.coordinators import InThread, in_thread
from tests.support.own_images import SHAPES, write_folder
from tests.support.waiting import PATIENCE

DOMAINS = ("filled", "outline", "negative")


def promptfed(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Folders of three domains: one has a class that the others lack, and a class with one picture."""
    for seed, domain in enumerate(DOMAINS):
        classes = dict.fromkeys(SHAPES[:3], 6)
        write_folder(tmp_path / "own" / domain, classes, domain=domain, seed=seed)
    write_folder(tmp_path / "own" / "outline", {"bar": 1}, domain="outline")
    (tmp_path / "own" / "outline" / "domain.txt").write_text("a line drawing of a {}")
    return tmp_path / "own"


def test_a_data_owner_looks_at_a_folder_of_their_own(own: Path, tmp_path: Path) -> None:
    (own / "filled" / "circle" / "logo.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    first = promptfed("doctor", "--data", f"folder:{own}/filled")
    assert first.exit_code == Exit.BAD_INPUT
    assert "rsvg-convert -w 512 logo.svg -o logo.png" in first.output
    (own / "filled" / "circle" / "logo.svg").unlink()
    second = promptfed("doctor", "--data", f"folder:{own}/outline")
    assert "the class bar has one image" in second.output
    assert "min_per_class=2" in second.output
    mended = f"folder:{own}/outline?min_per_class=2"
    assert promptfed("doctor", "--data", mended).exit_code == 0
    shown = promptfed("data", "show", mended, "--out", tmp_path / "sheet.png", "--json")
    told = json.loads(shown.stdout)
    assert told["domain"] == "a line drawing of a {}"
    assert told["classes"] == {name: {"train": 5, "test": 1} for name in sorted(SHAPES[:3])}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InThread, Path]]:
    """An operator creates a federation and invites two sites, which join with their invitation and finish it."""
    folder = tmp_path_factory.mktemp("federation")
    for seed, domain in enumerate(DOMAINS):
        write_folder(folder / domain, dict.fromkeys(SHAPES[:3], 6), domain=domain, seed=seed)
    names = ", ".join(sorted(SHAPES[:3]))
    spec = f"{{name: shapes, method: {{name: promptfl, m: 4}}, rounds: 2, class_names: [{names}], start: when_ready"
    spec += ", backbone: {model: promptfed-tiny}"
    (folder / "shapes.yaml").write_text(spec + ", participation: {min_clients: 2}}")
    with in_thread(folder / "coordinator") as server:
        known = ("--coordinator", server.url, "--token-file", folder / "coordinator" / "operator.token")
        created = promptfed("federation", "create", folder / "shapes.yaml", *known)
        assert created.exit_code == 0, created.output
        sites = []
        for site in ("filled", "outline"):
            invited = promptfed("federation", "invite", "shapes", *known, "--json")
            assert invited.exit_code == 0, invited.output
            line = [sys.executable, "-m", "promptfed", "join", json.loads(invited.stdout)["invitation"], "--yes"]
            line += ["--name", site, "--data", f"folder:{folder / site}", "--state-dir", str(folder / f"{site}-state")]
            with (folder / f"{site}.log").open("w") as log:
                sites.append(subprocess.Popen(line, stdout=log, stderr=log))
        try:
            codes = [site.wait(PATIENCE) for site in sites]
        finally:
            for process in sites:
                process.kill()
        assert codes == [0, 0], "".join(log.read_text() for log in sorted(folder.glob("*.log")))
        exported = promptfed("export", "shapes", *known, "--out", folder / "export")
        assert exported.exit_code == 0, exported.output
        yield server, folder


def test_an_operator_invites_and_sees_what_came_of_it(federation: tuple[InThread, Path]) -> None:
    server, folder = federation
    known = ("--coordinator", server.url, "--token-file", folder / "coordinator" / "operator.token")
    status = promptfed("federation", "status", "shapes", *known)
    assert status.exit_code == 0, status.output
    assert "finished" in status.stdout
    clients = json.loads(promptfed("federation", "clients", "shapes", *known, "--json").stdout)
    assert {client["name"] for client in clients} == {"filled", "outline"}
    invited = json.loads(promptfed("federation", "invite", "shapes", *known, "--json").stdout)["invitation"]
    (folder / "invitation.txt").write_text(invited[:-3] + "\n")
    for given, pasted in ((invited[:-3], ""), ("-", invited[:-3] + "\n"), (str(folder / "invitation.txt"), "")):
        refused = CliRunner().invoke(app, ["join", given, "--data", f"folder:{folder / 'negative'}"], input=pasted)
        assert refused.exit_code == Exit.NOT_ALLOWED, refused.output
        assert refused.stderr.count("\n") == 1, refused.stderr
        assert "the invitation is incomplete or was changed" in refused.stderr
    told = promptfed("federation", "invite", "shapes", *known).stdout.splitlines()
    assert told[0] == "promptfed join - --data folder:/path/to/images", "ps shows no invitation"
    assert len(told) == 2
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "promptfed_rounds_completed_total 2.0" in metrics
    assert httpx.get(f"{server.url}/docs").status_code == 200


def test_a_data_owner_reads_what_has_left(federation: tuple[InThread, Path]) -> None:
    _, folder = federation
    line = [sys.executable, "-m", "promptfed", "client", "--sent", "--state-dir", str(folder / "filled-state")]
    told = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, cwd=folder)
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("context") >= 2, "an update in each of two rounds"
    assert "enrol" in told.stdout
    assert str(folder / "filled") not in told.stdout.replace(str(folder / "filled-state"), "")


def test_an_end_user_checks_scores_serves_and_continues(federation: tuple[InThread, Path], tmp_path: Path) -> None:
    server, folder = federation
    export = folder / "export"
    whole = promptfed("verify", export)
    assert whole.exit_code == 0, whole.output
    assert "was not checked" in whole.stdout
    (tmp_path / "in").mkdir()
    shutil.copy(next((folder / "negative").rglob("*.png")), tmp_path / "in" / "a.png")
    (tmp_path / "in" / "b.png").write_bytes(b"no image")
    answered = promptfed("predict", tmp_path / "in", "--export", export)
    assert answered.exit_code == 0, answered.output
    [row] = csv.DictReader(io.StringIO(answered.stdout))
    assert "b.png cannot be read as an image" in answered.stderr
    for site in ("filled", "negative"):
        scored = promptfed("score", export, f"folder:{folder / site}", "--out", tmp_path / site)
        assert scored.exit_code == 0, scored.output
    pooled = promptfed("pool", tmp_path / "filled", tmp_path / "negative", "--json")
    assert json.loads(pooled.stdout)["figures"]["accuracy"]["sites"] == 2
    model, names = model_of_export(export)
    served = predictor_of(model.serve(exports.backbone(), names))
    http = TestClient(create_export_app({}, served, None, "127.0.0.1"), base_url="http://127.0.0.1")
    typed = {"Content-Type": "application/octet-stream"}
    told = http.post("/v1/predict", content=(tmp_path / "in" / "a.png").read_bytes(), headers=typed).json()
    assert told["class_name"] == row["class"]
    (tmp_path / "again.yaml").write_text("{name: again, rounds: 1}")
    known = ("--coordinator", server.url, "--token-file", folder / "coordinator" / "operator.token")
    again = promptfed("federation", "create", tmp_path / "again.yaml", "--from", export, *known, "--json")
    assert again.exit_code == 0, again.output
    state = json.loads((export / "card.json").read_text())["hashes"]["state"]
    assert json.loads(again.stdout)["spec"]["continues"] == state


def test_a_researcher_compares_takes_away_and_scores(own: Path, tmp_path: Path) -> None:
    bench = ["bench", "leave-one-domain-out", "--data", f"folder:{own}/{{domain}}", "--domains", ",".join(DOMAINS)]
    bench += ["--methods", "zero_shot,promptfl:m=2", "--seeds", "0", "--rounds", "1", "--out", str(tmp_path / "bench")]
    refused = promptfed(*bench)
    assert refused.exit_code == Exit.BAD_INPUT
    assert "outline has classes that filled lacks (bar)" in refused.stderr
    bench[3] += f"?only={','.join(SHAPES[:3])}"
    done = promptfed(*bench)
    assert done.exit_code == 0, done.output
    table = (tmp_path / "bench" / "table.md").read_text()
    assert all(f"| {column} " in table for column in (*DOMAINS, "mean", "clients"))
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if line[:1] in "┃│┏└")
    again = promptfed(*bench)
    assert "6 of 6 federations are done" in again.stderr


# Sixty wrong inputs: each row of tests/wrong_inputs.txt is a command, its exit code and its last line.


PAGE = ROOT / "tests" / "wrong_inputs.txt"


ROW = re.compile(r"\| `promptfed (.+?)` \| (\d+) \| (.+) \|")


WAY_OUT = re.compile(
    r"\b(give|write|use|check|mend|name a|did you mean|must be|must hold|remove|choose|put|[Rr]estore|export it again|"
    r"start it|enrol more|leave|list at|names the|missing|known are|has (photo|flat)|add it|Possible options|should be|"
    r"must have|must not be|lists|ask for|accepted are|needs|copy the|is not one of|save it|make one|name the|rename|"
    r"writes one|count them|take|wait|see|another|as in|with: --export|is it running|are given by)\b"
)


RAW = ("Errno", "Traceback", "Error(", "httpx", "pydantic", "ssl.c", "_io.", "<class", "Exception", "codec")


CLIENTS = [{"name": name, "data": "symbols:neon?topic=weather&per_class=2&test_per_class=1"} for name in "ab"]


RUN = {
    "name": "pets", "method": {"name": "promptfl", "m": 4}, "rounds": 1, "participation": {"min_clients": 2},
    "clients": CLIENTS,
}  # fmt: skip


CHANGED: dict[str, dict[str, Any]] = {
    "run": {}, "typo": {"ruonds": 3}, "text": {"rounds": "many"}, "none": {"rounds": 0},
    "method": {"method": {"name": "promptlf"}}, "option": {"method": {"name": "promptfl", "mm": 4}},
    "rate": {"training": {"learning_rate": -1}}, "name": {"name": "my pets"},
    "rule": {"aggregation": {"rule": "medain"}}, "noise": {"privacy": {"level": "sample", "clip": 0.3}},
    "nobody": {"clients": []}, "nothing": {"clients": [{"name": "a"}]},
    "domain": {"clients": [CLIENTS[0], {"name": "b", "data": "symbols:noen"}]},
    "model": {"backbone": {"model": "ViT-B-17"}}, "twice": {"clients": [CLIENTS[0], CLIENTS[0]]},
    "few": {"participation": {"min_clients": 5}}, "optimizer": {"training": {"optimizer": "adamm"}},
    "epochs": {"training": {"epochs": "two"}}, "classes": {"class_names": ["Sun", "sun"]},
    "template": {"template": "a photo"}, "context": {"method": {"name": "promptfl", "context_init": "a very " * 60}},
    "unnamed": {"backbone": {"model": ""}}, "epsilon": {"privacy": {"level": "sample", "epsilon": -1, "clip": 0.3}},
    "guarded": {"method": {"name": "plan"}, "privacy": {"level": "sample", "epsilon": 3, "clip": 0.3}},
    "part": {"clients": [{"name": "a", "data": "digits?partition=iid&clients=2&client=2"}, CLIENTS[1]]},
    "weights": {"backbone": {"model": "promptfed-tiny", "pretrained": "laion"}},
}  # fmt: skip


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

    monkeypatch.setattr(site_commands, "leave", leave)
    monkeypatch.chdir(files)
    nowhere = {"DOCKER_HOST": f"unix://{files}/no-engine"}  # whether or not Docker runs here
    for name, value in {CA_VARIABLE: "", "HOME": str(files), **nowhere, **coordinator}.items():
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
