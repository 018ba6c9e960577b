"""Query options of data URIs: parsing, and the options common to all sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import parse_qsl

import torch

from promptfed.shared.data import partition
from promptfed.shared.data.partition import train_test, whole_groups
from promptfed.shared.data.pixels import Grey, Scale
from promptfed.shared.data.source import DataError, ImageDomain, Source, Split, joined
from promptfed.shared.plain_text import beside_known, listed

COMMON_OPTIONS = (
    "shots",
    "split_seed",
    "classes",
    "partition",
    "alpha",
    "clients",
    "client",
    "classes_per_client",
    "partition_seed",
    "validation",
    "validation_seed",
    "only",
    "min_per_class",
    "template",
    "test_on",
)
CUTTING_OPTIONS = frozenset(COMMON_OPTIONS) - {"split_seed"}  # options that do not describe the whole data set
_PARTITION_OPTIONS = ("alpha", "clients", "client", "classes_per_client", "partition_seed")
_DIVISION = tuple(name for name in COMMON_OPTIONS if name != "client")  # clients with equal values share parts

MOST = 2**31 - 1  # of a whole number: a seed or a count
MOST_DRAWN = 1000  # pictures of each class that a source draws: some of them fit into memory

UNKNOWN = -1  # of several labels of an image: whether the class is present

Role = Literal["trainer", "evaluator", "tests"]  # tests: a further test set, whose training images nobody uses
Rows = tuple[torch.Tensor, torch.Tensor]  # one client's rows of train and of test
Parts = dict[tuple[str | None, ...], list[Rows]]


@dataclass(frozen=True)
class Options:
    """The options of one URI as text, and the use of the data: an evaluator does not train."""

    uri: str
    values: dict[str, str] = field(default_factory=dict)
    role: Role = "trainer"
    known_grey: Scale | None = None  # of a result that the data are for, where the URI says nothing
    names_only: bool = False  # only the class names are needed: no image is read, and classes are not checked

    @staticmethod
    def parse(uri: str, query: str, role: Role = "trainer") -> Options:
        """Parse the options ``a=1&b=2``. Raises DataError if one is not ``name=value`` or is given twice."""
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        except ValueError:
            text = f"options are written ?name=value&name=value, not ?{query}; a ? of a path is written %3F"
            raise DataError(f"{uri}: {text}.") from None
        values: dict[str, str] = {}
        for name, value in pairs:
            if name in values:
                raise DataError(f"{uri}: option {name} is given twice.")
            values[name] = value
        return Options(uri, values, role)

    def check_names(self, own: Iterable[str]) -> None:
        """Raise DataError for an option that neither the scheme nor all sources accept."""
        accepted = sorted({*own, *COMMON_OPTIONS})
        for name in self.values:
            if name not in accepted:
                raise DataError(f"{self.uri}: unknown option {name}; accepted are {', '.join(accepted)}.")

    def text(self, name: str, default: str | None = None) -> str | None:
        """The option as text."""
        return self.values.get(name, default)

    def listed(self, name: str) -> list[str]:
        """The names that the option lists, as in ``name=a,b``."""
        try:
            return listed(self.values[name])
        except ValueError as error:
            raise DataError(f"{self.uri}: {name}={error}.") from None

    def choice(self, name: str, known: Iterable[str], default: str | None = None) -> str | None:
        """The option, which must be one of ``known``."""
        value = self.values.get(name, default)
        known = tuple(known)
        if value is not None and value not in known:
            raise DataError(f"{self.uri}: {name}={value} is not known; choose one of {', '.join(known)}.")
        return value

    def integer(self, name: str, default: int | None = None, least: int = 0, most: int = MOST) -> int | None:
        """The option as a whole number from ``least`` to ``most``."""
        text = self.values.get(name)
        if text is None:
            return default
        try:
            value = int(text)
        except ValueError:
            raise DataError(f"{self.uri}: {name}={text} is not a whole number; write one, as in {name}=8.") from None
        if value < least:
            raise DataError(f"{self.uri}: {name}={value} is less than {least}.")
        if value > most:
            raise DataError(f"{self.uri}: {name}={value} is more than {most}, the most that is taken.")
        return value

    def number(self, name: str, default: float | None = None) -> float | None:
        """The option as a finite number."""
        text = self.values.get(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not abs(value) < float("inf"):
            raise DataError(f"{self.uri}: {name}={text} is not a number.")
        return value

    @property
    def grey(self) -> Grey | None:
        """``grey=12`` or ``grey=-1000,3000``, or what is known without it: how grey pictures of more bits are read."""
        text = self.values.get("grey")
        if text is None:
            return self.known_grey
        try:
            ends = tuple(map(float, text.split(",")))
        except ValueError:
            ends = ()
        increasing = len(ends) in (1, 2) and (0.0, *ends)[-2] < ends[-1] < float("inf") and ends[0] > float("-inf")
        if not increasing:
            advice = "give bits (12), the largest fraction (1.5), or both ends (-1000,3000)"
            raise DataError(f"{self.uri}: grey={text} cannot be read; {advice}.")
        return ends

    def without(self, names: Iterable[str]) -> Options:
        """The other options."""
        left = set(names)
        return replace(self, values={name: value for name, value in self.values.items() if name not in left})

    @property
    def split_seed(self) -> int:
        """The seed of the 80/20 split and of the few shots."""
        return self.integer("split_seed", 0) or 0

    @property
    def is_whole_test(self) -> bool:
        """Whether all images are test images, which is the default for evaluators."""
        return self.role == "evaluator" and self.text("test_on", "all") == "all" and self.text("validation") is None


def apply_common(source: Source, options: Options, known: Parts | None = None) -> Source:
    """Reduce the source to its base or novel classes, then to one client's part, then to a few shots.

    ``validation=0.25``: this share of the training images of each class replaces the test images, which are not used
    then; for choosing hyperparameters. ``validation_seed`` from 0 to 3 holds out one quarter after the other,
    and from 4 to 7 in another order.
    ``test_on=all``: training images are test images too, where nobody trains on them.
    ``min_per_class=5``: classes with fewer images are left out. ``template``: replaces the data set's template.
    ``known`` stores the partition of ``source`` for its next client.
    """
    source = _worded(only(source, options), options)
    source = _cut_classes(source, options)
    if not options.names_only:
        source = _hold_out(source, options)
    source = _test_on(source, options)
    source = _cut_client(source, options, {} if known is None else known)
    shots = options.integer("shots", least=1)
    if shots is not None and len(source.train):
        rows = partition.few_shot(source.train.labels, shots, options.split_seed)
        source = replace(source, train=source.train.select(rows))
    return source


def kept_names(names: Sequence[str], counts: Mapping[str, int], options: Options) -> list[str]:
    """Those of ``names``, in order, that ``only=bird,zebra`` lists and that have at least ``min_per_class=`` images.

    Raises:
        DataError: ``only=`` lists an unknown class, or no class is left.
    """
    text, least = options.text("only"), options.integer("min_per_class", 0, least=1) or 0
    wanted = set(names) if text is None else {name.strip() for name in text.split(",")}
    unknown = [name.strip() for name in (text or "").split(",") if text is not None and name.strip() not in names]
    if unknown:
        alike = beside_known(unknown[:1], names)
        raise DataError(f"{options.uri}: only= names the class {unknown[0]!r}, which is not one of its classes{alike}.")
    kept = [name for name in names if name in wanted and counts.get(name, 0) >= least]
    if not kept:
        largest = max(counts.values(), default=0)
        raise DataError(f"{options.uri}: min_per_class={least} leaves no class; the largest has {largest} images.")
    return kept


def only(source: Source, options: Options) -> Source:
    """The source with the classes that ``only=`` and ``min_per_class=`` select, in the source's order."""
    if options.text("only") is None and options.text("min_per_class") is None:
        return source
    labels = torch.cat([source.train.labels, source.test.labels])
    counts = partition.class_counts(labels, len(source.class_names))
    kept = kept_names(source.class_names, dict(zip(source.class_names, counts, strict=True)), options)
    return with_classes(source, [source.class_names.index(name) for name in kept])


def _worded(source: Source, options: Options) -> Source:
    text = options.text("template")
    if text is not None and text.count("{}") != 1:
        raise DataError(f"{options.uri}: template={text} must hold '{{}}' exactly once, where the class name goes.")
    return source if text is None else replace(source, template=text)


def with_classes(source: Source, kept: list[int]) -> Source:
    """The images of the classes ``kept``, in order, with labels and names of these classes.

    With several labels per image, images without these classes are kept too.
    """
    place = torch.full((len(source.class_names),), -1)
    place[kept] = torch.arange(len(kept))

    def cut(split: Split) -> Split:
        if split.labels.ndim == 2:
            return split.labelled(split.labels[:, kept])
        selected = split.select(partition.rows_of_classes(split.labels, kept))
        return selected.labelled(place[selected.labels])

    names = tuple(source.class_names[k] for k in kept)
    return replace(source, class_names=names, train=cut(source.train), test=cut(source.test))


def _cut_classes(source: Source, options: Options) -> Source:
    part = options.choice("classes", ("base", "novel", "all"), "all")
    if part == "all":
        return source
    base, novel = partition.halves(len(source.class_names))
    return with_classes(source, list(base if part == "base" else novel))


def _hold_out(source: Source, options: Options) -> Source:
    share = options.number("validation")
    if share is None:
        if "validation_seed" in options.values:
            raise DataError(f"{options.uri}: validation_seed needs validation=, the share that is held out.")
        return source
    seed, turn = options.split_seed, 0
    if not 0 < share < 1:
        raise DataError(f"{options.uri}: validation={share:g} is not between 0 and 1.")
    if not len(source.train):
        raise DataError(f"{options.uri}: validation={share:g} holds out training images, and there are none.")
    if (wanted := options.integer("validation_seed")) is not None:
        seed, turn = divmod(wanted, max(1, round(1 / share)))
    if source.train.groups is not None:
        both = source.train.groups, source.train.labels
        train, held_out = partition.whole_groups(*both, seed, options.uri, share, turn)
    else:
        train, held_out = partition.train_test(source.train.labels, seed, share, turn, source.class_names)
    return replace(source, train=source.train.select(train), test=source.train.select(held_out))


def _test_on(source: Source, options: Options) -> Source:
    if options.choice("test_on", ("test", "all"), "test") == "test":
        return source
    if options.role == "trainer":
        text = "test_on=all would test a trainer on its training images: leave it out, or open the data as an evaluator"
        raise DataError(f"{options.uri}: {text}.")
    if options.text("validation") is not None:
        raise DataError(f"{options.uri}: test_on=all looks at the test images, which validation= keeps out of sight.")
    return replace(source, test=joined(source.test, source.train))


def _cut_client(source: Source, options: Options, known: Parts) -> Source:
    kind = options.choice("partition", ("iid", "dirichlet", "pathological"))
    if kind is None:
        for name in _PARTITION_OPTIONS:
            if name in options.values:
                raise DataError(f"{options.uri}: {name} needs partition=iid, dirichlet or pathological.")
        return source
    division = tuple(options.text(name) for name in _DIVISION)
    if division not in known:
        known[division] = _parts(source, kind, options)
    parts = known[division]
    client = options.integer("client")
    if client is None:
        raise DataError(f"{options.uri}: partition={kind} needs client=0 to {len(parts) - 1}.")
    if client >= len(parts):
        raise DataError(f"{options.uri}: client={client} is not one of the {len(parts)} clients; count them from 0.")
    train, test = parts[client]
    part = replace(source, train=source.train.select(train), test=source.test.select(test))
    return _own_classes(part) if kind == "pathological" else part


def _own_classes(source: Source) -> Source:
    """The source with only the names of classes that have images (FedTPG: class sets per client)."""
    return with_classes(source, torch.unique(torch.cat([source.train.labels, source.test.labels])).tolist())


def _parts(source: Source, kind: str, options: Options) -> list[Rows]:
    """Each client's rows of train and of test."""
    clients = options.integer("clients", least=1)
    each = options.integer("classes_per_client", least=1)
    seed = options.integer("partition_seed", 0) or 0
    if kind == "pathological" and source.train.labels.ndim == 2:
        text = "partition=pathological is for one label per image, and these images have several; leave it out"
        raise DataError(f"{options.uri}: {text}.")
    if each is not None and kind != "pathological":
        raise DataError(f"{options.uri}: classes_per_client is for partition=pathological.")
    if "alpha" in options.values and kind != "dirichlet":
        raise DataError(f"{options.uri}: alpha is for partition=dirichlet.")
    if kind == "pathological" and each is not None:
        classes = partition.classes_each(len(source.class_names), each, seed, clients)
        return _by_classes(source, classes, options)
    if clients is None:
        raise DataError(f"{options.uri}: partition={kind} needs clients=, the number of clients.")
    if kind == "pathological":
        return _by_classes(source, partition.pathological(len(source.class_names), clients, seed), options)
    splits = [split for split in (source.train, source.test) if len(split)]  # an evaluator has no training images
    units = [_units(split) for split in splits]
    things = [
        ("training " if split is source.train else "test ") + ("images" if split.groups is None else "groups")
        for split in splits
    ]
    if kind == "dirichlet":
        alpha = options.number("alpha", 0.3)
        labels = [own for own, _ in units]
        shares = partition.dirichlet(labels, clients, 0.3 if alpha is None else alpha, seed, things)
    else:
        shares = [partition.iid(len(own), clients, seed, name) for (own, _), name in zip(units, things, strict=True)]
    parts = [[rows(own) for own in share] for share, (_, rows) in zip(shares, units, strict=True)]
    none = [torch.zeros(0, dtype=torch.int64)] * clients
    first, second = parts if len(parts) == 2 else (parts[0], none) if len(source.train) else (none, parts[0])
    return list(zip(first, second, strict=True))


def _units(split: Split) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """The classes of what one client has whole, an image or a group of them, and the rows of such units."""
    if split.groups is None:
        return split.labels, lambda own: own
    classes, members = partition.grouped(split.groups, split.labels)
    none = torch.zeros(0, dtype=torch.int64)
    return classes, lambda own: torch.cat([none, *(members[int(unit)] for unit in own)]).sort().values


def _by_classes(source: Source, classes: Sequence[Sequence[int]], options: Options) -> list[Rows]:
    """The rows of the classes of each client. Raises DataError if a group would be divided."""
    parts = [tuple(partition.rows_of_classes(s.labels, own) for s in (source.train, source.test)) for own in classes]
    for place, split in enumerate((source.train, source.test)):
        seen: dict[str, int] = {}
        for client, part in enumerate(parts):
            for row in part[place].tolist() if split.groups is not None else ():
                if seen.setdefault((split.groups or ())[row], client) != client:
                    text = "partition=pathological would divide a group of images; choose iid or dirichlet"
                    raise DataError(f"{options.uri}: {text}.")
    return [(train, test) for train, test in parts]


def divided(
    whole: Split,
    splits: Sequence[str | None],
    names: tuple[str, ...],
    domain: ImageDomain | None,
    template: str,
    options: Options,
    left_out: tuple[str, ...] = (),
) -> Source:
    """The images of ``whole`` in train and test, by ``splits`` where they are given, else by seed and whole groups.

    Raises:
        DataError: they cannot be divided, or a group has images in both.
    """
    if options.names_only:
        train = test = torch.arange(len(whole))
    elif options.is_whole_test:
        train, test = torch.zeros(0, dtype=torch.int64), torch.arange(len(whole))
    elif splits[0] is None and whole.groups is not None:
        train, test = whole_groups(whole.groups, whole.labels, options.split_seed, options.uri)
    elif splits[0] is None:
        train, test = train_test(whole.labels, options.split_seed, names=names)
    else:
        is_train = torch.tensor([split == "train" for split in splits])
        train, test = is_train.nonzero()[:, 0], (~is_train).nonzero()[:, 0]
    _check_apart(whole, train, test, options)
    return Source(options.uri, names, domain, template, whole.select(train), whole.select(test), left_out=left_out)


def _check_apart(whole: Split, train: torch.Tensor, test: torch.Tensor, options: Options) -> None:
    """Raise DataError if a group has images in train and test: each part has its own privacy budget."""
    if whole.groups is None or options.names_only or options.is_whole_test:
        return
    both = sorted({whole.groups[row] for row in train.tolist()} & {whole.groups[row] for row in test.tolist()})
    if both:
        raise DataError(f"{options.uri}: the group {both[0]} has images in train and in test; give it to one of them.")
