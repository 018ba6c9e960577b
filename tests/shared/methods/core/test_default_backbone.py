"""The backbone of a spec that names none: by the data where they are known, by the method everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

import promptfed
from promptfed.cli.main import app
from promptfed.coordinator.problems import InvalidSpec
from promptfed.coordinator.resources.federations import operations as federations
from promptfed.experiments.bench.entries import parse_entries
from promptfed.experiments.bench.protocols import PROTOCOLS, Setting
from promptfed.experiments.bench.runner import Bench
from promptfed.runtime.run_file import read_run
from promptfed.shared.clip import load_backbone
from promptfed.shared.data import open_source
from promptfed.shared.methods import METHODS, describe, resolve_spec, with_default_backbone
from promptfed.shared.methods.core.default_backbone import default_backbone

PHOTO, TINY = "promptfed-photo", "promptfed-tiny"
ON_TINY = {
    "fedavg", "fedbabu", "fedlora", "fedmaple", "fedotp", "fedpr", "fedprox", "fedrep", "fedrod", "fedvpt",
    "fedvpt_deep", "perfedavg", "pfedpg", "plan", "singleset_full", "singleset_vpt",
}  # fmt: skip
DRAWN, PHOTOGRAPHS = ["symbols:neon?shots=1", "emoji:flat", "digits"], ["symbols:neon", "folder:/data/pets"]


def spec(method: str, **more: object) -> dict[str, object]:
    return {"name": "x", "method": {"name": method}, **more}


@pytest.mark.parametrize("name", METHODS.own())
def test_each_method_has_a_backbone_that_suits_it(name: str) -> None:
    wanted = TINY if name in ON_TINY else PHOTO
    classes = {"class_names": ["sun", "moon"], "rounds": METHODS[name].defaults.get("rounds", 2)}
    assert resolve_spec(spec(name, **classes)).backbone.model == wanted
    assert describe(name)["default_backbone"] == wanted
    for data, expected in ((DRAWN, TINY), (PHOTOGRAPHS, wanted)):
        named, why = with_default_backbone(spec(name), data)
        assert named["backbone"] == {"model": expected}
        assert why is not None
        assert why.startswith(f"Backbone {expected}: ")
        assert "\n" not in why


def test_what_a_spec_names_stays() -> None:
    for given in ({"model": "ViT-B-16", "pretrained": "openai"}, {"model": TINY}):
        assert with_default_backbone(spec("promptfl", backbone=given), DRAWN) == (
            spec("promptfl", backbone=given),
            None,
        )
    half = with_default_backbone(spec("promptfl", backbone={"precision": "bf16"}))[0]
    assert half["backbone"] == {"model": PHOTO, "precision": "bf16"}
    for wrong in (spec("no-such"), spec("promptfl", backbone=None), {"name": "x"}):
        assert with_default_backbone(wrong) == (wrong, None)
    assert default_backbone(None, ["stamps"])[0] == PHOTO
    resolved = resolve_spec(spec("plan"))
    assert resolve_spec(resolved.model_dump(mode="json")) == resolved


def test_a_coordinator_refuses_what_does_not_suit_and_names_what_does() -> None:
    with pytest.raises(InvalidSpec, match=r"plan needs a vision transformer.*promptfed-tiny or promptfed-emoji"):
        federations.resolve(spec("plan", backbone={"model": PHOTO}))
    assert federations.resolve(spec("plan")).backbone.model == TINY
    read = federations.read_run(yaml.dump({**spec("promptfl"), "clients": [{"data": uri} for uri in DRAWN]}))
    assert read["backbone"] == {"model": TINY}
    mixed = {"data": DRAWN[0], "tests": {"b": "hf:x/y"}}
    read = federations.read_run(yaml.dump({**spec("promptfl"), "clients": mixed}))
    assert read["backbone"] == {"model": PHOTO}
    for clients in ("nonsense", [7], [{"data": 7, "tests": 7}]):
        assert federations.read_run(yaml.dump({**spec("promptfl"), "clients": clients}))["backbone"] == {"model": PHOTO}


def written(folder: Path, data: list[str], method: str = "promptfl") -> Path:
    path = folder / "run.yaml"
    clients = [{"name": f"c{number}", "data": uri} for number, uri in enumerate(data)]
    path.write_text(yaml.dump({**spec(method), "rounds": 1, "clients": clients}))
    return path


def test_commands_decide_by_the_data_of_the_run_file_and_say_so(tmp_path: Path) -> None:
    assert read_run(written(tmp_path, PHOTOGRAPHS)).spec["backbone"] == {"model": PHOTO}
    drawn = written(tmp_path, ["symbols:neon?shots=1&per_class=1&test_per_class=1&only=sun,moon"])
    assert read_run(drawn).spec["backbone"] == {"model": TINY}
    done = CliRunner().invoke(app, ["simulate", str(drawn)])
    assert done.exit_code == 0, done.output
    assert "Backbone promptfed-tiny: all images are embedded drawings." in done.stderr


def test_a_bench_decides_for_each_method_and_says_so(tmp_path: Path) -> None:
    for data, wanted in ((DRAWN[1], [TINY, TINY]), (f"folder:{pets(tmp_path)}", [PHOTO, TINY])):
        setting = Setting(data=(data,), clients=2)
        jobs = Bench(PROTOCOLS["personalisation"], parse_entries("promptfl,plan"), setting, (0,)).jobs()
        assert [job.resolved.backbone.model for job in jobs] == wanted
        assert all(str(job.chosen).startswith(f"Backbone {model}: ") for job, model in zip(jobs, wanted, strict=True))


def pets(folder: Path) -> Path:
    for number, name in enumerate(("cat", "dog") * 8):
        (folder / name).mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / name / f"{number}.png")
    return folder


def test_the_library_takes_the_backbone_that_it_is_handed() -> None:
    tiny = load_backbone(TINY, "embedded")
    source = open_source("symbols:neon?shots=1&per_class=1&test_per_class=1&only=sun,moon")
    result = promptfed.run("zero_shot", [source], backbone=tiny)  # of a source of one's own nobody knows what it shows
    assert result.spec["backbone"]["model"] == TINY
    drawn = promptfed.run("zero_shot", ["symbols:neon?shots=1&per_class=1&test_per_class=1&only=sun,moon"])
    assert drawn.spec["backbone"]["model"] == TINY
    emoji = promptfed.run("zero_shot", [source], backbone=load_backbone("promptfed-emoji", "embedded"))
    assert emoji.spec["backbone"]["model"] == "promptfed-emoji"
