"""Rows before the first changed block: kept once an image, and the same training and answers as from the images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.client_service.serving.prediction import OneImage
from promptfed.client_service.training.data import TRAIN, ClientData
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import open_source
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core.generalization import Subset
from promptfed.shared.methods.core.interface import MethodError
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import Tensors
from tests.support.equality import assert_gradients, assert_values
from tests.support.visual_clients import NAMES, ImageSplit, client_context, server_context, small_backbone

ROWS = torch.arange(6)
LAST = {"trainable": "last_k", "k": 2}
METHODS: list[dict[str, Any]] = [
    {"name": "fedavg", **LAST},
    {"name": "fedavg", **LAST, "head": "linear", "fedsr": True, "d_z": 4},
    {"name": "fedavg", **LAST, "weighting": "ga"},
    {"name": "fedprox", **LAST},
    {"name": "fedrep", **LAST, "head_epochs": 1},
    {"name": "fedbabu", **LAST},
    {"name": "fedrod", **LAST},
    {"name": "perfedavg", **LAST, "head": "linear"},
    {"name": "fedlora", "blocks": "last_k", "k": 1, "dropout": 0.0},
]


class Keeping(ImageSplit):
    """A split that gives rows, and no images."""

    def images(self, indices: Tensor) -> Tensor:
        raise AssertionError("no image is looked at")

    def block_rows(self, indices: Tensor, start: int) -> Tensor:
        tower = self.backbone.vision_tower()
        assert start > 0
        with torch.no_grad():
            return tower.run(tower.rows(self.pixels[indices]), 0, start)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def moved(given: dict[str, Any], backbone: Backbone) -> Tensors:
    context = replace(server_context(backbone, "a"), class_names=tuple(NAMES))
    return make_method(given).initial_state(context, initial_draws(3))


@pytest.mark.parametrize("given", METHODS, ids=lambda given: given["name"])
def test_training_and_answers_are_those_of_the_images(backbone: Backbone, given: dict[str, Any]) -> None:
    state = moved(given, backbone)
    training = {"epochs": 1, "learning_rate": 0.01, "optimizer": "sgd", "batch_size": 3}
    plain = client_context(backbone, **training)
    kept = replace(plain, train=Keeping(plain.train.pixels, plain.train.labels, backbone))
    usual, keeping = make_method(given), make_method(given | {"cache_blocks": True})
    payload = usual.payload_tensors(usual.phases(1, 4)[0])
    handed = {spec.name: state[spec.name] for spec in payload}
    wanted, found = usual.train(plain, handed, {}), keeping.train(kept, handed, {})
    assert set(found.update) == set(wanted.update)
    for name, tensor in wanted.update.items():
        before = handed.get(name, torch.zeros_like(tensor))
        if float((tensor - before).abs().max()) > 0:
            assert_gradients(found.update[name] - before, tensor - before)
    scored = [
        method.classifier(context, handed, result.private).logits(context.train, ROWS)
        for method, context, result in ((usual, plain, wanted), (keeping, kept, found))
    ]
    assert_values(scored[1], scored[0], 1e-4)


def client_data(backbone: Backbone, folder: Path, **bound: int) -> tuple[ClientData, FeatureCache]:
    source, cache = (
        open_source("symbols:sketch?topic=weather&per_class=2&test_per_class=1"),
        FeatureCache(folder, **bound),
    )
    return ClientData(source, backbone, cache), cache


def test_rows_are_computed_once_and_rounded_before_their_first_use(backbone: Backbone, tmp_path: Path) -> None:
    data, cache = client_data(backbone, tmp_path)
    split = data.split(TRAIN, data.class_names)
    indices = torch.tensor([3, 0, 3])
    rows = split.block_rows(indices, 2)
    tower = backbone.vision_tower()
    plain = tower.run(tower.rows(split.images(indices)), 0, 2)
    assert_values(rows, plain, 1e-3)
    assert rows.equal(rows.half().float())
    assert rows[0].equal(rows[2])
    assert cache.blocks(2).images_computed == 2
    split.block_rows(indices, 2)
    assert cache.blocks(2).images_computed == 2
    other = split.block_rows(indices, 1)
    assert cache.blocks(1).images_computed == 2, "rows before another block are others"
    assert not other.equal(rows)
    again, fresh = client_data(backbone, tmp_path)
    assert again.split(TRAIN, data.class_names).block_rows(indices, 2).equal(rows)
    assert fresh.blocks(2).images_computed == 0, "another process reads them"
    picture = open_source("symbols:sketch?topic=weather&per_class=2&test_per_class=1").train.image(3)
    assert_values(OneImage(backbone, picture).block_rows(torch.tensor([0]), 2)[0], rows[0], 1e-3)
    subset = Subset(split, torch.tensor([3, 0]))
    assert subset.block_rows(torch.tensor([1]), 2)[0].equal(rows[1])


def test_rows_on_the_disk_stay_within_the_bound(backbone: Backbone, tmp_path: Path) -> None:
    data, _ = client_data(backbone, tmp_path, max_bytes=1000)
    split = data.split(TRAIN, data.class_names)
    kept = [split.block_rows(torch.tensor([row]), 2) for row in range(6)]
    files = list((tmp_path / "blocks").rglob("*.safetensors"))
    assert 0 < sum(path.stat().st_size for path in files) <= 1000
    assert 1 <= len(files) < 6
    assert all(split.block_rows(torch.tensor([row]), 2).equal(rows) for row, rows in enumerate(kept)), "made again"


def test_it_is_refused_where_nothing_could_be_kept(backbone: Backbone, tmp_path: Path) -> None:
    refused = [
        ({"name": "fedavg", **LAST}, {"augmentation": "crop_flip"}, "leave one of them out"),
    ]
    for method, training, text in refused:
        with pytest.raises(SpecError, match=text):
            resolve_spec({"name": "x", "method": method | {"cache_blocks": True}, "training": training})
    data, _ = client_data(backbone, tmp_path)
    with pytest.raises(MethodError, match="change from step to step"):
        data.augmented(data.class_names, 1, "x").block_rows(torch.tensor([0]), 2)
