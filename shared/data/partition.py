"""Seeded, disjoint and complete partitions of a data set over clients; DataError if a partition is impossible."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from promptfed.shared.data.source import DataError
from promptfed.shared.plain_text import counted
from promptfed.shared.seeds import derive_seed

_DIRICHLET_TRIES = 100


def halves(class_count: int) -> tuple[range, range]:
    """Base and novel classes by label order; with an odd number base has one more."""
    if class_count < 2:
        raise DataError(f"{class_count} class cannot be divided into base and novel classes.")
    middle = (class_count + 1) // 2
    return range(middle), range(middle, class_count)


def grouped(groups: Sequence[str], labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The most frequent class (G,) of each group, by `strata`, and the rows of each; groups as they first appear.

    Not in the order of names: the same images have other names of groups in other files.
    """
    classes, rows = strata(labels), defaultdict(list)
    for row, group in enumerate(groups):
        rows[group].append(row)
    members = [torch.tensor(own) for own in rows.values()]
    return torch.tensor([int(classes[own].mode().values) for own in members]), members


def iid(count: int, clients: int, seed: int, things: str = "images") -> list[Tensor]:
    """Rows of each client, shuffled and dealt in turn; sizes differ by at most one."""
    _check_enough(count, clients, things)
    order = _rng(seed, "iid").permutation(count)
    return [torch.from_numpy(np.sort(order[k::clients])) for k in range(clients)]


def pathological(class_count: int, clients: int, seed: int) -> list[list[int]]:
    """Classes of each client, disjoint, as in FedPGP's base-to-novel setting.

    As in the released code, each client except the last gets ``round(class_count / clients)`` of the shuffled classes,
    and the last gets the rest: of 19 classes over ten clients, nine have two and the last has one. If nothing would be
    left for the last client, the number is rounded down.
    """
    if clients > class_count:
        raise DataError(f"{class_count} classes cannot be disjoint over {clients} clients; ask for fewer clients.")
    each = round(class_count / clients)
    if each * (clients - 1) >= class_count:
        each = class_count // clients
    return _dealt(class_count, each, clients, seed)


def clients_of(class_count: int, classes_per_client: int) -> int:
    """Number of clients with ``classes_per_client`` classes each: ``max(1, round(C/n))``, as in FedTPG's code.

    Halves are rounded to the even number, as in numpy and Python: 50 classes at 20 each make two clients.
    """
    if classes_per_client < 1:
        raise DataError(f"classes_per_client={classes_per_client} is not at least 1.")
    return max(1, round(class_count / classes_per_client))


def classes_each(class_count: int, classes_per_client: int, seed: int, clients: int | None = None) -> list[list[int]]:
    """Classes of each client, disjoint, ``classes_per_client`` each (FedTPG, section 4.1); the last takes the rest.

    With several clients, the rest is between half and one and a half times ``classes_per_client``. The number of
    clients must be that of `clients_of`.
    """
    needed = clients_of(class_count, classes_per_client)
    if clients is not None and clients != needed:
        raise DataError(
            f"{class_count} classes at {classes_per_client} per client need {needed} clients, not {clients}."
        )
    return _dealt(class_count, classes_per_client, needed, seed)


def _dealt(class_count: int, each: int, clients: int, seed: int) -> list[list[int]]:
    """Shuffled classes: ``each`` classes for every client except the last, which gets the rest."""
    order = _rng(seed, "pathological").permutation(class_count).tolist()
    parts = [order[k * each : (k + 1) * each] for k in range(clients - 1)]
    return [*parts, order[(clients - 1) * each :]]


def class_counts(labels: Tensor, classes: int) -> list[int]:
    """Images of each class, by labels (N,) or (N, C) as in `Split`; an image may be of several classes, or of none."""
    if labels.ndim == 2:
        return (labels == 1).sum(0).tolist()
    return torch.bincount(labels[labels >= 0], minlength=classes).tolist()


def strata(labels: Tensor) -> Tensor:
    """One class (N,) for each image, by which images are divided: of several classes the one with fewest images.

    Images without a class have the number of classes.
    """
    if labels.ndim == 1:
        return labels
    present = labels == 1
    counts = torch.where(present, present.sum(0), len(labels) + 1)
    rarest = counts.argmin(1) if labels.shape[1] else torch.zeros(len(labels), dtype=torch.int64)
    return torch.where(present.any(1), rarest, labels.shape[1])


def rows_of_classes(labels: Tensor, classes: Sequence[int]) -> Tensor:
    """Rows whose label is one of ``classes``, in order."""
    return torch.isin(labels, torch.tensor(list(classes), dtype=torch.long)).nonzero()[:, 0]


def dirichlet(
    splits: Sequence[Tensor], clients: int, alpha: float, seed: int, things: Sequence[str] = ("images", "images")
) -> list[list[Tensor]]:
    """Rows of each client in each split, with shares of each class over the clients drawn from Dir(alpha).

    The same shares divide every split (labels (N,) each, ``things`` in messages), so that a client's test data have
    its own class mix. With an alpha below 1 the shares are drawn again, up to 100 times, if a client has no image in
    some split; from 1 on such a client gets an image of the client with most.
    """
    splits = [strata(labels) for labels in splits]
    if not alpha > 0:
        raise DataError(f"alpha={alpha} is not above 0.")
    for labels, thing in zip(splits, things, strict=False):
        _check_enough(len(labels), clients, thing)
    classes = int(max(int(labels.max()) for labels in splits)) + 1
    for attempt in range(_DIRICHLET_TRIES):
        shares = _rng(seed, "dirichlet", attempt).dirichlet([min(alpha, 1e12)] * clients, size=classes)
        parts = [_by_shares(labels, shares, seed, index, alpha) for index, labels in enumerate(splits)]
        if all(len(rows) for part in parts for rows in part):
            return parts
    raise DataError(
        f"Dirichlet shares with alpha={alpha} leave one of {clients} clients without an image; "
        "ask for fewer clients or a larger alpha."
    )


def _by_shares(labels: Tensor, shares: np.ndarray, seed: int, index: int, alpha: float) -> list[Tensor]:
    """The rows of each client; below an alpha of 1 by cuts at rounded places, as in earlier releases, if that is fair.

    Rounding moves a client by √(1/6) of an image in each class, and by little in all if moves cancel over classes.
    """
    sizes = torch.bincount(labels, minlength=len(shares)).numpy()
    cuts = np.round(np.cumsum(shares, axis=1) * sizes[:, None]).astype(int)
    cuts[:, -1] = sizes
    counts = np.diff(cuts, axis=1, prepend=0)
    far = np.abs(counts.sum(0) - sizes @ shares).max()
    if alpha >= 1 or far > max(1.0, min(3 * math.sqrt(len(shares) / 6), sizes.sum() / shares.shape[1] / 2)):
        counts = _evenly(shares, sizes, alpha >= 1)
    parts: list[list[np.ndarray]] = [[] for _ in range(shares.shape[1])]
    for label, own in enumerate(counts):
        rows = np.flatnonzero(labels.numpy() == label)
        rows = _rng(seed, "dirichlet rows", index, label).permutation(rows)
        for part, piece in zip(parts, np.split(rows, np.cumsum(own)[:-1]), strict=True):
            part.append(piece)
    return [torch.from_numpy(np.sort(np.concatenate(part))) for part in parts]


def _evenly(shares: np.ndarray, sizes: np.ndarray, everyone: bool) -> np.ndarray:
    """Images (C, K) of each class and client, less than one from their share of ``sizes`` (C,).

    What rounding owes a client in one class it gets in the next. ``everyone``: who is left without an image gets one of
    the client with most, in the class in which that one is furthest above its share.
    """
    counts, owed = np.zeros(shares.shape, dtype=int), np.zeros(shares.shape[1])
    for label, (share, size) in enumerate(zip(shares, sizes, strict=True)):
        owed += share * size
        counts[label] = np.floor(share * size)
        left = size - counts[label].sum()
        owed -= counts[label]
        most = np.argsort(-owed, kind="stable")[:left]
        counts[label, most] += 1
        owed[most] -= 1
    while everyone and (lacking := np.flatnonzero(counts.sum(0) == 0)).size:
        giver = int(counts.sum(0).argmax())
        label = int(np.where(counts[:, giver] > 0, counts[:, giver] - shares[:, giver] * sizes, -np.inf).argmax())
        counts[label, giver] -= 1
        counts[label, lacking[0]] += 1
    return counts


def few_shot(labels: Tensor, shots: int, seed: int) -> Tensor:
    """Rows of ``shots`` images of each class that occurs (all images of smaller classes), sampled as in CoOp."""
    labels = strata(labels)
    chosen = []
    for label in torch.unique(labels).tolist():
        rows = np.flatnonzero(labels.numpy() == label)
        chosen.append(_rng(seed, "shots", label).permutation(rows)[:shots])
    return torch.from_numpy(np.sort(np.concatenate(chosen)))


def train_test(
    labels: Tensor, seed: int, test_share: float = 0.2, turn: int = 0, names: Sequence[str] = ()
) -> tuple[Tensor, Tensor]:
    """Rows of train and test: a seeded share of each class, with at least one image in both.

    Another ``turn`` of the same seed tests on the next images, until all have had theirs.
    With several labels per image, the only image of a class (as in `strata`) is a training image.
    """
    train, test = [], []
    several, labels = labels.ndim == 2, strata(labels)
    for label in torch.unique(labels).tolist():
        rows = np.flatnonzero(labels.numpy() == label)
        if len(rows) < 2 and several:
            train.append(rows)
            continue
        if len(rows) < 2:
            name = names[label] if names else label
            raise DataError(f"class {name} has one image, which cannot be both for training and for testing.")
        cut = min(max(1, round(len(rows) * test_share)), len(rows) - 1)
        rows = np.roll(_rng(seed, "split", label).permutation(rows), -cut * turn)
        test.append(rows[:cut])
        train.append(rows[cut:])
    return _sorted(train), _sorted(test)


def _sorted(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.sort(np.concatenate([*parts, np.zeros(0, dtype=np.int64)])))


def whole_groups(
    groups: Sequence[str], labels: Tensor, seed: int, uri: str, test_share: float = 0.2, turn: int = 0
) -> tuple[Tensor, Tensor]:
    """Rows of train and test without common groups: a seeded share of the groups as they first appear.

    At least one group is in both.

    ``turn`` as in `train_test`.

    Raises:
        DataError: there is only one group, or all images of a class are in test groups.
    """
    names = list(dict.fromkeys(groups))
    if len(names) < 2:
        raise DataError(f"{uri}: one group cannot be both for training and for testing; give two or more, or splits.")
    cut = min(max(1, round(len(names) * test_share)), len(names) - 1)
    order = np.roll(_rng(seed, "groups").permutation(len(names)), -cut * turn)
    tested = {names[k] for k in order[:cut]}
    is_test = torch.tensor([group in tested for group in groups])
    train = (~is_test).nonzero()[:, 0]
    lacking = set[int]() if labels.ndim == 2 else set(labels.tolist()) - set(labels[train].tolist())
    if lacking:
        raise DataError(
            f"{uri}: all images of {len(lacking)} of the classes are of groups that are tested on; give splits, or "
            "another split_seed."
        )
    return train, is_test.nonzero()[:, 0]


def _check_enough(count: int, clients: int, things: str) -> None:
    if clients > count:
        one = counted(count, things.removesuffix("s"))
        raise DataError(f"{one} cannot be divided over {clients} clients; ask for fewer clients.")


def _rng(seed: int, *purpose: str | int) -> np.random.Generator:
    return np.random.default_rng(derive_seed(seed, "partition", *purpose))
