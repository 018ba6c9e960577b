"""Four new users, each by the lines that the documentation gives, on pictures that are drawn here.

A data owner looks at folders of their own and joins; an operator invites sites and steers a federation; a researcher
compares and tunes methods; an end user scores, serves and continues a result.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from fastapi.testclient import TestClient
from typer.testing import CliRunner, Result

from promptfed.cli.main import app
from promptfed.cli.predicting import model_of_export
from promptfed.client_service.serving.api import create_export_app
from promptfed.export.adapted_model import predictor_of
from promptfed.sdk.client import Exit
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
    bench += ["--methods", "zero_shot,promptfl:m=2", "--seeds", "0", "--rounds", "2", "--out", str(tmp_path / "bench")]
    refused = promptfed(*bench)
    assert refused.exit_code == Exit.BAD_INPUT
    assert "outline has classes that filled lacks (bar)" in refused.stderr
    done = promptfed(*bench, "--class-names", "intersection")
    assert done.exit_code == 0, done.output
    with (tmp_path / "bench" / "results.csv").open(newline="") as file:
        assert {row["column"] for row in csv.DictReader(file)} == {*DOMAINS, "mean", "clients"}
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if line[:1] in "┃│┏└")
    again = promptfed(*bench, "--class-names", "intersection")
    assert "6 of 6 federations are done" in again.stderr


def test_a_researcher_lets_a_search_choose_the_method(own: Path, tmp_path: Path) -> None:
    clients = [{"name": domain, "data": f"folder:{own / domain}?only={','.join(SHAPES[:3])}"} for domain in DOMAINS[:2]]
    run = {"method": {"name": "promptfl", "m": 2}, "rounds": 2, "clients": clients}
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    line = (
        "tune", tmp_path / "run.yaml", "--out", tmp_path / "tuned.yaml", "--methods", "fedtaskres", "--seconds", "5",
    )  # fmt: skip
    tuned = promptfed(*line, "--json")
    assert tuned.exit_code == 0, tuned.output
    chosen = yaml.safe_load((tmp_path / "tuned.yaml").read_text())
    assert chosen["method"]["name"] in ("promptfl", "fedtaskres")
    done = promptfed("simulate", tmp_path / "tuned.yaml")
    assert done.exit_code == 0, done.output


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="tests with curl: apt-get install curl")
def test_a_federation_of_own_folders_by_curl(own: Path, tmp_path: Path) -> None:
    """The first tutorial's federation, with folders in the place of the embedded data, then an export and its score."""
    tutorial = (ROOT / "docs" / "tutorials" / "first-federation.md").read_text()
    script = "".join(re.findall(r"^```bash\n(.*?)^```", tutorial, re.DOTALL | re.MULTILINE))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        script = script.replace("8080", str(found.getsockname()[1]))
    script = script.replace("for site in painting quickdraw", "for site in filled outline")
    script = script.replace("symbols:$site?per_class=8&test_per_class=5", f"folder:{own}/$site?min_per_class=2")
    script = script.replace("symbols:sketch?test_per_class=5", f"folder:{own}/negative")
    assert "symbols:" not in script
    ending = f"""
export PROMPTFED_OPERATOR_TOKEN=$(cat run/coordinator/operator.token)
promptfed export styles --coordinator $URL --out run/export --data 'folder:{own}/filled'
promptfed score run/export 'folder:{own}/negative' --out run/score --json
promptfed predict {own}/negative --export run/export --out run/answers.csv
kill %1"""
    script = script.replace("\nkill %1", ending)
    guard = "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null; wait' EXIT\n"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", guard + script], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=2 * PATIENCE,
    )  # fmt: skip
    logs = "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in sorted((tmp_path / "run").glob("*.log")))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    [told] = re.findall(r'^\{"images.*$', done.stdout, re.MULTILINE)
    assert json.loads(told)["images"] == 18  # an evaluator's folder is test data whole
    with (tmp_path / "run" / "answers.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 18
