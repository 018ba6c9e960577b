"""`promptfed validate` with real clients over HTTP."""

from __future__ import annotations

import asyncio
import csv
import json
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import promptfed
from promptfed.cli.main import app
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining.parts import Parts
from promptfed.client_service.settings import make_settings
from promptfed.client_service.worker import Worker
from promptfed.export.reading import open_export
from promptfed.sdk.errors import Exit as CommandExit
from promptfed.shared.api.validation_report import SignedValidation
from tests.support import exports
from tests.support.coordinators import InThread, in_thread
from tests.support.own_images import SHAPES, write_folder
from tests.support.waiting import wait_for

EACH = {"north": 24, "south": 18}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    data = {name: f"folder:{write_folder(folder / name, seed=seed, each=4)}" for seed, name in enumerate(("a", "b"))}
    options = {"class_names": list(SHAPES), "backbone": exports.backbone(), "licence": "CC-BY-4.0"}
    promptfed.run({"name": "promptfl", "m": 2}, data, rounds=1, **options).export(folder / "export")
    return folder / "export"


def command(server: InThread, *arguments: str | Path) -> Result:
    token = server.settings.data_dir / "operator.token"
    return CliRunner().invoke(app, [*map(str, arguments), "--coordinator", server.url, "--token-file", str(token)])


def worker(server: InThread, folder: Path, name: str, role: str, federation: str, state: str = "state") -> Worker:
    data = f"folder:{write_folder(folder / 'images' / name, seed=sorted(EACH).index(name) + 5, each=EACH[name])}"
    settings = make_settings(
        coordinator=server.url,
        federation=federation,
        name=name,
        role=role,
        data=data,
        state_dir=folder / state / name,
        enrolment_token_file=folder / "token",
        device="cpu",
        feature_cache=folder / "features",
    )
    return Worker(settings, Parts(backbone=exports.backbone()))


def test_sites_test_an_export_over_http(exported: Path, tmp_path: Path) -> None:
    with in_thread(tmp_path / "data") as server:
        results: list[Result] = []
        asked = [
            "validate",
            exported,
            "--sites",
            2,
            "--token-out",
            tmp_path / "token",
            "--out",
            tmp_path / "out",
        ]
        waiting = threading.Thread(target=lambda: results.append(command(server, *asked)))
        waiting.start()
        wait_for("the token", lambda: (tmp_path / "token").exists() or results)
        assert not results, results[0].output
        federation = server.get("/v1/federations")["federations"][0]
        assert federation["name"] == "promptfl-validation"
        assert federation["spec"]["origin"]["licence"] == "CC-BY-4.0"
        with pytest.raises(ClientError, match="nobody trains: start this client with --role evaluator") as refused:
            asyncio.run(worker(server, tmp_path, "north", "trainer", federation["name"], "other").run())
        assert refused.value.exit is Exit.USAGE

        async def together() -> list[Exit]:
            workers = [worker(server, tmp_path, name, "evaluator", federation["name"]) for name in EACH]
            return list(await asyncio.gather(*(one.run() for one in workers)))

        assert asyncio.run(together()) == [Exit.OK, Exit.OK]
        waiting.join(60)
        assert results[0].exit_code == 0, results[0].output
        signed = SignedValidation.model_validate_json((tmp_path / "out" / "validation.json").read_bytes())
        assert signed.report.state == open_export(exported).card.hashes.state
        assert server.get(f"{federation['id']}/rounds/0")["state_hash"] == signed.report.state
        assert [client["num_samples"] for client in server.get(f"{federation['id']}/clients")["clients"]] == [90, 70]
        assert (tmp_path / "out" / "forest.png").stat().st_size > 1000
        rows = list(csv.DictReader((tmp_path / "out" / "validation.csv").open()))
        assert {"north", "south", "(mean)"} == {row["site"] for row in rows}
        assert rows == list(
            csv.DictReader(
                server.http.get(
                    f"/v1/federations/{federation['id']}/validation", params={"format": "csv"}, headers=server.operator
                ).text.splitlines()
            )
        )
        key = server.get("/v1/signing-key")["public_key"]
        verified = CliRunner().invoke(app, ["verify", str(tmp_path / "out"), "--key", key])
        assert verified.exit_code == 0, verified.output
        again = command(server, "validate", "--federation", federation["id"], "--out", tmp_path / "again", "--json")
        assert json.loads(again.stdout)["report"]["state"] == signed.report.state
        # The same sites in this process tell the same.
        sites = {name: f"folder:{tmp_path / 'images' / name}" for name in EACH}
        simulated = promptfed.validate(exported, sites, backbone=exports.backbone()).report
        assert simulated.sites == signed.report.sites
        assert simulated.figures == signed.report.figures


def test_what_cannot_be_validated_is_refused(exported: Path, tmp_path: Path) -> None:
    with in_thread(tmp_path / "data") as server:
        out = ("--out", tmp_path / "out")
        for asked, code in (
            (("validate", *out), CommandExit.USAGE),
            (("validate", exported, "--federation", "x", *out), CommandExit.USAGE),
            (("validate", tmp_path / "data", *out), CommandExit.BAD_INPUT),
            (("federation", "create", "--from", exported, "--validate", exported), CommandExit.USAGE),
        ):
            assert command(server, *asked).exit_code == code
        spec = {"name": "v", "kind": "validation", "method": {"name": "promptfl"}}
        state = open_export(exported).card.hashes.state
        for changes, text in (
            ({}, "kind validation takes an export"),
            ({"continues": state, "secure_aggregation": {}}, "leave secure_aggregation out"),
        ):
            refused = server.post("/v1/federations", spec | changes, status=422)
            assert text in refused["detail"]
        trains = server.create(name="trains")
        assert server.get(f"{trains}/validation", status=404)["type"].endswith("no-validation")
        assert server.get("/v1/federations")["federations"][0]["name"] == "trains"


def test_a_federation_that_validates_takes_no_trainer(exported: Path, tmp_path: Path) -> None:
    with in_thread(tmp_path / "data") as server:
        created = command(server, "federation", "create", "--validate", exported, "--json")
        assert created.exit_code == 0, created.output
        federation = json.loads(created.stdout)["id"]
        shape = json.loads(created.stdout)["spec"]["backbone"]["shape"]
        about = {"backbone_shape": shape, "backbone_fingerprint": exports.backbone().fingerprint}
        trainer = server.client(federation, "a")
        refused = trainer.enrol(server.token(federation), class_names=list(SHAPES), **about)
        assert refused.status_code == 422
        assert refused.json()["type"].endswith("nobody-trains")
        assert server.post(f"{federation}/start", status=409)["detail"].startswith("enrolled clients: 0, needed: 1")
        assert server.get(f"{federation}/validation", status=404)["detail"].endswith("no site has been asked yet")
