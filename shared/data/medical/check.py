"""What may be wrong with labelled images: duplicates, splits, labels, odd images, burnt-in text.

Each finding is a kind, the rows it is about, and a sentence for the owner.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import imagehash
import numpy as np
from PIL import Image
from scipy import ndimage
from tqdm import tqdm

from promptfed.shared.data.source import Origin, Split

SIDE = 32  # of the small copies that near duplicates are compared by
HASH_BITS = 10  # of 64, in which the perceptual hashes of near duplicates may differ
ALIKE = 0.97  # the least correlation of near duplicates' small copies
RARE = 5  # images of a class
FLAT = 2.0  # the standard deviation of grey levels of an image that shows something
AREA, ASPECT = 4.0, 2.0  # times the median's, at which a size is odd
DIVISIONS = 5  # of the images into folds, over which the probes' answers are means
_CHUNK = 64

KINDS = {
    "unreadable": "files that cannot be read",
    "duplicate": "equal images within a split",
    "duplicate across splits": "equal images in train and in test",
    "near duplicate": "nearly equal images within a split",
    "near duplicate across splits": "nearly equal images in train and in test",
    "patient in both splits": "patients with images in train and in test",
    "conflicting labels": "equal or nearly equal images with different labels",
    "rare class": f"classes with fewer than {RARE} images",
    "label error": "labels that the other images contradict",
    "odd size": "images of another size or shape than most",
    "uniform": "images that show nothing",
    "text": "images with a box that looks like burnt-in text",
}


@dataclass(frozen=True)
class Finding:
    """One thing that may be wrong with the images at ``rows``."""

    kind: str
    rows: tuple[int, ...]
    text: str


@dataclass
class Looks:
    """What is seen of each image."""

    class_names: tuple[str, ...]
    labels: np.ndarray  # (N,) or (N, C)
    groups: Sequence[str] | None
    origins: list[Origin]
    in_train: np.ndarray | None  # (N,) bool; None where nothing says which images are for training
    digests: list[str] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    small: list[np.ndarray] = field(default_factory=list)
    deviations: list[float] = field(default_factory=list)
    texts: list[tuple[int, int, int, int] | None] = field(default_factory=list)


def look(split: Split, class_names: tuple[str, ...], in_train: np.ndarray | None) -> Looks:
    """Read every image of ``split`` once."""
    origins = [split.origin(row) for row in range(len(split))]
    looks = Looks(class_names, split.labels.numpy(), split.groups, origins, in_train)
    for row in tqdm(range(len(split)), "images", leave=False, disable=None):
        if row % _CHUNK == 0:
            split.expect(range(row, min(row + _CHUNK, len(split))))
        image = split.image(row)
        grey = image.convert("L")
        looks.digests.append(split.digest(row))
        looks.hashes.append(int(str(imagehash.phash(grey)), 16))
        looks.sizes.append(image.size)
        looks.small.append(np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BOX)))
        looks.deviations.append(float(np.asarray(grey).std()))
        looks.texts.append(text_box(np.asarray(grey)))
    return looks


def findings(looks: Looks, label_errors: Sequence[int] = ()) -> list[Finding]:
    """Everything but unreadable files; ``label_errors``: the rows that `suspected_labels` found."""
    equal = [rows for rows in _together(looks.digests).values() if len(rows) > 1]
    near = list(_near(looks))
    found = [*_pairs(looks, equal, ""), *_pairs(looks, near, "near "), *_patients(looks)]
    for rows in (*equal, *near):
        if len({looks.labels[row].tobytes() for row in rows}) > 1:
            found.append(Finding("conflicting labels", tuple(rows), "the same picture has different labels"))
    found += _rare(looks)
    found += [Finding("label error", (row,), f"it hardly looks like {_name(looks, row)}") for row in label_errors]
    return [*found, *_odd(looks)]


def _name(looks: Looks, row: int) -> str:
    return repr(looks.class_names[int(looks.labels[row])])


def _together(values: Sequence[str]) -> dict[str, list[int]]:
    together = defaultdict(list)
    for row, value in enumerate(values):
        together[value].append(row)
    return together


def _pairs(looks: Looks, alike: Sequence[Sequence[int]], near: str) -> Iterator[Finding]:
    for rows in alike:
        across = looks.in_train is not None and len({bool(looks.in_train[row]) for row in rows}) > 1
        kind = f"{near}duplicate{' across splits' if across else ''}"
        yield Finding(kind, tuple(rows), f"{len(rows)} images are {'nearly ' if near else ''}equal")


def _near(looks: Looks) -> Iterator[list[int]]:
    """Pairs of images that differ in few bits of their hashes and hardly in their small copies."""
    shown = [row for row, deviation in enumerate(looks.deviations) if deviation >= FLAT]
    if not shown:
        return
    hashes = np.array([looks.hashes[row] for row in shown], dtype=np.uint64)
    small = np.stack([looks.small[row] for row in shown]).reshape(len(shown), -1)
    for place in range(len(shown) - 1):
        bits = np.bitwise_count(hashes[place + 1 :] ^ hashes[place])
        for other in np.flatnonzero(bits <= HASH_BITS) + place + 1:
            if looks.digests[shown[place]] == looks.digests[shown[other]]:
                continue
            if np.corrcoef(small[place], small[other])[0, 1] >= ALIKE:
                yield [shown[place], shown[other]]


def _patients(looks: Looks) -> Iterator[Finding]:
    """By the splits that the data give: a split by seed keeps patients whole."""
    of_patient = defaultdict(list)
    for row, group in enumerate(looks.groups or ()):
        of_patient[group].append(row)
    for rows in of_patient.values():
        if len({looks.origins[row].split for row in rows}) > 1:
            yield Finding("patient in both splits", tuple(rows), f"{len(rows)} images are of one patient")


def _rare(looks: Looks) -> Iterator[Finding]:
    for place, name in enumerate(looks.class_names):
        has = looks.labels == place if looks.labels.ndim == 1 else looks.labels[:, place] == 1
        if has.sum() < RARE:
            yield Finding("rare class", tuple(np.flatnonzero(has).tolist()), f"{name!r} has {has.sum()} images")


def _odd(looks: Looks) -> Iterator[Finding]:
    sides = np.array(looks.sizes, dtype=float)
    area, aspect = np.log(sides.prod(1)), np.log(sides[:, 0] / sides[:, 1])
    odd = np.abs(area - np.median(area)) > np.log(AREA)
    odd |= np.abs(aspect - np.median(aspect)) > np.log(ASPECT)
    for row, (width, height) in enumerate(looks.sizes):
        if odd[row]:
            yield Finding("odd size", (row,), f"it has {width} x {height} pixels")
        if looks.deviations[row] < FLAT:
            yield Finding("uniform", (row,), "all of it has nearly one grey level")
        if looks.texts[row] is not None:
            yield Finding("text", (row,), "it has a line of what may be letters: do they name the patient?")


def text_box(grey: np.ndarray) -> tuple[int, int, int, int] | None:
    """Left, top, right and bottom of the longest line of at least four shapes like letters; ``grey`` (H, W) uint8.

    Burnt-in letters are at an end of the grey scale, small, of one height, beside each other.
    """
    best: list[tuple[int, int, int, int]] = []
    for mask in (grey >= 240, grey <= 15):
        if not 0 < mask.mean() < 0.25:
            continue
        parts, _ = ndimage.label(mask, np.ones((3, 3)))
        boxes = [(x.start, y.start, x.stop, y.stop) for y, x in ndimage.find_objects(parts)]
        letters = [box for box in boxes if _is_letter(box)]
        for line in _lines(letters):
            best = max(best, line, key=len)
    if len(best) < 4:
        return None
    edges = np.array(best)
    return int(edges[:, 0].min()), int(edges[:, 1].min()), int(edges[:, 2].max()), int(edges[:, 3].max())


def _is_letter(box: tuple[int, int, int, int]) -> bool:
    width, height = box[2] - box[0], box[3] - box[1]
    return 5 <= height <= 48 and width <= 1.6 * height


def _lines(letters: list[tuple[int, int, int, int]]) -> Iterator[list[tuple[int, int, int, int]]]:
    """Letters one after the other, of nearly one height, with gaps of at most one and a half heights."""
    rest = sorted(letters)
    while rest:
        line = [rest.pop(0)]
        for box in list(rest):
            last = line[-1]
            high = last[3] - last[1]
            level = abs(box[3] - last[3]) <= 0.35 * high and abs((box[3] - box[1]) - high) <= 0.5 * high
            if level and 0 <= box[0] - last[2] <= 1.5 * high:
                line.append(box)
                rest.remove(box)
        yield line


def suspected_labels(labels: np.ndarray, features: np.ndarray, groups: Sequence[str] | None) -> list[int]:
    """Rows whose labels cross-validated linear probes contradict (confident learning, Northcutt et al. 2021).

    labels: (N,) classes; rows of classes with fewer than `RARE` images or patients are not judged. features: (N, D).
    """
    from cleanlab.filter import find_label_issues
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    own_group = groups if groups is not None else range(len(labels))
    number = {group: k for k, group in enumerate(dict.fromkeys(own_group))}  # draws do not depend on names
    units = np.array([number[group] for group in own_group])
    each = {label: len(set(units[labels == label])) for label in Counter(labels.tolist()) if label >= 0}
    judged = np.flatnonzero(np.isin(labels, [label for label, count in each.items() if count >= RARE]))
    classes, own = np.unique(labels[judged], return_inverse=True)
    if len(classes) < 2:
        return []
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    told = np.zeros((len(judged), len(classes)))
    for seed in range(DIVISIONS):
        folds = StratifiedGroupKFold(RARE, shuffle=True, random_state=seed)
        given = features[judged], own
        told += cross_val_predict(probe, *given, groups=units[judged], cv=folds, method="predict_proba") / DIVISIONS
    wrong = find_label_issues(own, told, filter_by="both", n_jobs=1)
    return [int(row) for row in judged[np.asarray(wrong)]]
