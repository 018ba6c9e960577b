"""``hf:owner/name`` or ``hf:/folder``: data sets of the Hugging Face library, an optional extra (``promptfed[hf]``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from promptfed.shared.data.options import UNKNOWN, Options
from promptfed.shared.data.partition import train_test
from promptfed.shared.data.pixels import UNREADABLE, in_rgb
from promptfed.shared.data.source import DataError, Source, Split, refuse_special_files
from promptfed.shared.service.reasons import why

TEMPLATE = "a photo of a {}."
OWN_OPTIONS = ("config", "image", "label", "train", "test")
TESTS = ("test", "validation")


def open_hugging_face(body: str, options: Options) -> Source:
    """Open the data set ``body``: a name on the hub (with ``config=``), or a folder written by ``save_to_disk``.

    A label is a ClassLabel, or a sequence of them for several labels per image. ``image=`` and ``label=`` name the
    columns if they are ambiguous, ``train=`` and ``test=`` name the splits.
    Code in a data set is never run.
    """
    options.check_names(OWN_OPTIONS)
    if not body:
        raise DataError(f"{options.uri}: names no data set; write hf:owner/name.")
    loaded = _load(body, options)
    splits = dict(loaded) if hasattr(loaded, "keys") else {"train": loaded}
    train_name = options.text("train", "train") or "train"
    test_name = options.text("test") or next((name for name in TESTS if name in splits), None)
    for name in (train_name, *([options.text("test")] if options.text("test") else [])):
        if name not in splits:
            raise DataError(f"{options.uri}: has no split {name}; it has {', '.join(splits)}.")
    train = splits[train_name]
    image, label = _columns(train, options)
    feature = train.features[label]
    names = tuple(" ".join(name.replace("_", " ").split()) for name in getattr(feature, "feature", feature).names)
    first = _split(train, image, label, names, options)
    if test_name is None:
        rows = train_test(first.labels, options.split_seed, names=names)
        return Source(options.uri, names, None, TEMPLATE, first.select(rows[0]), first.select(rows[1]))
    return Source(options.uri, names, None, TEMPLATE, first, _split(splits[test_name], image, label, names, options))


def _load(body: str, options: Options) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(f"{options.uri}: needs the datasets library: install promptfed[hf].") from None
    folder = Path(body).expanduser()
    if folder.is_absolute():
        refuse_special_files(folder, options.uri)
    try:
        if folder.is_absolute() or body.startswith("~"):
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset(body, options.text("config"))
    except Exception as error:  # the library raises many kinds of errors
        raise DataError(f"{options.uri}: cannot be loaded: {' '.join(str(error).split())}") from error


def _columns(dataset: Any, options: Options) -> tuple[str, str]:
    """The columns of images and of labels: the named ones, or the only ones of their kind."""
    # A sequence has its elements' kind: several labels per image.
    kinds = {name: type(getattr(kind, "feature", kind)).__name__ for name, kind in dataset.features.items()}
    chosen = []
    for option, kind in (("image", "Image"), ("label", "ClassLabel")):
        fitting = [name for name, own in kinds.items() if own == kind]
        named = options.text(option)
        if named is not None and named not in fitting:
            raise DataError(f"{options.uri}: {option}={named} is no column of {kind}; those are {fitting or 'none'}.")
        if named is None and len(fitting) != 1:
            raise DataError(f"{options.uri}: columns of {kind} are {fitting or 'none'}; name one with {option}=.")
        chosen.append(named or fitting[0])
    return chosen[0], chosen[1]


def _split(dataset: Any, image: str, label: str, names: tuple[str, ...], options: Options) -> Split:
    values = dataset[label][:]
    if any(isinstance(value, list) for value in values):
        labels = _several(values, names, options)
    else:
        labels = torch.tensor(values, dtype=torch.long)
        if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= len(names)):
            raise DataError(f"{options.uri}: some images have no label; choose a labelled split with train= and test=.")

    def read(row: int) -> Image.Image:
        try:
            return in_rgb(dataset[row][image])
        except (*UNREADABLE, AttributeError) as error:
            raise DataError(f"row {row}: column {image} holds no readable image ({why(error)}).") from error

    return Split(labels, read)


def _several(values: Sequence[Sequence[int] | None], names: tuple[str, ...], options: Options) -> torch.Tensor:
    """Labels ``(N, C)`` int8 of lists of classes; those of a row without a list are unknown."""
    labels = torch.zeros(len(values), len(names), dtype=torch.int8)
    for row, listed in enumerate(values):
        if listed is None:
            labels[row] = UNKNOWN
        elif not all(0 <= label < len(names) for label in listed):
            raise DataError(f"{options.uri}: row {row} has a label beyond its {len(names)} classes; correct the row.")
        else:
            labels[row, list(listed)] = 1
    return labels
