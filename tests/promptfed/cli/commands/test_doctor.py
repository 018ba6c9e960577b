"""`promptfed doctor`, and `--check` of a client: a line for everything, what to do, and nothing joined."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from promptfed.cli.main import app
from promptfed.client_service.__main__ import main as client
from promptfed.client_service.joining import doctor as doctor_module
from promptfed.client_service.settings import make_settings
from promptfed.client_service.state.site_log import read, verify
from promptfed.shared.clip import hub, shape_of
from promptfed.shared.errors import PromptfedError
from promptfed.shared.methods.core.spec_backbone import open_backbone
from promptfed.shared.service.reasons import Exit
from promptfed.shared.spec.spec import BackboneSpec
from tests.support import exports
from tests.support.coordinators import InThread, in_thread
from tests.support.waiting import PATIENCE


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    """It has a federation of the embedded backbone in which two classes are to be told apart."""
    with in_thread(tmp_path_factory.mktemp("coordinator") / "data") as server:
        backbone = exports.backbone()
        about = {
            "model": "promptfed-tiny",
            "fingerprint": backbone.fingerprint,
            "shape": shape_of(backbone).model_dump(),
        }
        spec = {"name": "pets", "method": {"name": "promptfl", "m": 4}, "class_names": ["cat", "dog"]}
        server.post("/v1/federations", spec | {"backbone": about}, status=201)
        yield server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that is there is waited for, however slow the machine."""
    monkeypatch.setattr(doctor_module, "ANSWER_SECONDS", PATIENCE)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backbone is at hand."""
    backbone = exports.backbone()
    monkeypatch.setattr(doctor_module, "open_backbone", lambda spec, device, allowed, file: backbone)


@pytest.fixture
def token(coordinator: InThread, tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(coordinator.token("pets"))
    return path


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """A folder of a data owner's: a folder for each class."""
    for place, name in enumerate(("cat", "dog")):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(6):
            noise = Image.effect_noise((32, 32), 20 + 10 * number).rotate(90 * place)
            noise.save(tmp_path / "pets" / name / f"{number}.png")
    return tmp_path / "pets"


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def verdicts(done: Result) -> dict[str, str]:
    return {check["name"]: check["verdict"] for check in json.loads(done.stdout)["checks"]}


def joining(server: InThread, token: Path, pets: Path, **changes: Any) -> list[str]:
    options = {
        "coordinator": server.url, "federation": "pets", "enrolment-token-file": token, "data": f"folder:{pets}",
        "state-dir": token.parent / "state",
    } | changes  # fmt: skip
    return [f"--{key}={value}" for key, value in options.items()]


def test_everything_is_right(coordinator: InThread, token: Path, pets: Path) -> None:
    done = doctor(*joining(coordinator, token, pets), "--json")
    assert done.exit_code == Exit.OK, done.output
    found = verdicts(done)
    assert set(found.values()) <= {"pass", "warn"}
    assert {found[name] for name in ("data", "images", "coordinator", "backbone", "method")} == {"pass"}
    leaves = json.loads(done.stdout)["leaves"]
    assert leaves["declared"]["class_names"] == ["cat", "dog"]
    assert [one["name"] for one in leaves["exchanges"][0]["tensors"]] == ["context"]
    assert str(pets) not in done.stdout.replace(json.dumps(str(token.parent / "state"))[1:-1], "")
    assert coordinator.get("pets/clients")["clients"] == []  # nobody has joined
    assert not (token.parent / "state").exists()


@pytest.mark.usefixtures("loaded")
def test_the_question_is_in_record_of_a_folder_that_is_there(coordinator: InThread, token: Path, pets: Path) -> None:
    folder = token.parent / "state"
    folder.mkdir()
    assert doctor(*joining(coordinator, token, pets)).exit_code == Exit.OK
    told = read(folder)
    assert ([line["asked"] for line in told], told[0]["to"]) == ([{"enrolment": 1}], coordinator.url)
    verify(folder)


@pytest.mark.usefixtures("loaded")
def test_without_a_coordinator_the_machine_is_looked_at(pets: Path) -> None:
    done = doctor("--data", f"folder:{pets}")
    assert done.exit_code == Exit.OK, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.split()[1:2] == ["data"]] == ["pass"]
    assert any(line.startswith("warn  coordinator") and "--enrolment-token-file" in line for line in lines)


@contextmanager
def page(content: bytes) -> Iterator[str]:
    """The address of a server that answers everything with a page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_address_alone_is_tried(coordinator: InThread, loaded: None) -> None:
    done = doctor("--coordinator", coordinator.url)
    assert f"pass  coordinator   {coordinator.url} answers; not asked about a federation" in done.output
    for address, said in (
        ("http://127.0.0.1:1", "nothing listens there"),
        (coordinator.url.replace("http:", "https:"), "TLS"),
        ("https://no-such-host.invalid", "no host has this name"),
    ):
        done = doctor("--coordinator", address, "--json")
        [check] = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "coordinator"]
        assert check["verdict"] == "fail"
        assert said in check["text"]
    with page(b"<html>a portal</html>") as portal:
        assert "as no coordinator does" in doctor("--coordinator", portal).output


@pytest.mark.parametrize(("given", "pretrained"), [((), None), (("--pretrained", "v1"), "v1")])
def test_a_model_that_brings_its_weights_needs_no_name_of_them(
    monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], pretrained: str | None
) -> None:
    asked: list[BackboneSpec] = []
    monkeypatch.setattr(doctor_module, "open_backbone", lambda spec, *_: asked.append(spec) or exports.backbone())
    doctor("--model", "hf-hub:someone/model", "--allow-backbone", "hf-hub:someone/model", *given)
    doctor("--model", "promptfed-tiny", *given)
    assert [spec.pretrained for spec in asked] == [pretrained, pretrained or "embedded"]
    assert "--pretrained is empty" in doctor("--model", "promptfed-tiny", "--pretrained", "").output


def test_what_the_environment_says_to_a_client_has_no_part_in_it(
    coordinator: InThread, token: Path, pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("API_PORT", "x"), ("API_HOST", "0.0.0.0"), ("ENROLMENT_TOKEN_FILE", "/absent")):
        monkeypatch.setenv(f"PROMPTFED_CLIENT_{name}", value)
    test_everything_is_right(coordinator, token, pets)


@pytest.mark.usefixtures("loaded")
def test_a_policy_is_compared_with_federation(coordinator: InThread, token: Path, pets: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("no such section: 1\n")
    done = doctor(*joining(coordinator, token, pets, policy=policy), "--json")
    assert done.exit_code == Exit.BAD_INPUT
    assert verdicts(done)["policy"] == "fail"
    assert verdicts(done)["coordinator"] == "warn", "it is not asked: the policy may forbid it"


@pytest.mark.usefixtures("loaded")
def test_each_trouble_is_a_line_and_the_rest_is_still_looked_at(coordinator: InThread, token: Path, pets: Path) -> None:
    (pets / "cat").rename(pets / "axolotl")
    done = doctor(*joining(coordinator, token, pets), "--json")
    assert done.exit_code == Exit.BAD_INPUT
    found = verdicts(done)
    assert {name for name, verdict in found.items() if verdict == "fail"} == {"method"}
    assert found["backbone"] == found["coordinator"] == found["data"] == "pass"
    assert "'axolotl'" in done.stdout
    assert done.stderr.splitlines()[-1] == "promptfed: not ready: method"


@pytest.mark.parametrize(("changes", "name", "why"), [
    ({"coordinator": "http://127.0.0.1:1"}, "coordinator", "no answer"),
    ({"federation": "absent"}, "coordinator",
     "no federation 'absent' here: check its name, or ask the operator for it"),
    ({"data": "folder:/absent"}, "data", "/absent"),
    ({"device": "cuda:7"}, "device", "cuda:7 is not here"),
])  # fmt: skip
@pytest.mark.usefixtures("loaded")
def test_what_fails_says_why(
    coordinator: InThread,
    token: Path,
    pets: Path,
    changes: dict[str, str],
    name: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if why == "no answer":  # nobody is there: not to be waited for long
        monkeypatch.setattr(doctor_module, "ANSWER_SECONDS", 0.3)
    done = doctor(*joining(coordinator, token, pets, **changes), "--json")
    assert done.exit_code == Exit.BAD_INPUT, done.output
    (check,) = [one for one in json.loads(done.stdout)["checks"] if one["name"] == name]
    assert check["verdict"] == "fail"
    assert why in check["text"]


@pytest.mark.parametrize(("option", "why"), [
    ("--coordinator=http://192.0.2.1", "--allow-plain-http"), ("--device=gpu", "'gpu' is no device"),
])  # fmt: skip
def test_settings_that_no_client_takes_are_refused(option: str, why: str) -> None:
    refused = doctor(option)
    assert refused.exit_code == Exit.USAGE
    assert why in refused.stderr


@pytest.mark.usefixtures("loaded")
def test_what_fails_says_what_to_do(coordinator: InThread, token: Path, pets: Path, tmp_path: Path) -> None:
    token.write_text("0" * 64)
    lines = doctor(*joining(coordinator, token, pets, data=str(pets))).stdout.splitlines()
    (asked,) = [line for line in lines if line.startswith("fail  coordinator")]
    assert asked.endswith("ask the operator for a new enrolment token")
    (looked,) = [line for line in lines if line.startswith("fail  data")]
    assert f"write folder:{pets} for folders of images" in looked
    looked = doctor("--data", f"folder:{pets / 'cat'}").stdout
    assert "put the images of each class into a folder of the class's name" in looked


@pytest.mark.usefixtures("loaded")
def test_a_method_of_domains_wants_words_for_the_images(coordinator: InThread, pets: Path, tmp_path: Path) -> None:
    spec = {"name": "domains", "method": {"name": "fast_pt"}, "class_names": ["cat", "dog"]}
    spec |= {"backbone": {"model": "promptfed-tiny"}}
    coordinator.post("/v1/federations", spec, status=201)
    token = tmp_path / "token"
    token.write_text(coordinator.token("domains"))
    given = joining(coordinator, token, pets, federation="domains")
    without = doctor(*given, "--json")
    assert without.exit_code == Exit.BAD_INPUT
    assert "give --domain" in without.stdout
    with_words = doctor(*given, "--json", "--domain", "a photo of a {} indoors")
    assert with_words.exit_code == Exit.OK, with_words.output
    assert json.loads(with_words.stdout)["leaves"]["declared"]["domain"]["description"] == "a photo of a {} indoors"


@pytest.mark.usefixtures("loaded")
def test_a_client_checks_the_same_and_joins_nothing(
    coordinator: InThread, token: Path, pets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert client([*joining(coordinator, token, pets), "--check"]) == 0
    said = capsys.readouterr().err
    assert "pass  coordinator" in said
    assert "Never leaves it: images" in said
    assert coordinator.get("pets/clients")["clients"] == []


def test_weights_that_cannot_be_had_are_one_line_that_says_how_to_bring_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "is_cached", lambda repository, file: False)
    result = doctor("--model", "ViT-B-16", "--pretrained", "openai")
    assert result.exit_code == Exit.BAD_INPUT
    [line] = [line for line in result.output.splitlines() if line.startswith("fail  backbone")]
    assert "are not on this machine" in line
    assert "--backbone-file PATH" in line


def test_a_file_of_weights_is_read_by_every_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("PROMPTFED_BACKBONE_FILE", "PROMPTFED_CLIENT_BACKBONE_FILE"):
        monkeypatch.setenv(variable, "")  # put back afterwards
    result = doctor("--model", "ViT-B-16", "--pretrained", "openai", "--backbone-file", str(tmp_path / "gone.pt"))
    assert f"There is no file {tmp_path / 'gone.pt'} of weights" in result.output
    with pytest.raises(PromptfedError, match="There is no file"):
        open_backbone(BackboneSpec(model="ViT-B-16", pretrained="openai"), allow_backbone=False)
    monkeypatch.setenv("PROMPTFED_CLIENT_BACKBONE_FILE", str(tmp_path / "gone.pt"))
    settings = make_settings(coordinator="http://127.0.0.1", federation="a", data="digits", state_dir=tmp_path)
    assert settings.backbone_file == tmp_path / "gone.pt"
    (tmp_path / "run.yaml").write_text("method: {name: zero_shot}\nclients: [{data: digits}]\n")
    launched = CliRunner().invoke(app, ["launch", str(tmp_path / "run.yaml"), "--runtime", "docker"])
    assert "containers do not see a file of weights here" in launched.output


def test_a_command_permits_what_is_named_as_a_client_does(tmp_path: Path) -> None:
    hub = BackboneSpec(model="hf-hub:someone/model", pretrained=None)
    for allowed in ([], ["hf-hub:someone/other"]):
        with pytest.raises(PromptfedError, match="must permit it by --allow-backbone hf-hub:someone/model"):
            open_backbone(hub, allow_backbone=allowed)
    (tmp_path / "run.yaml").write_text(
        "backbone: {model: 'hf-hub:someone/model', pretrained: null}\n"
        "method: {name: zero_shot}\nclients: [{data: digits}]\n"
    )
    simulate = ["simulate", str(tmp_path / "run.yaml"), "--allow-backbone", "hf-hub:someone/other"]
    assert "must permit it" in CliRunner().invoke(app, simulate).output


@pytest.mark.usefixtures("loaded")
def test_a_test_sets_names_are_looked_at_as_joining_does(
    coordinator: InThread, token: Path, pets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, code in (("cat", 0), (" ".join("a" * 90), 1)):
        folder = pets.parent / f"wards{code}"
        for label in (name, "dog"):
            (folder / label).mkdir(parents=True)
            for number in range(4):
                Image.effect_noise((32, 32), 20 + number).save(folder / label / f"{number}.png")
        ended = client([*joining(coordinator, token, pets), f"--test=wards=folder:{folder}", "--check"])
        assert (ended != 0) == bool(code)
        assert ("fail  method" in capsys.readouterr().err) == bool(code)
