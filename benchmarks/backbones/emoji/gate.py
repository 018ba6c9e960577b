"""The gate of promptfed-emoji: accuracies that it must reach before a benchmark uses it.

    python -m benchmarks.backbones.emoji.gate --data DIR            # the whole set: promptfed data emoji --out DIR

Zero-shot accuracy by style in tasks of 16 names, on pictures of things that pre-training did not read from the same
designer, and the gain by a linear map that is learned on other names and shared by all styles. Exits with 1 if a bar is
missed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.backbones.emoji.corpus import pixels
from benchmarks.backbones.tiny.evaluate import image_features, text_features
from benchmarks.harness import table
from promptfed.shared.clip.emoji import FROM_TINY, MODEL, register, weights_path
from promptfed.shared.clip.tiny import weights_path as tiny_weights
from promptfed.shared.data.emoji import store
from promptfed.shared.data.emoji.splits import splits
from promptfed.shared.data.emoji.styles import COMMON, RARE
from promptfed.shared.seeds import derive_seed

WAYS = 16
TASKS = 400
TEMPLATE = "a photo of a {}."
MAP_RATE, MAP_DECAY, MAP_SCALE = 1e-3, 1.0, 30.0
COMMON_BAND, RARE_BAND, MAP_GAIN, LEAST_RARE = (75, 90), (40, 65), 3.0, 4


def places_to_test(drawn: store.Drawn, style: str, purpose: str) -> list[int]:
    """Places of the things of ``purpose`` that were not read in this style or by its designer in pre-training."""
    known = splits()
    return [
        place
        for place in sorted(drawn.styles.get(style, ()))
        if known.purpose_of(drawn.things[place].name) == purpose and known.testable(drawn.things[place], style, purpose)
    ]


def task_accuracy(image: Tensor, text: Tensor, seed: int, ways: int = WAYS, tasks: int = TASKS) -> float:
    """Accuracy in percent over random tasks of ``ways`` of N things. ``image``, ``text``: unit features (N, d)."""
    rng = np.random.default_rng(derive_seed(seed, "emoji-gate"))
    chosen = torch.from_numpy(np.stack([rng.permutation(len(image))[:ways] for _ in range(tasks)]))
    logits = torch.einsum("twd,tvd->twv", image[chosen], text[chosen])
    return 100.0 * (logits.argmax(2) == torch.arange(chosen.shape[1])).float().mean().item()


@dataclass(frozen=True)
class MapTest:
    """Accuracies on validation things by style, before and after a linear map that is learned on other things."""

    before: dict[str, float]
    after: dict[str, float]

    @property
    def gain(self) -> float:
        """The mean gain in points."""
        return sum(self.after[s] - self.before[s] for s in self.before) / len(self.before)


def linear_map_test(model: open_clip.CLIP, folder: Path, styles: Sequence[str], steps: int = 300) -> MapTest:
    """Learn a linear map of image features on base things, and test it on novel things.

    Base: the things of neither list, in all these styles. Novel: the validation things of `places_to_test`. The map
    x + Wx starts at W = 0 and is trained by cross entropy over the names of the base things.
    """
    drawn, known = store.read(folder), splits()
    model.eval()
    novel = {style: places_to_test(drawn, style, "validation") for style in styles}
    novel = {style: places for style, places in novel.items() if len(places) >= WAYS}
    base = [
        (style, place)
        for style in novel
        for place in sorted(drawn.styles[style])
        if drawn.things[place].testable and known.purpose_of(drawn.things[place].name) is None
    ]
    names = sorted({place for _, place in base})
    text = text_features(model, [drawn.things[place].name for place in names], TEMPLATE)
    image = image_features(model, pixels(drawn, base))
    learned = _learned_map(image, text, torch.tensor([names.index(place) for _, place in base]), steps)
    before, after = {}, {}
    for style, places in novel.items():
        features = image_features(model, pixels(drawn, [(style, place) for place in places]))
        words = text_features(model, [drawn.things[place].name for place in places], TEMPLATE)
        before[style] = task_accuracy(features, words, seed=0)
        after[style] = task_accuracy(F.normalize(features + features @ learned, dim=1), words, seed=0)
    return MapTest(before, after)


def _learned_map(image: Tensor, text: Tensor, labels: Tensor, steps: int) -> Tensor:
    weight = torch.zeros(image.shape[1], image.shape[1], requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=MAP_RATE, weight_decay=MAP_DECAY)
    rng = np.random.default_rng(derive_seed(0, "emoji-map"))
    for _ in range(steps):
        rows = torch.from_numpy(rng.integers(len(image), size=256))
        mapped = F.normalize(image[rows] + image[rows] @ weight, dim=1)
        loss = F.cross_entropy(mapped @ text.T * MAP_SCALE, labels[rows])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return weight.detach()


def zero_shot(
    model: open_clip.CLIP,
    folder: Path,
    styles: Sequence[str],
    purpose: str,
    names: Tensor | None = None,
) -> dict[str, float]:
    """Accuracy by style. ``names`` (all things, d) replaces the text features while the text tower is not trained."""
    drawn = store.read(folder)
    model.eval()
    accuracies = {}
    for style in styles:
        places = places_to_test(drawn, style, purpose)
        if len(places) < WAYS:
            continue
        image = image_features(model, pixels(drawn, [(style, place) for place in places]))
        if names is None:
            text = text_features(model, [drawn.things[place].name for place in places], TEMPLATE)
        else:
            text = F.normalize(names[places], dim=1)
        accuracies[style] = task_accuracy(image, text, seed=0)
    return accuracies


def by_group(
    model: open_clip.CLIP, folder: Path, purpose: str, names: Tensor | None = None
) -> dict[str, dict[str, float]]:
    """`zero_shot` of common styles, of rare ones, and of styles by designers who were not read."""
    unread = [name for name in store.read(folder).styles if name not in (*COMMON, *RARE)]
    groups = {"common": COMMON, "rare": RARE, "unread": unread}
    return {group: zero_shot(model, folder, styles, purpose, names) for group, styles in groups.items()}


def summary_line(model: open_clip.CLIP, folder: Path, purpose: str, names: Tensor | None = None) -> str:
    """Accuracies of all styles on one line."""
    groups = by_group(model, folder, purpose, names).items()
    return "; ".join(f"{group} {' '.join(f'{s} {v:.0f}' for s, v in styles.items())}" for group, styles in groups)


def measure(model: open_clip.CLIP, folder: Path, purpose: str) -> dict[str, Any]:
    """All figures of the gate, in percent and points."""
    groups = by_group(model, folder, purpose)
    unread = [name for name in store.read(folder).styles if name not in (*COMMON, *RARE)]
    mapped = linear_map_test(model, folder, [*RARE, *unread])
    about = {"ways": WAYS, "tasks": TASKS, "purpose": purpose}
    return about | groups | {"map": {"before": mapped.before, "after": mapped.after, "gain": mapped.gain}}


def failures(measured: dict[str, Any]) -> list[str]:
    """Each bar of the gate that is not met."""
    low, high = COMMON_BAND
    missed = [
        f"{style} is {value:.0f}, not {low} to {high}"
        for style, value in measured["common"].items()
        if not low <= value <= high
    ]
    # Styles that were read rarely or never count as rare.
    rare = {**measured["rare"], **measured["unread"]}
    inside = [style for style, value in rare.items() if RARE_BAND[0] <= value <= RARE_BAND[1]]
    if len(inside) < LEAST_RARE:
        missed.append(f"{len(inside)} rare styles are within {RARE_BAND[0]} to {RARE_BAND[1]}, not {LEAST_RARE}")
    if measured["map"]["gain"] < MAP_GAIN:
        missed.append(f"a linear map adds {measured['map']['gain']:.1f} points, not {MAP_GAIN:.0f}")
    return missed


def markdown(measured: dict[str, Any]) -> str:
    """The figures as Markdown tables."""
    groups = {group: measured[group] for group in ("common", "rare", "unread")}
    rows = [[style, group, f"{value:.1f}"] for group, styles in groups.items() for style, value in styles.items()]
    before, after = measured["map"]["before"], measured["map"]["after"]
    mapped = [[style, f"{value:.1f}", f"{after[style]:.1f}"] for style, value in before.items()]
    second = table(["validation's names, style", "zero-shot", "with the map"], mapped)
    return f"{table(['style', 'read', 'zero-shot'], rows, texts=2)}\n\n{second}"


def load(weights: Path) -> open_clip.CLIP:
    """The model with the weights of a file; those of `FROM_TINY` come from promptfed-tiny."""
    register()
    model = open_clip.create_model(MODEL)
    tiny = load_file(tiny_weights())
    model.load_state_dict({**load_file(weights), **{name: tiny[name] for name in FROM_TINY}})
    return model.eval()


def main() -> None:
    """Measure, print, and exit with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the whole set: promptfed data emoji --out DIR")
    parser.add_argument("--weights", type=Path, default=weights_path())
    parser.add_argument("--purpose", choices=("test", "validation"), default="test")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measured = measure(load(args.weights), args.data, args.purpose)
    if args.out:
        args.out.write_text(json.dumps(measured, indent=1) + "\n")
    print(markdown(measured))
    missed = failures(measured)
    for line in missed:
        print(f"not met: {line}")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
