"""What the options common to all sources cut from one: classes, held-out images, a client's share, a few shots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from promptfed.shared.data import partition
from promptfed.shared.data.options import Options
from promptfed.shared.data.partition import train_test, whole_groups
from promptfed.shared.data.source import DataError, ImageDomain, Source, Split, joined
from promptfed.shared.plain_text import beside_known

_DIVISION = sorted(Options.own() - {"client"})  # clients with equal values share parts
UNKNOWN = -1  # of several labels of an image: whether the class is present

Rows = tuple[torch.Tensor, torch.Tensor]  # one client's rows of train and of test
Parts = dict[tuple[Any, ...], list[Rows]]


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
    if options.shots is not None and len(source.train):
        rows = partition.few_shot(source.train.labels, options.shots, options.split_seed)
        source = replace(source, train=source.train.select(rows))
    return source


def kept_names(names: Sequence[str], counts: Mapping[str, int], options: Options) -> list[str]:
    """Those of ``names``, in order, that ``only=bird,zebra`` lists and that have at least ``min_per_class=`` images.

    Raises:
        DataError: ``only=`` lists an unknown class, or no class is left.
    """
    wanted, least = names if options.only is None else options.only, options.min_per_class or 0
    if unknown := [name for name in wanted if name not in names]:
        alike = beside_known(unknown[:1], names)
        raise DataError(f"{options.uri}: only= names the class {unknown[0]!r}, which is not one of its classes{alike}.")
    kept = [name for name in names if name in wanted and counts.get(name, 0) >= least]
    if not kept:
        largest = max(counts.values(), default=0)
        raise DataError(f"{options.uri}: min_per_class={least} leaves no class; the largest has {largest} images.")
    return kept


def only(source: Source, options: Options) -> Source:
    """The source with the classes that ``only=`` and ``min_per_class=`` select, in the source's order."""
    if options.only is None and options.min_per_class is None:
        return source
    labels = torch.cat([source.train.labels, source.test.labels])
    counts = partition.class_counts(labels, len(source.class_names))
    kept = kept_names(source.class_names, dict(zip(source.class_names, counts, strict=True)), options)
    return with_classes(source, [source.class_names.index(name) for name in kept])


def _worded(source: Source, options: Options) -> Source:
    text = options.template
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
    if options.classes == "all":
        return source
    base, novel = partition.halves(len(source.class_names))
    return with_classes(source, list(base if options.classes == "base" else novel))


def _hold_out(source: Source, options: Options) -> Source:
    share = options.validation
    if share is None:
        if options.validation_seed is not None:
            raise DataError(f"{options.uri}: validation_seed needs validation=, the share that is held out.")
        return source
    seed, turn = options.split_seed, 0
    if not len(source.train):
        raise DataError(f"{options.uri}: validation={share:g} holds out training images, and there are none.")
    if options.validation_seed is not None:
        seed, turn = divmod(options.validation_seed, max(1, round(1 / share)))
    if source.train.groups is not None:
        both = source.train.groups, source.train.labels
        train, held_out = partition.whole_groups(*both, seed, options.uri, share, turn)
    else:
        train, held_out = partition.train_test(source.train.labels, seed, share, turn, source.class_names)
    return replace(source, train=source.train.select(train), test=source.train.select(held_out))


def _test_on(source: Source, options: Options) -> Source:
    if options.test_on != "all":
        return source
    if options.role == "trainer":
        text = "test_on=all would test a trainer on its training images: leave it out, or open the data as an evaluator"
        raise DataError(f"{options.uri}: {text}.")
    if options.validation is not None:
        raise DataError(f"{options.uri}: test_on=all looks at the test images, which validation= keeps out of sight.")
    return replace(source, test=joined(source.test, source.train))


def _cut_client(source: Source, options: Options, known: Parts) -> Source:
    kind, client = options.partition, options.client
    if kind is None:
        for name in options.given(("alpha", "clients", "client", "classes_per_client", "partition_seed")):
            raise DataError(f"{options.uri}: {name} needs partition=iid, dirichlet or pathological.")
        return source
    division = tuple(getattr(options, name) for name in _DIVISION)
    if division not in known:
        known[division] = _parts(source, kind, options)
    parts = known[division]
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
    clients, each, seed = options.clients, options.classes_per_client, options.partition_seed
    if kind == "pathological" and source.train.labels.ndim == 2:
        text = "partition=pathological is for one label per image, and these images have several; leave it out"
        raise DataError(f"{options.uri}: {text}.")
    if each is not None and kind != "pathological":
        raise DataError(f"{options.uri}: classes_per_client is for partition=pathological.")
    if options.given(["alpha"]) and kind != "dirichlet":
        raise DataError(f"{options.uri}: alpha is for partition=dirichlet.")
    if each is not None:
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
        shares = partition.dirichlet([labels for labels, _ in units], clients, options.alpha, seed, things)
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
