"""Images in train and test: by splits that the data give, or by seed, with groups whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from promptfed.shared.data.options import Options
from promptfed.shared.data.partition import train_test, whole_groups
from promptfed.shared.data.source import DataError, ImageDomain, Source, Split


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
