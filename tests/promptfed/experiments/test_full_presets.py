"""Every preset of a paper, in full size, up to the first training step: data sets stand in with their real classes.

Of a set only the first image is read, for its scale of grey. The stand-ins have the real numbers of classes, so that
a preset whose clients cannot be divided, or whose clients no method takes, is found without the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import promptfed.shared.data.folder as folders
from promptfed.client_service.training.data import check_classes, check_domain, domain_of
from promptfed.experiments.bench.presets import Preset, preset_names, read_preset
from promptfed.experiments.bench.protocols import BaseToNovel
from promptfed.experiments.bench.runner import Job, Runner
from promptfed.experiments.simulation.preparation import expect_usable, open_site, simulated_spec
from promptfed.shared.data import public_sets
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.methods import check_fits, method_for, resolve_spec
from promptfed.shared.methods.core.interface import ClientInfo, ServerContext
from promptfed.shared.spec.spec import BackboneShape, FederationSpec

# Classes, and training and test images of each class (0 of the latter: one undivided set). Sizes of ImageNet and
# SUN397 are cut to what the presets' shots leave of them.
TORCHVISION = {
    "OxfordIIITPet": (37, 99, 99), "Flowers102": (102, 10, 60), "DTD": (47, 40, 40), "Caltech101": (101, 85, 0),
    "Food101": (101, 750, 250), "SUN397": (397, 50, 0), "StanfordCars": (196, 41, 41), "FGVCAircraft": (100, 66, 33),
    "EuroSAT": (10, 2700, 0), "ImageNet": (1000, 20, 5), "CIFAR10": (10, 5000, 1000), "CIFAR100": (100, 500, 100),
}  # fmt: skip
FOLDERS = {
    "ucf101": 101, "pacs": 7, "vlcs": 5, "office_home": 65, "domainnet": 345, "office31": 31,
    "office_caltech_10": 10, "office_home_10": 10, "dermoscopic_fl": 3, "imagenetv2": 1000, "imagenet_sketch": 1000,
    "imagenet_a": 200, "imagenet_r": 200,
}  # fmt: skip
IMAGES = 5  # of each class in a folder
TEN = ("bird", "feather", "headphones", "ice cream", "teapot", "tiger", "whale", "windmill", "wine glass", "zebra")
VIT_B = {"d_v": 768, "vision_layers": 12, "patch_size": 16, "mlp_width": 3072, "positions": 197, "heads_v": 12}
TEXT = {"d_t": 512, "d_e": 512, "text_layers": 12, "context_length": 77, "heads_t": 8}
SHAPES = {
    "ViT-B-16": BackboneShape(**TEXT, **VIT_B, patch_tokens=196),
    "ViT-L-14": BackboneShape(d_t=768, d_v=1024, d_e=768, text_layers=12, vision_layers=24, context_length=77,
        patch_size=14, patch_tokens=256, mlp_width=4096, positions=257, heads_v=16, heads_t=12),
    "RN50": BackboneShape(**TEXT | {"d_e": 1024}, patch_tokens=49),
    "timm:vit_base_patch16_224": BackboneShape(d_e=768, **VIT_B),
}  # fmt: skip


class Labels:
    """A data set of torchvision that has its first image alone, which tells whether pictures have more than 8 bits."""

    def __init__(self, name: str, per_class: int):
        count = TORCHVISION[name][0]
        self.classes = [f"class {number}" for number in range(count)]
        if name == "Caltech101":  # as torchvision lists them; CoOp's split leaves the second one out
            self.classes[20:22] = ["Faces", "Faces_easy"]
        self.targets = torch.arange(count).repeat_interleave(per_class)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        assert row == 0, "an image is read before the first task"
        return Image.new("RGB", (32, 32)), int(self.targets[row])


def labels_only(kind: Any, root: str, way: dict[str, Any], options: object) -> Labels:
    """In the place of a data set that torchvision opens."""
    _, train, test = TORCHVISION[kind.__name__]
    training = not way or way.get("train", way.get("split") in ("train", "trainval"))
    return Labels(kind.__name__, train if training else test)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of empty files, which nobody opens."""
    made = tmp_path_factory.mktemp("data")
    wanted = {
        (Path(body).name, domain) for name in preset_names() for preset in [read_preset(name)]
        for panel in preset.panels() for setting in [preset.setting_of(panel, str(made))] for uri in setting.data
        for scheme, _, body in [uri.partition("?")[0].partition(":")]
        for domain in (setting.domains if "{domain}" in uri else ("",)) if scheme == "folder"
    }  # fmt: skip
    for name, domain in wanted:
        for number in range(FOLDERS[name]):
            folder = made / name / domain / (TEN[number] if number < len(TEN) else f"class {number}")
            folder.mkdir(parents=True)
            for index in range(IMAGES):
                (folder / f"{index}.jpg").touch()
    return made


@pytest.fixture(scope="module")
def sources() -> SharedSources:
    """Each set is opened once for all presets."""
    return SharedSources()


@pytest.fixture(autouse=True)
def without_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_sets, "_load_torchvision", labels_only)
    monkeypatch.setattr(public_sets, "refuse_special_files", lambda *given: None)  # walks all of `root` each time
    monkeypatch.setattr(folders, "_read", lambda items, grey: [replace(item, digest=str(item.path)) for item in items])


def jobs_of(name: str, root: Path) -> Iterator[tuple[Preset, Job]]:
    preset = read_preset(name)
    for panel in preset.panels():
        for job in preset.bench((0,), panel=panel, root=str(root)).jobs():
            yield preset, job


def expect_startable(job: Job, sources: SharedSources) -> None:
    """All that a simulation, its clients and its coordinator check before the first task."""
    sites = job.trial.sites
    expect_usable(sites, pool=1)
    spec = simulated_spec(resolve_spec(job.spec), sites)
    method, shape = method_for(spec), SHAPES[spec.backbone.model]
    check_fits(method, shape)
    clients = [info_of(spec, job, number, sources) for number in range(len(sites))]
    names = tuple(spec.class_names) if spec.class_names is not None else None
    context = ServerContext(spec.training, shape, names, tuple(clients), spec.seed, spec.rounds)
    method.dims(context)
    method.check_clients(context)


def info_of(spec: FederationSpec, job: Job, number: int, sources: SharedSources) -> ClientInfo:
    """A site as the coordinator sees it, once all that its client and its enrolment check has been checked."""
    site, method = job.trial.sites[number], method_for(spec)
    source = open_site(site, sources).source
    names = tuple(spec.class_names) if spec.class_names is not None else None
    space = method.label_space(names, source.class_names)
    check_classes(source.class_names, space)
    check_domain(method, site.role, source)
    method.check_classes(space)
    return ClientInfo(site.name, site.role, len(source.train), source.class_names, domain_of(source))


@pytest.mark.parametrize("name", preset_names())
def test_a_full_size_preset_gets_as_far_as_training(name: str, root: Path, sources: SharedSources) -> None:
    runner, seen = Runner(root / "out", _sources=sources), 0
    for _, job in jobs_of(name, root):
        try:
            runner.look_at_data([job])
            expect_startable(job, sources)
        except Exception as error:
            pytest.fail(f"{job.title}: {type(error).__name__}: {error}")
        seen += 1
    assert seen >= len(read_preset(name).methods)


@pytest.mark.parametrize(
    ("name", "clients"), [("fedtpg-nine-datasets", 30), ("fedtpg-10-classes", 59), ("fedtpg-5-classes", 119)]
)
def test_fedtpg_s_federations_have_the_papers_numbers_of_clients(name: str, clients: int, root: Path) -> None:
    preset = read_preset(f"paper:{name}")
    setting = preset.setting_of("all", str(root))
    [trial] = BaseToNovel().trials(setting, seed=0, personal=False)
    assert len(trial.sites) == clients
