"""`promptfed data check --share STATE`: rounded counts reach the coordinator that the owner has agreed to."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.client_service.joining.parts import Parts
from promptfed.client_service.joining.sent import DATA_CHECK, sent_lines
from promptfed.client_service.settings import make_settings
from promptfed.client_service.worker import Worker
from promptfed.sdk.errors import Exit
from promptfed.shared.clip import load_backbone, tiny
from tests.support.coordinators import InThread, in_thread
from tests.support.own_images import write_folder
from tests.support.waiting import wait_for

pytest.importorskip("imagehash", reason="promptfed[medical] is not installed")


def joined(server: InThread, data: str, folder: Path) -> str:
    """A client that has taken part in a federation of one round; the federation's path."""
    torch.set_num_threads(1)
    spec = {
        "name": "pets",
        "rounds": 1,
        "method": {"name": "promptfl", "m": 2},
        "training": {"learning_rate": 0.02, "batch_size": 8},
        "participation": {"min_clients": 1},
    }
    path = f"/v1/federations/{server.post('/v1/federations', spec, status=201)['id']}"
    token = folder / "token"
    token.write_text(server.token(path))
    settings = make_settings(
        coordinator=server.url,
        federation="pets",
        name="ward",
        data=data,
        device="cpu",
        state_dir=folder / "state",
        enrolment_token_file=token,
    )
    worker = Worker(settings, Parts(backbone=load_backbone(tiny.MODEL, tiny.PRETRAINED)))
    thread = threading.Thread(target=lambda: asyncio.run(worker.run()))
    thread.start()
    wait_for("the client", lambda: server.get(path)["clients"]["trainers"] == 1)
    server.post(f"{path}/start")
    thread.join(60)
    assert server.get(path)["state"] == "finished"
    return path


def owners_counts(uri: str) -> dict[str, int]:
    """What the owner sees."""
    told = CliRunner().invoke(app, ["data", "check", uri, "--json"]).stdout
    counts: dict[str, int] = json.loads(told)["counts"]
    return counts


@pytest.mark.extended
def test_counts_reach_the_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    images = write_folder(tmp_path / "images", each=6)
    first = next(images.rglob("*.png"))
    for number in range(11):
        (first.parent / f"copy{number}.png").write_bytes(first.read_bytes())
    uri, state = f"folder:{images}", tmp_path / "state"

    def check(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["data", "check", uri, "--share", *options])
        return result.exit_code, " ".join(result.output.split())

    with in_thread(tmp_path / "data") as server:
        path = joined(server, uri, tmp_path)

        def shared() -> dict[str, object] | None:
            told: dict[str, object] | None = server.get(f"{path}/clients")["clients"][0]["data_check"]
            return told

        code, text = check(str(state))
        assert code == Exit.BAD_INPUT
        assert f"These counts would go to {server.url}, and nothing else" in text
        assert shared() is None
        code, text = check(str(state), "--yes")
        assert code == 0, text
        told = shared()
        assert told is not None
        assert told["floor"] == 10
        counts = told["counts"]
        assert isinstance(counts, dict)
        exact = {"images": 35, **owners_counts(uri)}
        assert counts == {kind: count - count % 10 for kind, count in exact.items()}
        assert 0 < sum(counts.values()) - 30 < sum(exact.values()) - 35  # some reach the floor, some do not
        last = sent_lines(state, "text")[-2:]
        assert "data-check" in last[0]
        assert last[1].split() == ["fields", *", ".join(DATA_CHECK).split()]

        where = ["--coordinator", server.url, "--token-file", str(server.settings.data_dir / "operator.token")]
        listed = CliRunner().invoke(app, ["federation", "clients", "pets", *where])
        assert "ward has shared a check of its images: " in listed.output
        assert "images 30 or more" in " ".join(listed.output.split())

        policy = tmp_path / "policy.yaml"
        policy.write_text(yaml.safe_dump({"version": 1, "metrics": {"floor": 16}}))
        monkeypatch.setenv("PROMPTFED_CLIENT_POLICY", str(policy))
        assert check(str(state), "--yes", "--floor", "5")[0] == 0
        told = shared()
        assert told is not None
        assert told["floor"] == 16  # the site's
        assert json.dumps(told["counts"]).count("32") == 1  # images

        client = server.get(f"{path}/clients")["clients"][0]["client_id"]
        server.delete(f"{path}/clients/{client}/updates")
        assert shared() is None

        (state / "withdrawn").write_text("now")
        code, text = check(str(state), "--yes")
        assert code == Exit.WITHDRAWN
        assert "consent" in text
        assert shared() is None
    code, text = check(str(images), "--yes")
    assert code == Exit.STATE
    assert "is not the state folder of a client that has joined" in text
