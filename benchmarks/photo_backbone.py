"""The part of `promptfed-photo` that is the project's own: a projection, and a text tower for an ImageNet classifier.

`python -m benchmarks.backbone photo` makes it. The classifier has one row for each of 1,000 names. Images are projected
onto the subspace that holds most of the rows, and a text tower learns to put templates with names on them. No picture
is read: the mean image feature follows from the last norm's running statistics.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import open_clip
import timm.data
import torch
import torch.nn.functional as F
from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.backbone import descend, encode, fresh_model, learning_rate, optimizer_of, pad, pooled_short, set_rate
from promptfed.shared.clip import load_backbone
from promptfed.shared.clip.embedded import KNOWN, ROWS, TABLE, drawn_rows, photo, tiny
from promptfed.shared.clip.towers import plain
from promptfed.shared.data.options import STAMPS
from promptfed.shared.data.photographs import squared
from promptfed.shared.seeds import derive_seed

PLAIN = "a photo of a {}."
TEMPLATES = (*(template("{}") for template in OPENAI_IMAGENET_TEMPLATES), "{}", "a {}.", "the {}", "a picture of a {}.")
REFITTED = (PLAIN, "{}", "a {}.", "the {}", "a close-up photo of a {}.", "a picture of a {}.")
"""Templates for which the last layer is solved after training."""
START = 49_406  # the first token that is no part of a word
SCALE, LOGIT_SCALE = 20.0, 25.0  # of cosines: in the loss, and of the model
SYNONYMS, UNKNOWN, MOST_UNKNOWN, USUAL = 0.15, 0.3, 8, 0.25
"""Shares of texts: another word of WordNet's for the name; up to so many random words before it; the usual template."""


GROUPS = """
animal 0-397; bird 7-24 80-100 127-146; fish 0-6 389-397; shark 2-4; frog 30-32; amphibian 25-32; turtle 33-37;
lizard 38-48; snake 52-68; reptile 33-68; spider 72-77; insect 300-326; beetle 300-307; butterfly 321-326;
crab 118-121 125; mammal 101-106 147-299 330-388; whale 147-148; dog 151-268; puppy 151-268; hound 160-176;
terrier 179-203; retriever 205-209; spaniel 216-221; wolf 269-271; fox 277-280; cat 281-285; kitten 281-285;
bear 294-297; rabbit 330-332; rodent 333-338; horse 339; cow 345-347; sheep 348-349; ape 365-369; monkey 370-382;
elephant 385-386; parrot 87-90; duck 97-98; penguin 145; crocodile 49-50; car 436 468 511 609 627 656 661 751 817;
truck/lorry 555 569 717 864 867; bus 654 779 874; train 466 547 705 820 829; airplane/plane 404 895;
boat 472 554 576 625 814 914; ship 403 510 628 724 780; bicycle/bike 444 671; motorcycle/motorbike 665 670;
vehicle 403-404 407-408 436 444 466 468 511 547 555 569 573 609 627 654 656 661 665 671 705 717 734 751 779 817 820
847 864 866-867 870;
building 425 437 449 483 497 580 663 668 698; chair 423 559 765 857; bed 431 516 520 564; table 526 532 736;
furniture 423 453 493 495 520 526 532 553 559 564 703 765 831 857 894; clock 409 530 892; computer 527 590 620 681;
telephone/phone 487 528 707;
clothing 399-400 411 445 459 474 501 568 578 601 608 610 614 617 638-639 655 689 697 735 775 834 841-842 869 887;
hat 439 452 515 667 808; shoe 502 514 630 770 774; tool 473 477 512 587 596 677 726 731 740 783-784 792 813;
weapon 413 471 763-764; bottle 440 720 737 898 907;
musical instrument 401-402 420 432 486 513 541 546 558 566 577 579 593-594 641-642 683-684 687 699 776 822 875 881 889;
guitar 402 546; piano 579 881; ball 429-430 522 574 722 768 805 852 890; cup/mug 504 968; fruit 948-957; apple 948;
vegetable 936-946; bread 930-931; fungus/mushroom 947 991-997; flower 985-986; food 924-935 959-965; drink 966-967 969;
mountain 970 979-980; coast/beach 975-978; person/man/woman 981-983
"""
"""Words of everyday language for several of ImageNet's classes, by number: they lie on the mean of these rows."""


class Text(NamedTuple):
    """Words for one meaning, the first of them the usual one; the classes `(1000,)` that it is of, as shares."""

    words: Sequence[str]
    classes: Tensor


class Head(NamedTuple):
    """``projection`` `(d_e, 1280)` and ``bias`` `(d_e,)` of image features, ``rows`` `(1000, d_e)`: unit directions."""

    projection: Tensor
    bias: Tensor
    rows: Tensor


def mean_feature(trunk: plain.EfficientNetLite0) -> Tensor:
    """The mean `(1280,)` of a feature over the images that the last norm's statistics are of.

    Before ReLU6 a channel has the norm's bias as mean and its weight as deviation; it is taken as normal.
    """
    mean, deviation = trunk.bn2.bias.double(), trunk.bn2.weight.double().abs()

    def above(mean: Tensor) -> Tensor:  # the mean of max(0, x)
        ratio = mean / deviation
        density = (-ratio.square() / 2).exp() / math.sqrt(2 * math.pi)
        result: Tensor = mean * torch.special.ndtr(ratio) + deviation * density
        return result

    return (above(mean) - above(mean - 6)).float()


@torch.no_grad()
def head_of(trunk: plain.EfficientNetLite0, classifier: Tensor, width: int) -> Head:
    """Project onto the ``width`` first singular directions of the classifier's centred rows `(1000, 1280)`."""
    centred = classifier - classifier.mean(0)
    projection = torch.linalg.svd(F.normalize(centred, dim=-1), full_matrices=False)[2][:width].half().float()
    bias = -(projection @ mean_feature(trunk))
    return Head(projection, bias, F.normalize(centred @ projection.T, dim=-1))


def meanings() -> tuple[list[Text], list[Text]]:
    """The classifier's names, and the groups."""
    named = [Text(words, row) for words, row in zip(wordnet_names(), torch.eye(len(IMAGENET_CLASSNAMES)), strict=True)]
    groups = []
    for group in filter(None, re.split(r";\s*", GROUPS.strip())):
        words, numbers = re.split(r"\s+(?=[0-9])", group, maxsplit=1)
        ends = [[int(end) for end in part.split("-")] for part in numbers.split()]
        of = [number for first, *last in ends for number in range(first, (last or [first])[0] + 1)]
        several = [
            re.sub("([^aeo])ys$", r"\1ies", re.sub("([sx])s$", r"\1es", f"{word}s")) for word in words.split("/")
        ]
        groups.append(
            Text((*words.split("/"), *several), torch.zeros(len(named)).index_fill_(0, torch.tensor(of), 1 / len(of)))
        )
    return named, groups


def wordnet_names() -> list[list[str]]:
    """For each of the 1,000 classes open_clip's name, and WordNet's other words for it."""
    folder = Path(timm.data.__file__).with_name("_info")
    synsets = (folder / "imagenet_synsets.txt").read_text().split()
    lines = (folder / "imagenet_synset_to_lemma.txt").read_text().splitlines()
    words = {line[:9]: line[9:].strip().split(", ") for line in lines}
    named = zip(IMAGENET_CLASSNAMES, synsets, strict=True)
    return [[name, *(w for w in words[synset] if w.lower() != name.lower())] for name, synset in named]


class KnownTokens(nn.Module):
    """A table of tokens in which only the rows of some are trained."""

    def __init__(self, table: Tensor, ids: Sequence[int]) -> None:
        super().__init__()
        self.ids, self.table = torch.tensor(ids), table
        self.rows = nn.Parameter(table[self.ids].clone())
        self.place = torch.full((len(table),), -1).index_put((self.ids,), torch.arange(len(ids)))

    def forward(self, ids: Tensor) -> Tensor:
        place = self.place[ids]
        return torch.where((place >= 0).unsqueeze(-1), self.rows[place.clamp(min=0)], self.table[ids])


def tokens_of(rng: np.random.Generator, texts: Sequence[Text]) -> Tensor:
    """Tokens `(B, L)` of one sentence for each text."""
    rows = []
    for text in texts:
        name = text.words[int(rng.integers(len(text.words))) if rng.random() < SYNONYMS else 0]
        if rng.random() < UNKNOWN:
            unknown = rng.integers(256, START, size=rng.integers(1, MOST_UNKNOWN + 1)).tolist()
            rows.append(unknown + list(encode(name + str(rng.choice(["", "."])))))
        else:
            template = PLAIN if rng.random() < USUAL else str(rng.choice(TEMPLATES))
            rows.append(list(encode(template.format(name))))
    return pad(rows)


@torch.enable_grad()
def train(head: Head, args: argparse.Namespace) -> open_clip.CLIP:
    """The text tower for ``head``; the image tower of the model stays as it was drawn."""
    model, (names, groups) = fresh_model(photo.MODEL, args.seed, "pretrain", "initial"), meanings()
    table = drawn_rows(load_file(tiny.weights_path())[TABLE].float(), photo.config()["text_cfg"]["width"])
    token_ids = {token for text in (*names, *groups) for word in text.words for token in encode(word)}
    token_ids |= {token for template in TEMPLATES for token in encode(template.format("x"))}
    model.token_embedding = KnownTokens(table, sorted(token_ids | set(pad([[]])[0].tolist())))
    trained = [p for name, p in model.named_parameters() if not name.startswith("visual") and name != "logit_scale"]
    optimizer, start = optimizer_of(trained, args.lr), time.monotonic()
    left: list[int] = []
    for step in range(args.steps):
        rng = np.random.default_rng(derive_seed(args.seed, "pretrain", step))
        if len(left) < args.batch:
            left = rng.permutation(len(names)).tolist()
        texts = [names[number] for number in left[: args.batch]]
        texts += [groups[number] for number in rng.permutation(len(groups))[: args.batch // 6]]
        left, classes = left[args.batch :], torch.stack([text.classes for text in texts])
        unit = F.normalize(pooled_short(model, tokens_of(rng, texts)) @ model.text_projection, dim=-1)
        wrong = 1 - (unit * F.normalize(classes @ head.rows, dim=-1)).sum(-1).mean()
        loss = F.cross_entropy(SCALE * unit @ head.rows.T, classes) + wrong
        set_rate(optimizer, learning_rate(step, args.steps, args.lr))
        descend(optimizer, loss, trained)
        if step % 50 == 49:
            print(f"step {step + 1} loss {loss.item():.3f} {time.monotonic() - start:.0f} s", flush=True)
    return model.eval()


@torch.no_grad()
def refit(model: open_clip.CLIP, head: Head) -> None:
    """Solve for the last layer: least squares from pooled texts to their rows."""
    names, groups = meanings()
    sentences = [(template.format(text.words[0]), text) for template in REFITTED for text in (*names, *groups)]
    inputs = torch.cat(
        [
            pooled_short(model, pad([list(encode(sentence)) for sentence, _ in sentences[at : at + 100]]))
            for at in range(0, len(sentences), 100)
        ]
    ).double()
    targets = F.normalize(torch.stack([text.classes for _, text in sentences]) @ head.rows, dim=-1).double()
    ridge = 0.1 * torch.eye(inputs.shape[1], dtype=torch.float64)
    model.text_projection.copy_(torch.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ targets))


def captioned(folder: Path = STAMPS) -> list[tuple[Path, set[int]]]:
    """Photographs of tuxpaint-stamps-default whose caption has names of ImageNet, with the numbers of these."""
    names, found = wordnet_names(), []
    for picture in sorted(folder.rglob("*.png")):
        text = picture.with_suffix(".txt")
        if text.is_file() and not {"cartoon", "symbols"} & set(re.split(r"[/_.]", str(picture.relative_to(folder)))):
            caption = text.read_text(encoding="utf-8", errors="replace").partition("\n")[0].lower()
            said = f" {re.sub('[^a-z ]', ' ', caption.strip(' .!'))} "
            right = {number for number, words in enumerate(names) if any(f" {word.lower()} " in said for word in words)}
            if right:
                found.append((picture, right))
    return found


@torch.no_grad()
def report(classifier: Tensor, offset: Tensor) -> None:
    """Print how many captioned photographs are named right, by the classifier and by the backbone's texts."""
    pictures, backbone = captioned(), load_backbone(photo.MODEL, photo.PRETRAINED)
    if not pictures:
        print("no photographs to name: apt-get install tuxpaint-stamps-default")
        return
    right = torch.zeros(len(pictures), len(classifier), dtype=torch.bool)
    for row, (_, numbers) in enumerate(pictures):
        right[row, list(numbers)] = True
    visual, prepared = backbone.model.visual, [backbone.preprocess(squared(path)) for path, _ in pictures]
    features = torch.cat([visual.trunk(image.unsqueeze(0)) for image in prepared])
    texts = backbone.encode_text([PLAIN.format(name) for name in IMAGENET_CLASSNAMES])
    present = right.any(0)
    for by, scores in (("classifier", features @ classifier.T + offset), ("texts", visual.head(features) @ texts.T)):
        shares = [
            right.gather(1, scores.masked_fill(~kept, -math.inf).argmax(-1, keepdim=True)).float().mean()
            for kept in (torch.ones_like(present), present)
        ]
        print(f"{by}: {shares[0]:.1%} right of all names, {shares[1]:.1%} of the {int(present.sum())} present")
    print(f"{len(pictures)} photographs; deviation of a share about {math.sqrt(0.25 / len(pictures)):.1%}")


@torch.no_grad()
def make(args: argparse.Namespace) -> None:
    """Train, write the file, and print the accuracy."""
    args.steps, args.batch, args.lr = args.steps or 1500, args.batch or 96, args.lr or 2e-3
    assert photo.tower is not None
    tensors, trunk = photo.tower.read(None), plain.EfficientNetLite0()
    trunk.load_state_dict(dict(zip(trunk.state_dict(), tensors, strict=False)))
    head = head_of(trunk, tensors[-2], photo.config()["embed_dim"])
    model = train(head, args)
    refit(model, head)
    model.logit_scale.fill_(math.log(LOGIT_SCALE))
    embedding = model.token_embedding
    state = {name: value for name, value in model.state_dict().items() if not name.startswith(("visual.", TABLE))}
    state.pop("token_embedding.rows")
    state |= {"visual.head.proj.weight": head.projection, "visual.head.proj.bias": head.bias, ROWS: embedding.rows}
    halves = {name: value.half().contiguous() for name, value in state.items()}
    photo.file = Path(args.out).absolute() if args.out else photo.file
    save_file(halves | {KNOWN: embedding.ids.to(torch.int32)}, photo.weights_path())
    report(tensors[-2], tensors[-1])
