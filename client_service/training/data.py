"""A client's images for the methods: labels in the task's label space, features from the cache."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor
from tqdm import tqdm

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.training.images import IMAGES, HeldImages, ImageCache, ReadAhead, Views
from promptfed.shared import messages
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.clip.caches import CacheCost
from promptfed.shared.clip.image_reading import ImageSplit
from promptfed.shared.data import DataError, ImageDomain, Source, Split, open_source, partition
from promptfed.shared.data.options import Role as DataRole
from promptfed.shared.data.source import in_words
from promptfed.shared.messages import Role
from promptfed.shared.methods.core.interface import Method
from promptfed.shared.methods.core.training import TaskCancelled
from promptfed.shared.plain_text import beside_known, scale_text, shortened
from promptfed.shared.spec.training_terms import TrainingTerms
from promptfed.shared.tensors.transfer import host_memory, sent_to

TRAIN, TEST = "train", "test"
NO_TESTS: Mapping[str, Source] = MappingProxyType({})
Cancelled = Callable[[], bool]


@dataclass
class LocalSplit:
    """One split of a client's data: what `promptfed.shared.methods.core.interface.Split` asks for, by functions.

    ``soon`` is told which images ``(B,)`` the next step reads.
    """

    labels: Tensor
    features: Callable[[], Tensor]
    images: Callable[[Tensor], Tensor]
    raw_features: Callable[[], Tensor]
    patches: Callable[[Tensor], Tensor]
    soon: Callable[[Tensor], None] = lambda rows: None

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class TestSet:
    """Images that are only tested on, the class names among which they are to be told apart, and their template."""

    class_names: tuple[str, ...]
    template: str


class ClientData:
    """A source seen through a backbone. Features are computed when first asked for, and kept in memory and on disk.

    Preprocessed images, or for a GPU their pixels, are kept in memory as far as ``images`` has room.
    ``tests`` are further test sets by name: the test splits of other sources, with class names of their own.
    """

    def __init__(
        self,
        source: Source,
        backbone: Backbone,
        cache: FeatureCache,
        cancelled: Cancelled = lambda: False,
        tests: Mapping[str, Source] = NO_TESTS,
        images: ImageCache = IMAGES,
    ):
        self.class_names = source.class_names
        self.template = source.template
        self.domain = domain_of(source)
        self.several_labels = source.train.labels.ndim == 2
        self.greys = () if source.grey is None else (source.grey,)
        self.tests = {name: TestSet(other.class_names, other.template) for name, other in tests.items()}
        self._splits: dict[str, Split] = {TRAIN: source.train, TEST: source.test}
        self._splits |= {name: other.test for name, other in tests.items()}
        self._backbone = backbone
        self._cache = cache
        self._cancelled = cancelled
        self._features: dict[tuple[str, int, bool], Tensor] = {}
        self._held = HeldImages(images)

    def split(self, which: str, label_space: tuple[str, ...]) -> LocalSplit:
        """``train``, ``test`` or a further test set, with labels as indices in ``label_space``.

        Raises:
            ClientError: BAD_INPUT for classes that the label space lacks.
        """
        names = self.tests[which].class_names if which in self.tests else self.class_names
        check_classes(names, label_space)
        labels = self._splits[which].labels
        ahead = ReadAhead(
            lambda row: self._image(self._splits[which], row),
            lambda row: self._held.find(self._key(self._splits[which], row)),
        )
        return LocalSplit(
            placed(labels, names, label_space),
            lambda: self.features(which),
            lambda rows: self._sent(ahead.take(rows.tolist())),
            lambda: self.features(which, raw=True),
            lambda rows: self._patches(self._splits[which], rows),
            lambda rows: ahead.begin(rows.tolist()),
        )

    def augmented(self, label_space: tuple[str, ...], views: int, purpose: str) -> LocalSplit:
        """The training images cropped and flipped at random, by draws for this ``purpose`` alone.

        Features are those of one of an image's ``views``, which the cache keeps; images are cropped anew each time.

        Raises:
            ClientError: BAD_INPUT for classes that the label space lacks.
        """
        shown, cache = Views(self._splits[TRAIN], self._backbone, views, purpose), self._cache
        return LocalSplit(
            self.split(TRAIN, label_space).labels,
            lambda: self._computed(shown, cache.features),
            lambda rows: self._sent(shown.pixels(rows)),
            lambda: self._computed(shown, cache.raw_features),
            lambda rows: self._patches(shown, rows),
            soon=lambda rows: shown.ahead.begin(rows.tolist()),
        )

    def no_images(self) -> LocalSplit:
        """An empty split, for evaluators, which do not train."""
        empty = torch.zeros(0, self._backbone.d_e, device=self._backbone.device)
        none = torch.zeros(0, dtype=torch.int64)
        return LocalSplit(none, lambda: empty, lambda rows: empty[rows], lambda: empty, lambda rows: empty[rows])

    def images_hash(self, which: str) -> str:
        """SHA-256 (hex) of a split's images in order."""
        split = self._splits[which]
        return hashlib.sha256("".join(split.digest(row) for row in range(len(split))).encode()).hexdigest()

    def labelled_hash(self, which: str) -> str:
        """SHA-256 (hex) of a split's images and labels in order: what an accuracy is of."""
        labelled = f"{self.images_hash(which)} {self._splits[which].labels.tolist()}"
        return hashlib.sha256(labelled.encode()).hexdigest()

    def count(self, which: str) -> int:
        """Images in a split."""
        return len(self._splits[which])

    def patients(self, which: str) -> int | None:
        """The number of patients (groups) of a split; None where the data name none."""
        groups = self._splits[which].groups
        return None if groups is None else len(set(groups))

    def features(self, which: str, bar: bool = False, *, raw: bool = False) -> Tensor:
        """``(N, d_e)`` of a split, normalised unless ``raw``.

        With ``bar`` and a terminal on stderr a progress bar shows how far it is.

        Raises:
            DataError: an image cannot be read.
            TaskCancelled: the client was told to stop meanwhile.
        """
        key = which, torch.get_num_threads(), raw  # the bits depend on the number of threads
        if key not in self._features:
            read = self._cache.raw_features if raw else self._cache.features
            self._features[key] = self._computed(
                self._splits[which], read, f"features of {which} images" if bar else ""
            )
        return self._features[key]

    def _computed(self, split: ImageSplit, read: Callable[..., Tensor], title: str = "") -> Tensor:
        """What the cache's ``read`` gives, under a bar with a ``title``."""
        with tqdm(total=len(split), desc=title, leave=False, disable=None if title else True) as bar:
            return read(self._backbone, split, done=self._unless_cancelled(bar.update)).to(self._backbone.device)

    def _unless_cancelled(self, done: Callable[[int], object] = lambda images: None) -> Callable[[int], None]:
        """``done``, and raises TaskCancelled once the client was told to stop; the first time at once."""

        def check(images: int) -> None:
            if self._cancelled():
                raise TaskCancelled
            done(images)

        check(0)
        return check

    def missing_features(self, parts: Sequence[str]) -> int:
        """How many images of the splits ``parts`` have no features yet. All are read; raises as `features`."""
        self._unless_cancelled()
        return self._cache.cost(self._backbone, [self._splits[part] for part in parts]).images

    def patch_cost(self, parts: Sequence[str]) -> CacheCost:
        """What the patch features of the splits ``parts`` would still take on disk."""
        return self._cache.patches.cost(self._backbone, [self._splits[part] for part in parts])

    def keep_patches(self, which: str) -> None:
        """Compute the patch features of a split that are not kept yet.

        Raises:
            DataError: an image cannot be read.
            TaskCancelled: the client was told to stop meanwhile.
        """
        split = self._splits[which]
        self._cache.patches.fill(self._backbone, split, range(len(split)), self._unless_cancelled())

    def _patches(self, split: ImageSplit, rows: Tensor) -> Tensor:
        return sent_to(self._cache.patches.rows(self._backbone, split, rows.tolist()), self._backbone.device)

    def _image(self, split: Split, row: int) -> Tensor:
        """What `_sent` takes of an image: on a CPU its numbers, which no step makes again, elsewhere its pixels."""
        make = self._backbone.preprocess if self._backbone.device.type == "cpu" else self._backbone.pixels
        return self._held.get(self._key(split, row), lambda: make(split.image(row)))

    def _sent(self, pixels: Sequence[Tensor]) -> Tensor:
        """A batch ``(B, 3, H, W)`` on the backbone's device, of each image's pixels."""
        batch = host_memory((len(pixels), *pixels[0].shape), pixels[0].dtype, self._backbone.device)
        return self._backbone.images(torch.stack(list(pixels), out=batch))

    def _key(self, split: Split, row: int) -> str:
        return f"{self._backbone.transform_id}/{split.digest(row)}"


def placed(labels: Tensor, names: Sequence[str], label_space: Sequence[str]) -> Tensor:
    """``labels`` (N,) or (N, C) of the classes ``names`` as labels of ``label_space``; further classes are unknown."""
    places = {name: index for index, name in enumerate(label_space)}
    place = torch.tensor([places[name] for name in names], dtype=torch.int64)
    if labels.ndim == 1:
        return torch.where(labels >= 0, place[labels.clamp(min=0)], labels)
    wide = torch.full((len(labels), len(label_space)), -1, dtype=labels.dtype)
    wide[:, place] = labels
    return wide


def split_by(
    terms: TrainingTerms, source: Source, tests: Mapping[str, Source], role: Role
) -> tuple[Source, Mapping[str, Source]]:
    """The source and the further test sets of a client, by the federation's terms. Raises as `held_out`."""
    if role != "trainer":
        return source, tests
    if terms.selection is not None:
        apart = held_out(source, terms.selection.share, terms.seed)
        return replace(apart, test=source.test), {**tests, terms.selection.split: apart}
    return source, tests


def held_out(source: Source, share: float, seed: int) -> Source:
    """The source with a seeded ``share`` of its training images in place of its test images.

    Images of a group stay together. Of a class with one image nothing is held out.

    Raises:
        ClientError: BAD_INPUT where the groups cannot be divided.
    """
    groups = source.train.groups
    try:
        if groups is not None:
            rows, tested = partition.whole_groups(groups, source.train.labels, seed, source.uri, share)
        else:
            labels = partition.strata(source.train.labels)
            several = torch.isin(labels, torch.tensor([k for k, n in Counter(labels.tolist()).items() if n > 1]))
            places = several.nonzero()[:, 0]
            rows, tested = (places[kept] for kept in partition.train_test(labels[several], seed, share))
            rows = torch.cat([rows, (~several).nonzero()[:, 0]]).sort().values
    except DataError as error:
        raise ClientError(Exit.BAD_INPUT, f"no training images can be held out: {error}") from None
    return replace(source, train=source.train.select(rows), test=source.train.select(tested))


def open_data(uri: str, name: str = "", domain: str | None = None, role: DataRole = "trainer") -> Source:
    """The source that ``uri`` names, for ``role``; ``domain`` describes the images of the client ``name`` in words.

    Raises:
        ClientError: BAD_INPUT, with the reason in one line.
    """
    try:
        return in_domain(open_source(uri, role), name, domain)
    except DataError as error:
        raise ClientError(Exit.BAD_INPUT, str(error)) from None


def in_domain(source: Source, name: str, words: str | None = None) -> Source:
    """The source of the client ``name``, its domain described by ``words`` where they are given.

    A domain without a name, such as a folder describes in its ``domain.txt``, has the client's.

    Raises:
        DataError: the words cannot describe a domain.
    """
    domain_name = source.domain.name if source.domain is not None and source.domain.name else name
    if words is not None:
        return replace(source, domain=ImageDomain(domain_name, in_words(words)))
    if source.domain is not None and not source.domain.name:
        return replace(source, domain=ImageDomain(domain_name, source.domain.description))
    return source


def check_scales(source: Source, tests: Mapping[str, Source]) -> None:
    """Refuse test sets whose grey pictures are read by another scale than the client's own, unless both URIs say so.

    Raises:
        ClientError: BAD_INPUT, with both scales.
    """
    for name, other in tests.items():
        agreed = "grey=" in source.uri and "grey=" in other.uri
        if source.grey and other.grey and source.grey != other.grey and not agreed:
            text = f"grey pictures of the test set {name} are read as {scale_text(other.grey)}"
            scale = f"those of the client's own data as {scale_text(source.grey)}"
            raise ClientError(Exit.BAD_INPUT, f"{text}, {scale}: say grey= in both URIs")


def check_domain(method: Method, role: str, source: Source) -> None:
    """Refuse images without a domain if the method needs one of every trainer.

    Raises:
        ClientError: BAD_INPUT, with what to do.
    """
    if method.needs.domain_descriptions and role == "trainer" and source.domain is None:
        text = f"{method.name} needs words for what the images look like: give --domain 'a sketch of a {{}}'"
        raise ClientError(Exit.BAD_INPUT, text)


def domain_of(source: Source) -> messages.Domain | None:
    """The source's domain as it is declared at enrolment.

    Raises:
        ClientError: BAD_INPUT where its name or description cannot be sent.
    """
    if source.domain is None:
        return None
    try:
        return messages.Domain(name=source.domain.name, description=source.domain.description)
    except ValueError as error:
        text = f"the domain {source.domain.name!r} of the data cannot be declared: {error}"
        raise ClientError(Exit.BAD_INPUT, " ".join(text.split())) from None


def check_classes(class_names: tuple[str, ...], label_space: tuple[str, ...]) -> None:
    """Refuse classes that the federation does not know.

    Raises:
        ClientError: BAD_INPUT, naming them.
    """
    unknown = sorted(set(class_names) - set(label_space))
    if unknown:
        names = shortened(map(repr, unknown))
        text = f"the federation does not know the classes {names} of the data: rename or leave out their images"
        raise ClientError(Exit.BAD_INPUT, text + beside_known(unknown, label_space))
