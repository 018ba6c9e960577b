"""Pre-training of promptfed-emoji: what it reads, its three stages, going on after a stop, and how the gate counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

from benchmarks.backbones.emoji.corpus import Corpus, Recipe, augmented, captions, corpus, draw, read_cells
from benchmarks.backbones.emoji.gate import places_to_test, task_accuracy
from benchmarks.backbones.emoji.pretrain import Training, run, started, stretched
from benchmarks.backbones.emoji.readlist import NEAR_BITS, perceptual, read_list, write_read_list
from benchmarks.backbones.tiny.evaluate import text_features
from benchmarks.backbones.training import save_weights
from promptfed.shared.clip import BackboneError, load_backbone
from promptfed.shared.clip.emoji import FROM_TINY, MODEL, PRETRAINED
from promptfed.shared.clip.tiny import weights_path
from promptfed.shared.data import open_source
from promptfed.shared.data.emoji import store
from promptfed.shared.data.emoji.source import FOLDER
from promptfed.shared.data.emoji.splits import splits
from promptfed.shared.data.emoji.styles import COMMON, RARE, STYLES, UNREAD_FAMILIES

SHORT = Recipe(classifier_steps=2, text_steps=2, joint_steps=2, batch=8, text_batch=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty things in the embedded styles."""
    torch.set_num_threads(1)
    drawn, out = store.read(FOLDER), tmp_path_factory.mktemp("emoji") / "few"
    styles = {name: {k: by[k] for k in range(60) if k in by} for name, by in drawn.styles.items()}
    store.write(out, store.Drawn(drawn.things[:60], styles), [])
    return out


@pytest.fixture(scope="module")
def source(folder: Path) -> Corpus:
    return corpus(folder)


def test_nothing_that_may_be_tested_is_read() -> None:
    drawn, known = store.read(FOLDER), splits()
    read = read_cells(drawn, known)
    assert len(read) > 1000
    for style, place in read:
        name = drawn.things[place].name
        assert style in (*COMMON, *RARE)
        assert STYLES[style].family not in UNREAD_FAMILIES
        for other in STYLES.values():
            if other.family == STYLES[style].family:
                for purpose in ("test", "validation"):
                    assert not known.testable(drawn.things[place], other.name, purpose), (style, name)
    tested = {("noto", p) for p in places_to_test(drawn, "noto", "test")}
    assert len(tested) > 80
    assert not tested & set(read)


def test_rare_styles_have_their_share(source: Corpus) -> None:
    recipe = Recipe(rare_share=0.1)
    rows = np.concatenate([draw(source, recipe, 0, step, 500)[0] for step in range(8)])
    drawn = np.bincount(source.style[rows], minlength=len(source.styles)) / len(rows)
    present = [source.styles.index(name) for name in ("contrast", "notomono")]
    # Of the whole set's shares those of the styles that are here: 2 x 0.1 against 4 x 0.6 / 7.
    assert drawn[present].sum() == pytest.approx(0.2 / (0.2 + 4 * 0.6 / 7), abs=0.03)


def test_augmentation_keeps_shape_and_range_and_turns_each_picture(source: Corpus) -> None:
    rng = np.random.default_rng(0)
    pictures = source.pictures[[0] * 16]
    out = augmented(pictures, rng, Recipe())
    assert out.shape == pictures.shape
    assert out.min() >= 0
    assert out.max() <= 1
    assert len({tuple(image.mean((1, 2)).tolist()) for image in out}) == 16


def test_captions_are_true_of_what_they_say(source: Corpus) -> None:
    rows, rng = draw(source, SHORT, 0, 0, 64)
    said = captions(source, rows, rng)
    assert said.target.shape == (64, 64)
    assert said.target.diagonal().eq(1).all()
    thing = torch.from_numpy(source.thing[rows])
    kind = torch.from_numpy(source.kind[rows])
    true = said.target.bool()
    assert (kind[:, None] == kind[None])[true].all()
    same = thing[:, None] == thing[None]
    named = said.thing >= 0
    assert torch.equal(said.thing[named], thing[named])
    assert 0 < (~named).sum() < 20
    assert torch.equal(true[:, ~named], (kind[:, None] == kind[None])[:, ~named])
    assert (true & ~same).any()  # a kind's caption fits other things of the kind
    assert (same & ~true).any()  # a style's caption does not fit the thing in another style


def test_it_starts_as_the_tiny_backbone_with_positions_stretched() -> None:
    tiny = load_file(weights_path())
    model = started(0)
    assert model.visual.positional_embedding.shape == (65, 128)
    assert torch.equal(model.visual.conv1.weight, tiny["visual.conv1.weight"].float())
    assert not model.token_embedding.weight.requires_grad
    flat = torch.cat([torch.zeros(1, 3), torch.full((36, 3), 2.5)])
    assert torch.allclose(stretched(flat, 8)[1:], torch.full((64, 3), 2.5))
    scratch = started(0, from_tiny=False)
    assert torch.equal(scratch.token_embedding.weight, model.token_embedding.weight)
    assert not torch.equal(scratch.visual.conv1.weight, model.visual.conv1.weight)


def test_training_that_stopped_goes_on_as_if_it_had_not(folder: Path, tmp_path: Path) -> None:
    """Through all three stages; the file holds what changed, and the list of what was read."""
    for out, stops in (("once", (99,)), ("twice", (3, 99))):
        for until in stops:
            run(Training(folder, SHORT, 0), tmp_path / out, folder, until, save_every=1, check_every=0)
    once, twice = (load_file(tmp_path / out / "weights.safetensors") for out in ("once", "twice"))
    assert set(once) == set(load_file(weights_path())) - set(FROM_TINY)
    assert all(torch.equal(once[name], twice[name]) for name in once)
    before = started(0).state_dict()
    assert not torch.equal(once["visual.proj"].float(), before["visual.proj"])
    assert not torch.equal(once["text_projection"].float(), before["text_projection"])
    listed = read_list(tmp_path / "once" / "read.txt.gz")
    assert len(listed.cells) == len(read_cells(store.read(folder), splits()))
    other = Training(folder, Recipe(rare_share=0.05), 0)
    with pytest.raises(ValueError, match="of another recipe or seed"):
        run(other, tmp_path / "once", folder, 99, save_every=1, check_every=0)


def test_each_stage_trains_its_own_towers(folder: Path) -> None:
    training = Training(folder, SHORT, 0)
    seen = []
    for _ in range(SHORT.steps):
        stage = training.stage
        before = {name: value.clone() for name, value in training.model.state_dict().items()}
        training.advance()
        changed = {name for name, value in training.model.state_dict().items() if not torch.equal(value, before[name])}
        towers = {"image" if name.startswith("visual.") else "text" for name in changed - {"logit_scale"}}
        seen.append((stage, sorted(towers)))
    assert seen == [(0, ["image"])] * 2 + [(1, ["text"])] * 2 + [(2, ["image", "text"])] * 2


def test_the_text_tower_learns_the_vectors_of_all_names(folder: Path) -> None:
    """Of a batch's captions alone it would know only those of the batch."""
    training = Training(folder, Recipe(classifier_steps=0, text_steps=40, joint_steps=1, text_batch=48), 0)
    vectors = F.normalize(training.heads.names.weight.detach(), dim=1)
    names = [training.source.names[k] for k in range(20)]

    def agreement() -> float:
        text = text_features(training.model, names, "a photo of a {}.")
        return float((text * vectors[:20]).sum(1).mean())

    before = agreement()
    for _ in range(30):
        training.advance()
    assert agreement() > before + 0.1


def test_it_is_loaded_from_its_file_and_the_tiny_backbone_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = load_backbone(MODEL, PRETRAINED)
    monkeypatch.setattr("promptfed.shared.clip.emoji.weights_path", lambda: tmp_path / "weights.safetensors")
    with pytest.raises(BackboneError, match="no weights in this version of promptfed: use promptfed-tiny"):
        load_backbone(MODEL, PRETRAINED)
    model = started(3)
    save_weights(model, tmp_path / "weights.safetensors", FROM_TINY)
    loaded = load_backbone(MODEL, PRETRAINED)
    assert loaded.image_size == (64, 64)
    assert torch.equal(loaded.model.token_embedding.weight, model.token_embedding.weight)
    half = model.visual.proj.detach().half().float()
    assert torch.equal(loaded.model.visual.proj, half)
    assert load_backbone(MODEL, "random").fingerprint != loaded.fingerprint
    assert shipped.fingerprint != loaded.fingerprint


def test_the_shipped_weights_name_what_no_designer_of_theirs_drew() -> None:
    """FxEmoji's designer was not read: eight things in a style of their own, far above the chance of one in eight."""
    names = ("cat", "banana", "grapes", "key", "mushroom", "spider", "tulip", "wine glass")
    source = open_source(f"emoji:fxemoji?level=names&only={','.join(names)}")
    backbone = load_backbone(MODEL, PRETRAINED)
    image = torch.stack([backbone.preprocess(source.test.image(k)) for k in range(len(source.test))])
    with torch.no_grad():
        features = F.normalize(backbone.model.encode_image(image), dim=1)
    text = text_features(backbone.model, list(source.class_names), "a photo of a {}.")
    right = (features @ text.T).argmax(1) == source.test.labels
    assert int(right.sum()) >= len(names) // 2


def test_the_gate_counts_tasks_of_sixteen() -> None:
    unit = F.normalize(torch.randn(40, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    assert task_accuracy(unit, unit, seed=0) == 100
    other = F.normalize(torch.randn(40, 64, generator=torch.Generator().manual_seed(1)), dim=1)
    assert task_accuracy(unit, other, seed=0) == pytest.approx(100 / 16, abs=5)


def test_no_test_picture_nor_a_near_copy_of_one_is_in_what_is_read() -> None:
    """By content: what is listed as read in pre-training against each embedded picture that may be tested on."""
    listed, drawn, known = read_list(), store.read(FOLDER), splits()
    assert len(listed.cells) > 9000
    assert {style for style, _ in listed.cells} == {*COMMON, *RARE}
    read = set(listed.digests)
    assert {drawn.digest(*cell)[:16] for cell in read_cells(drawn, known)} <= read  # it lists what it should
    tested = [
        (style, place)
        for style, by_place in drawn.styles.items()
        for place in by_place
        if any(known.testable(drawn.things[place], style, purpose) for purpose in ("test", "validation"))
    ]
    assert len(tested) > 1000
    leaked = [cell for cell in tested if drawn.digest(*cell)[:16] in read or listed.near(drawn.image(*cell))]
    assert [(style, drawn.things[place].name) for style, place in leaked] == []


def test_a_near_copy_is_found_and_another_picture_is_not(folder: Path, tmp_path: Path) -> None:
    write_read_list(folder, tmp_path / "read.txt.gz")
    listed, drawn = read_list(tmp_path / "read.txt.gz"), store.read(folder)
    cells = read_cells(drawn, splits())
    style, place = next(cell for cell in cells if cell[0] == "noto")
    row, image = cells.index((style, place)), drawn.image(style, place)
    assert listed.cells[row] == (style, drawn.things[place].name)
    assert listed.digests[row] == drawn.digest(style, place)[:16]
    assert row in listed.near(image)
    nearly = image.resize((48, 48), Image.Resampling.BILINEAR).rotate(1, fillcolor="white")
    assert row in listed.near(nearly)
    assert row not in listed.near(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).rotate(90))
    bits, _ = perceptual(image)
    assert (bits != perceptual(nearly)[0]).sum() <= NEAR_BITS
