"""What a source consists of, as a run or a client's state keeps it to notice that it goes on with other data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from pydantic import BaseModel

from promptfed.shared.canonical import canonical_json
from promptfed.shared.data.schemes import all_drawn
from promptfed.shared.data.source import Source, Split
from promptfed.shared.plain_text import counted


class SplitIdentity(BaseModel):
    """A split: its number of images, a digest of these, and one of them with their labels and groups, in any order.

    The digests tell who has the same images that they are here: they stay in private state.
    """

    count: int
    images: str
    labelled: str


class DataIdentity(BaseModel):
    """A source: its classes, its words, its training and test images, and further test sets by name."""

    class_names: list[str]
    words: list[str]
    splits: dict[str, SplitIdentity]

    def changes(self, now: DataIdentity) -> str:
        """In one line, in what ``now`` differs; "" where it does not. A test set that only one has says nothing."""
        told = []
        if self.class_names != now.class_names:
            gone, new = (
                [f"{sign}{name!r}" for name in one if name not in other]
                for sign, one, other in (
                    ("-", self.class_names, now.class_names),
                    ("+", now.class_names, self.class_names),
                )
            )
            told.append(f"other classes ({', '.join([*gone, *new][:6]) or 'in another order'})")
        for name, before in self.splits.items():
            if name in now.splits and now.splits[name] != before:
                told.append(_difference(name, before, now.splits[name]))
        if self.words != now.words:
            told.append("other words for the domain or the template")
        return "; ".join(told)


def _difference(name: str, before: SplitIdentity, now: SplitIdentity) -> str:
    images = f"{name} image"
    if before.count != now.count:
        way = "more" if now.count > before.count else "fewer"
        return f"{counted(abs(now.count - before.count), f'{way} {images}')} ({before.count}, now {now.count})"
    if before.images != now.images:
        return f"other {images}s (of {now.count})"
    return f"{images}s with other labels or groups"


def identity_of(source: Source, tests: Mapping[str, Source]) -> DataIdentity:
    """The identity of a client's source and its further test sets. Pictures that are drawn are what their URI says."""
    splits = {"train": (source.train, source.uri), "test": (source.test, source.uri)}
    splits |= {f"{name} test": (test.test, f"{test.uri} {list(test.class_names)}") for name, test in tests.items()}
    words = [] if source.domain is None else [source.domain.name, source.domain.description]
    return DataIdentity(
        class_names=list(source.class_names),
        words=[source.template, *words],
        splits={name: _split(split, about) for name, (split, about) in splits.items()},
    )


def _split(split: Split, about: str) -> SplitIdentity:
    labels = split.labels.tolist()
    groups = split.groups or [""] * len(labels)
    if all_drawn([about]):
        return SplitIdentity(count=len(labels), images=_digest([about]), labelled=_digest([about]))
    images = [split.digest(row) for row in range(len(split))]
    facts = zip(images, labels, groups, strict=True)
    return SplitIdentity(count=len(images), images=_digest(images), labelled=_digest(map(canonical_json, facts)))


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
