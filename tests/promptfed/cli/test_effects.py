"""Every option of a command, given once: the outcome differs from that without it, or it is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.state.site_log import SiteLog
from promptfed.client_service.state.trained_images import note_trained
from promptfed.shared.privacy.accounting import Event
from promptfed.testing.clients import drive
from tests.promptfed.cli.test_operating import running
from tests.support.coordinators import in_thread
from tests.support.own_images import write_folder

OPERATOR = ("coordinator", "token_file")
BASES: dict[str, list[str]] = {
    "predict": ["{images}/bar/0.png", "--export", "{export}"], "predict ": ["{images}", "--export", "{export}"],
    "score": ["{export}", "folder:{images}"], "pool": ["{scores}/one", "{scores}/two"], "verify": ["{export}"],
    "methods": ["promptfl"], "init": ["made"], "init ": ["--list"], "data": [], "data list": [],
    "data show": ["folder:{images}"],
    "ledger show": ["--ledger", "{ledger}"], "ledger verify": ["--ledger", "{ledger}"],
    "privacy plan": ["{spec}", "--samples", "80"], "privacy plan ": ["{clients}"], "policy example": [],
    "policy check": ["{policy}"], "site-log show": ["{site}"], "site-log verify": ["{site}"], "federation list": [],
    "federation status": ["finished"], "federation watch": ["finished"], "federation clients": ["finished"],
    "federation metrics": ["finished"], "federation rounds": ["finished"], "federation privacy": ["finished"],
    "federation signing-key": [], "federation replay": ["finished"],
    "federation prompts": ["finished", "--out", "p.safetensors"], "federation token": ["finished", "--list"],
    "federation create": ["{spec}", "--dry-run"], "federation create ": ["--from", "{export}", "--dry-run"],
    "operator list": [], "audit-log verify": ["--file", "{audit}"],
}  # fmt: skip
"""What is given beside the option, by command; a space more tells two of one command."""

VALUES: dict[str, list[str]] = {
    "out": ["--out", "o.other"], "round": ["--round", "0"], "top": ["--top", "1"],
    "classes": ["--classes", "bar,circle"],
    "data": ["--data", "folder:{images}"], "key": ["--key", "0" * 64],
    "coordinator": ["--coordinator", "http://127.0.0.1:9"],
    "token_file": ["--token-file", "none"], "federation": ["--federation", "f"], "export": ["--export", "none"],
    "count": ["--count", "1"], "part": ["--part", "train"], "role": ["--role", "evaluator"], "name": ["--name", "n"],
    "uses": ["--uses", "2"], "hours": ["--hours", "1"], "client": ["--client", "a"], "revoke": ["--revoke", "t"],
    "samples": ["--samples", "90"], "clients": ["--clients", "2000"], "dataset": ["--dataset", "other"],
    "ledger": ["--ledger", "none"], "head": ["--head", "0" * 64], "most": ["--max-epsilon", "3"],
    "file": ["--file", "none"],
    "preset": ["--from", "paper:fedpgp-office"], "root": ["--root", "r"], "backbone_file": ["--backbone-file", "none"],
    "state_dir": ["--state-dir", "{state}"], "recompute": ["--no-recompute"], "backbone": ["--no-backbone"],
    "allow_backbone": ["--allow-backbone", "x"],
}  # fmt: skip
UNSEEN = {
    ("", "allow_backbone"): "permits what open_clip does not know: tests/shared/clip",
    ("", "backbone_file"): "for weights that are not embedded: tests/shared/clip/test_local_weights.py",
    ("verify", "recompute"): "less is checked, and nothing is wrong here",
    ("federation create", "backbone"): "the backbone is the coordinator's own here",
}
"""What changes nothing that can be seen here, with the reason."""

OTHERS = {
    **dict.fromkeys(["coordinator", "client", "join", "serve"], "a service: its settings' tests"),
    **dict.fromkeys(["simulate", "launch", "demo", "track"], "whole federations: their own tests"),
    **dict.fromkeys(["bench", "tune"], "`refuse_unused` and tests/promptfed/experiments"),
    **dict.fromkeys(["federation invite", "operator add"], "mints: each answer differs"),
    **dict.fromkeys(["federation start", "federation pause", "federation resume", "federation cancel",
                     "federation delete", "federation withdraw", "federation reset", "federation delete-updates",
                     "operator remove"], "changes what is there: test_operating.py"),
    "doctor": "looks at this machine: test_doctor.py", "ledger adopt": "asks a client's coordinator: test_results.py",
    "export": "a folder, by its own time: tests/promptfed/export", "onnx": "promptfed[onnx]: tests/promptfed/export",
    "audit-log show": "each call is an entry: test_operating.py",
}  # fmt: skip


def commands(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


COMMANDS = dict(commands())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, exported: Path) -> Iterator[dict[str, str]]:
    """What the commands are given, by its name."""
    root = tmp_path_factory.mktemp("world")
    ledger = Ledger(root / "ledger.jsonl", "eyes")
    ledger.open(1e-5)
    about = {"federation_id": "a", "coordinator": "http://x", "round": 1, "phase": "train", "task_id": "t"}
    ledger.spend("1" * 64, [Event("gaussian", 1.0, 4.0, 3)], 4.0, {**about, "noise": "secret"}, "train")
    (root / "site").mkdir()
    SiteLog(root / "site").note("seen", {})
    (root / "state").mkdir()
    note_trained(root / "state", "f", ["0" * 64])
    images = write_folder(root / "in", ("circle", "bar"), seed=9, each=3)
    for site, each in (("one", 3), ("two", 4)):
        uri = f"folder:{write_folder(root / 'sites' / site, ('circle', 'bar'), seed=each, each=each)}"
        assert (
            CliRunner().invoke(app, ["score", str(exported), uri, "--out", str(root / "scores" / site)]).exit_code == 0
        )
    spec = {"name": "s", "method": {"name": "promptfl", "m": 4}, "rounds": 3, "training": {"batch_size": 8}}
    sample = {"privacy": {"level": "sample", "clip": 0.3, "noise_multiplier": 2.0}}
    central = {"privacy": {"level": "client", "clip": 0.5, "noise_multiplier": 4.0, "accept_noise": True},
               "aggregation": {"weighting": "uniform"}, "participation": {"min_clients": 100}}  # fmt: skip
    for name, more in (("spec", sample), ("clients", central)):
        (root / f"{name}.json").write_text(json.dumps(spec | more))
    (root / "policy.yaml").write_text(CliRunner().invoke(app, ["policy", "example"]).stdout)
    with in_thread(root / "data") as server:
        drive(running(server, "finished"))
        server.until("finished", state="finished")
        token = server.settings.data_dir / "operator.token"
        asked = ["audit-log", "show", "--json", "--coordinator", server.url, "--token-file", str(token)]
        (root / "audit").write_text(CliRunner().invoke(app, asked).stdout)
        yield {
            "images": str(images), "export": str(exported), "scores": str(root / "scores"), "ledger": str(ledger.path),
            "spec": str(root / "spec.json"), "clients": str(root / "clients.json"), "policy": str(root / "policy.yaml"),
            "site": str(root / "site"), "state": str(root / "state"), "audit": str(root / "audit"),
            "url": server.url, "token": str(token),
        }  # fmt: skip


def test_every_option_is_tried_or_stands_here_with_a_reason() -> None:
    tried = {path.strip() for path in BASES}
    assert tried | OTHERS.keys() == COMMANDS.keys() | {"data"}
    assert not tried & OTHERS.keys()
    known = {(path, option.name) for path, command in COMMANDS.items() for option in command.params}
    assert all((path, name) in known for path, name in UNSEEN if path)


def outcome(arguments: list[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Exit code, output and files of a command in a new folder."""
    place.mkdir()
    monkeypatch.chdir(place)
    done = CliRunner().invoke(app, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    files = {str(file.relative_to(place)): hashlib.sha256(file.read_bytes()).hexdigest()
             for file in sorted(place.rglob("*")) if file.is_file()}  # fmt: skip
    return done.exit_code, done.stdout, done.stderr, files


@pytest.mark.extended
@pytest.mark.parametrize("case", BASES)
def test_each_option_changes_the_outcome_or_is_refused(
    case: str, world: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = case.strip()
    command = COMMANDS.get(path) or typer.main.get_command(app).commands[path]
    options = [option for option in command.params if option.param_type_name == "option" and option.name != "help"]
    names = {option.name for option in options}
    at = ["--coordinator", world["url"], "--token-file", world["token"]] if names >= {*OPERATOR} else []
    if path in ("predict", "audit-log verify"):  # with an export or a file nobody is asked
        at = []
    given = [part.format(**world) for part in BASES[case]]
    wanted = outcome([*path.split(), *given, *at], tmp_path / "base", monkeypatch)
    assert wanted[0] == 0, wanted
    idle = []
    for option in options:
        value = VALUES.get(option.name) or [option.opts[0]]
        if (path, option.name) in UNSEEN or ("", option.name) in UNSEEN or value[0] in BASES[case]:
            continue
        more = [part.format(**world) for part in value]
        kept = [] if option.name in OPERATOR else at
        if outcome([*path.split(), *given, *more, *kept], tmp_path / option.name, monkeypatch) == wanted:
            idle.append(option.name)
    assert not idle
