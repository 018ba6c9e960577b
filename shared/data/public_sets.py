"""Data sets of torchvision and of Hugging Face `datasets` on disk."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from promptfed.shared import get_extra
from promptfed.shared.data.cutting import with_classes
from promptfed.shared.data.folder import words_of
from promptfed.shared.data.options import HuggingFaceOptions, Options, TorchvisionOptions
from promptfed.shared.data.partition import train_test
from promptfed.shared.data.pixels import UNREADABLE, Grey, in_rgb
from promptfed.shared.data.source import DataError, Source, Split, one_scale, refuse_special_files
from promptfed.shared.plain_text import merged
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import TEMPLATE

# The templates of CoOp's experiments (Zhou et al., 2022, appendix A) that differ from the plain one.
TEMPLATES = {
    "OxfordIIITPet": "a photo of a {}, a type of pet.",
    "Flowers102": "a photo of a {}, a type of flower.",
    "FGVCAircraft": "a photo of a {}, a type of aircraft.",
    "DTD": "{} texture.",
    "EuroSAT": "a centered satellite photo of {}.",
    "Food101": "a photo of {}, a type of food.",
}
# The values of ``split`` for training and for tests, if they are not called train and test.
SPLITS = {"OxfordIIITPet": ("trainval", "test"), "FGVCAircraft": ("trainval", "test"), "ImageNet": ("train", "val")}
# Classes that CoOp's splits, and the papers that use them, exclude: cropped images of the class Faces.
LEFT_OUT = {"Caltech101": ("Faces easy",)}
LABELS = ("targets", "labels", "_labels", "y")  # attributes of torchvision's classes with the labels as indices
SAMPLES = ("samples", "_samples", "imgs")  # attributes with pairs of a path and a label
NUMBERED = {"SVHN": 10, "GTSRB": 43}  # data sets without class names; numbers are used
TESTS = ("test", "validation")


def open_torchvision(body: str, options: TorchvisionOptions) -> Source:
    """Open the data set ``body`` under ``root=`` with its own train and test splits, or else a seeded 80/20 split."""
    kind = _kind(body, options)
    root = options.root
    if root is None:
        raise DataError(f"{options.uri}: needs root=, the folder in which torchvision finds {body}.")
    refuse_special_files(Path(root), options.uri)
    parameters = inspect.signature(kind.__init__).parameters
    if "split" in parameters or "train" in parameters:
        first, second = SPLITS.get(body, ("train", "test"))
        ways = ({"split": first}, {"split": second}) if "split" in parameters else ({"train": True}, {"train": False})
        train, test = (_load_torchvision(kind, root, way, options) for way in ways)
        names = _class_names(body, train)
        splits = tuple(_torchvision_split(body, dataset, options.grey_or_known) for dataset in (train, test))
    else:
        whole = _load_torchvision(kind, root, {}, options)
        names = _class_names(body, whole)
        split = _torchvision_split(body, whole, options.grey_or_known)
        splits = tuple(split.select(rows) for rows in train_test(split.labels, options.split_seed))
    for split in splits:
        if int(split.labels.max()) >= len(names):
            raise DataError(f"{options.uri}: {body} has labels beyond its {len(names)} class names.")
    source = _scaled(Source(options.uri, names, None, TEMPLATES.get(body, TEMPLATE), splits[0], splits[1]), options)
    kept = [label for label, name in enumerate(names) if name not in LEFT_OUT.get(body, ())]
    return source if len(kept) == len(names) else with_classes(source, kept)


def _kind(name: str, options: Options) -> Any:
    from torchvision import datasets

    kind = getattr(datasets, name, None) if re.fullmatch(r"[A-Za-z0-9]+", name) else None
    if not (inspect.isclass(kind) and issubclass(kind, datasets.VisionDataset)) or name in (
        "VisionDataset",
        "FakeData",
    ):
        raise DataError(
            f"{options.uri}: torchvision has no data set {name!r}; write it as in torchvision:OxfordIIITPet."
        )
    return kind


def _load_torchvision(kind: Any, root: str, way: dict[str, Any], options: Options) -> Any:
    try:
        return kind(root, **way)
    except ImportError as error:
        raise DataError(f"{options.uri}: {kind.__name__} needs the package {error.name}; install it.") from error
    except (RuntimeError, OSError, ValueError, TypeError) as error:
        text = f"{options.uri}: {kind.__name__} is not in {root}, or is not whole"
        raise DataError(f"{text}; put its files there as torchvision's download=True does.") from error


def _torchvision_split(name: str, dataset: Any, grey: Grey | None = None) -> Split:
    def title(row: int) -> str:
        return f"image {row} of torchvision's {name}"

    def read(row: int) -> Image.Image:
        try:
            image = dataset[row][0]
            if not isinstance(image, Image.Image):
                raise ValueError(f"it is {type(image).__name__}, no image")
            return in_rgb(image, grey=grey)
        except (*UNREADABLE, Image.DecompressionBombError) as error:
            raise DataError(f"{title(row)} cannot be read ({why(error)}).") from error

    return Split(_labels(name, dataset), read, name=title)


def _labels(name: str, dataset: Any) -> torch.Tensor:
    for attribute in LABELS:
        values = getattr(dataset, attribute, None)
        if values is not None and len(values) == len(dataset):
            return torch.as_tensor(values).long().reshape(-1)
    for attribute in SAMPLES:
        values = getattr(dataset, attribute, None)
        if values is not None and len(values) == len(dataset):
            return torch.tensor([int(label) for _, label in values])
    labels = [dataset[row][1] for row in range(len(dataset))]
    if not all(isinstance(label, int) for label in labels):
        raise DataError(f"torchvision's {name} has no class for each image: it cannot be classified.")
    return torch.tensor(labels)


def _class_names(name: str, dataset: Any) -> tuple[str, ...]:
    if name in NUMBERED:
        return tuple(str(number) for number in range(NUMBERED[name]))
    known = getattr(dataset, "classes", None) or getattr(dataset, "categories", None)
    if known is None:
        raise DataError(f"torchvision's {name} names no classes: it cannot be classified by their names.")
    # Those of ImageNet's kin are tuples of synonyms; the first one is used.
    names = [label[0] if isinstance(label, tuple) else str(label) for label in known]
    if name == "EuroSAT":
        names = [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", label) for label in names]  # AnnualCrop
    elif name.startswith("MNIST"):
        names = [label.split(" - ")[-1] for label in names]  # 0 - zero
    names = [label.replace("/", " ") for label in names]
    if clauses := merged(names, words_of):
        raise DataError(f"torchvision's {name}: the classes {'; '.join(clauses)}.")
    return _distinct(_curated(list(map(words_of, names))))


def _curated(names: list[str]) -> list[str]:
    """``names``, but ImageNet's as CLIP's authors curated them; of two classes with one curated name the first synonym.

    WordNet's "crane" is a bird and a machine.
    """
    if len(names) != 1000 or not names[0].startswith("tench"):
        return names
    from open_clip import IMAGENET_CLASSNAMES as curated

    first = [name.split(",")[0] for name in names]
    return [theirs if curated.count(theirs) == 1 else own for own, theirs in zip(first, curated, strict=True)]


def _distinct(names: list[str]) -> tuple[str, ...]:
    """The names with numbers added to duplicates."""
    seen: dict[str, int] = {}
    made = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        made.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return tuple(made)


def open_hugging_face(body: str, options: HuggingFaceOptions) -> Source:
    """Open the data set ``body``: a name on the hub (with ``config=``), or a folder written by ``save_to_disk``.

    A label is a ClassLabel. ``image=`` and ``label=`` name the columns if they are ambiguous, ``train=`` and ``test=``
    the splits. Code in a data set is never run.
    """
    if not body:
        raise DataError(f"{options.uri}: names no data set; write hf:owner/name.")
    loaded = _load_dataset(body, options)
    splits = dict(loaded) if hasattr(loaded, "keys") else {"train": loaded}
    test_name = options.test or next((name for name in TESTS if name in splits), None)
    for name in (options.train, test_name):
        if name not in (None, *splits):
            raise DataError(f"{options.uri}: has no split {name}; it has {', '.join(splits)}.")
    train = splits[options.train]
    image, label = _columns(train, options)
    raw = train.features[label].names
    if clauses := merged(raw, words_of):
        raise DataError(f"{options.uri}: the classes {'; '.join(clauses)}.")
    names = tuple(_curated(list(map(words_of, raw))))
    first = _dataset_split(train, image, label, names, options)
    if test_name is None:
        rows = train_test(first.labels, options.split_seed, names=names)
        parts = first.select(rows[0]), first.select(rows[1])
    else:
        parts = first, _dataset_split(splits[test_name], image, label, names, options)
    return _scaled(Source(options.uri, names, None, TEMPLATE, *parts), options)


def _scaled(source: Source, options: TorchvisionOptions | HuggingFaceOptions) -> Source:
    """The source with one scale for its grey pictures of more than 8 bits: all are read if the first one is such."""
    parts, given = (source.train, source.test), options.grey
    first = next((part for part in parts if len(part)), None)
    if first is not None and not options.names_only and (given or first.scales([0])[0]):
        scales = [scale for part in parts for scale in part.scales(range(len(part)))]
        source.train.grey = source.test.grey = one_scale(scales, options.uri, given)
    return source


def _load_dataset(body: str, options: HuggingFaceOptions) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(f"{options.uri}: needs the datasets library: {get_extra('hf')}.") from None
    folder = Path(body).expanduser()
    if folder.is_absolute():
        refuse_special_files(folder, options.uri)
    try:
        if folder.is_absolute():
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset(body, options.config)
    except Exception as error:  # the library raises many kinds of errors
        raise DataError(f"{options.uri}: cannot be loaded: {' '.join(str(error).split())}") from error


def _columns(dataset: Any, options: HuggingFaceOptions) -> tuple[str, str]:
    """The columns of images and of labels: the named ones, or the only ones of their kind."""
    kinds = {name: type(kind).__name__ for name, kind in dataset.features.items()}
    chosen = []
    for option, named, kind in (("image", options.image, "Image"), ("label", options.label, "ClassLabel")):
        fitting = [name for name, own in kinds.items() if own == kind]
        if named is not None and named not in fitting:
            raise DataError(f"{options.uri}: {option}={named} is no column of {kind}; those are {fitting or 'none'}.")
        if named is None and len(fitting) != 1:
            raise DataError(f"{options.uri}: columns of {kind} are {fitting or 'none'}; name one with {option}=.")
        chosen.append(named or fitting[0])
    return chosen[0], chosen[1]


def _dataset_split(dataset: Any, image: str, label: str, names: tuple[str, ...], options: HuggingFaceOptions) -> Split:
    values = dataset[label][:]
    labels = torch.tensor(values, dtype=torch.long)
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= len(names)):
        raise DataError(f"{options.uri}: some images have no label; choose a labelled split with train= and test=.")

    def read(row: int) -> Image.Image:
        try:
            return in_rgb(dataset[row][image], grey=options.grey_or_known)
        except (*UNREADABLE, AttributeError) as error:
            raise DataError(f"row {row}: column {image} holds no readable image ({why(error)}).") from error

    return Split(labels, read, name=lambda row: f"row {row}")
