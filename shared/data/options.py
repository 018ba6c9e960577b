"""The options of data URIs, a class for each kind of source: what may follow ``?``, and what it means.

``docs/reference/data-uris.md`` has the fields and their words. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError

from promptfed.shared.data.errors import DataError
from promptfed.shared.plain_text import listed

MOST = 2**31 - 1  # of a whole number: a seed or a count
MOST_DRAWN = 1000  # pictures of each class that a source draws: some of them fit into memory
MOST_SCENES = 20_000  # of 12 kB each
STAMPS = Path("/usr/share/tuxpaint/stamps")

Role = Literal["trainer", "evaluator", "tests"]  # tests: a further test set, whose training images nobody uses
Text = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(listed)]
Seed = Annotated[int, Field(ge=0, le=MOST)]
Count = Annotated[int, Field(ge=1, le=MOST)]
AtLeastTwo = Annotated[int, Field(ge=2, le=MOST)]
FewDrawn = Annotated[int, Field(ge=1, le=MOST_DRAWN)]
FewScenes = Annotated[int, Field(ge=1, le=MOST_SCENES)]
Window = Annotated[tuple[FiniteFloat, Annotated[FiniteFloat, Field(ge=1)]], BeforeValidator(listed)]


def _grey(text: str) -> tuple[float, ...]:
    try:
        ends = tuple(map(float, text.split(",")))
    except ValueError:
        ends = ()
    if len(ends) not in (1, 2) or not float("-inf") < ends[0] or not (0.0, *ends)[-2] < ends[-1] < float("inf"):
        advice = "give bits (12), the largest fraction (1.5), or both ends (-1000,3000)"
        raise ValueError(f"{text} cannot be read; {advice}")
    return ends


Grey = Annotated[tuple[float, ...], BeforeValidator(_grey)]


class Use(BaseModel):
    """A URI and the use of its data: an evaluator does not train."""

    model_config = ConfigDict(frozen=True)

    uri: str
    role: Role = "trainer"
    known_grey: tuple[float, float] | None = None  # of a result that the data are for, where the URI says nothing
    names_only: bool = False  # only the class names are needed: no image is read, and classes are not checked


class Options(Use):
    """The options of every source.

    Attributes:
        shots: training images of each class
        split_seed: seed of the split into train and test; a class's split does not depend on the other classes
        only: as in `cat,dog`: leaves out all other classes, before anything can be wrong with them
        min_per_class: leaves out classes with fewer images, and those that `train/` or `test/` lacks
        classes: one half of the classes, or all
        partition: leaves one client's share of the images, as in `partition=iid&clients=10&client=2`
        clients: of `partition`: the number of clients
        client: of `partition`: whose share it is, counted from 0
        alpha: of `partition=dirichlet`
        classes_per_client: of `partition=pathological`, instead of `clients`
        partition_seed: of every partition
        validation: the share of training images that are the test images, for choosing settings
        validation_seed: of `validation=0.25`: 0 to 3 hold out a quarter each, 4 to 7 in another order
        test_on: the test images of who does not train: of the test split, or all; refused for a trainer
        template: the sentence of zero-shot, as in `a photo of a {}.`, if the spec leaves it to the data
    """

    shots: Count | None = None
    split_seed: Seed = 0
    only: Names | None = None
    min_per_class: Count | None = None
    classes: Literal["base", "novel", "all"] = "all"
    partition: Literal["iid", "dirichlet", "pathological"] | None = None
    clients: Count | None = None
    client: Seed | None = None
    alpha: FiniteFloat = 0.3
    classes_per_client: Count | None = None
    partition_seed: Seed = 0
    validation: Annotated[FiniteFloat, Field(gt=0, lt=1)] | None = None
    validation_seed: Seed | None = None
    test_on: Literal["test", "all"] | None = None
    template: Text | None = None

    @classmethod
    def own(cls) -> set[str]:
        """The names of the options."""
        return set(cls.model_fields) - set(Use.model_fields)

    @classmethod
    def parse(cls, uri: str, query: str, role: Role = "trainer") -> Self:
        """Parse the options ``a=1&b=2``. Raises DataError for one that is not accepted, or is given twice."""
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        except ValueError:
            text = f"options are written ?name=value&name=value, not ?{query}; a ? of a path is written %3F"
            raise DataError(f"{uri}: {text}.") from None
        names, values = [name for name, _ in pairs], dict[str, Any](pairs)
        for name in names:
            if name not in cls.own():
                raise DataError(f"{uri}: unknown option {name}; accepted are {', '.join(sorted(cls.own()))}.")
            if names.count(name) > 1:
                raise DataError(f"{uri}: option {name} is given twice.")
        try:
            return cls(uri=uri, role=role, **values)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise DataError(f"{uri}: {name}={_wrong(first, values[name], cls.model_fields[name].title)}.") from None

    def given(self, names: Iterable[str]) -> list[str]:
        """Which of these options the URI has."""
        return [name for name in names if name in self.model_fields_set]

    @property
    def is_whole_test(self) -> bool:
        """Whether all images are test images, which is the default for evaluators."""
        return self.role == "evaluator" and self.test_on != "test" and self.validation is None


class _OwnFiles(Options):
    """Of files of the owner's.

    Attributes:
        group: groups such as patients: a column of a table, or of `folder:` a pattern of file names
        on_unreadable: `skip` leaves out, and counts, what cannot be read
    """

    group: Text | None = None
    on_unreadable: Literal["refuse", "skip"] = "refuse"


class TableOptions(_OwnFiles):
    """Of sources with a table.

    Attributes:
        groups: as in `sex,scanner`: columns of subgroups; `score` has all figures for each of them too
        columns: as in `mass,edema`: the columns of [several labels](#several-labels)
    """

    groups: Names = ()
    columns: Names = ()


class _Greys(Options):
    """Of sources whose pictures may be grey with more than 8 bits.

    Attributes:
        grey: how [grey pictures](#pictures) of more than 8 bits are read: their bits (`12`), the largest fraction
            (`1.5`), or both ends (`-1000,3000`)
    """

    grey: Grey | None = None

    @property
    def grey_or_known(self) -> tuple[float, ...] | None:
        """How grey pictures of more bits are read, where that is known."""
        return self.known_grey if self.grey is None else self.grey


class FolderOptions(_OwnFiles, _Greys):
    """Of ``folder:``.

    Attributes:
        domain: the folder, or the lines of a table, of one domain
    """

    domain: Text | None = None


class CsvOptions(TableOptions, FolderOptions):
    """Of ``csv:``.

    Attributes:
        labels: the column that holds the names of several labels
    """

    labels: Text | None = None


class DicomOptions(TableOptions):
    """Of ``dicom:``.

    Attributes:
        labels: the table of labels, in the folder or by its path
        index: the folder of the index, else `~/.cache/promptfed/medical`
        level: the files that form one stack of images, ordered by position
        frames: the images of a stack or a multi-frame file that are used; a number of them is spread evenly
        window: center and width, as in `40,400`, instead of the file's
    """

    labels: Text = "labels.csv"
    index: Text | None = None
    level: Literal["image", "series", "study"] = "image"
    frames: Literal["middle", "all"] | Count = Field("middle", title="middle, all or a number of at least 1")
    window: Window | None = Field(None, title="a center and a width of at least 1, as in window=40,400")


class SymbolsOptions(Options):
    """Of ``symbols:``.

    Attributes:
        domain: the style, where the URI has none before its options
        topic: only the symbols of one topic
        per_class: training images to draw of each class
        test_per_class: test images to draw of each class
        test_seed: other test images
    """

    domain: Text | None = None
    topic: Text | None = None
    per_class: FewDrawn = 16
    test_per_class: FewDrawn = 10
    test_seed: Seed = 0


class DigitsOptions(Options):
    """Of ``digits``.

    Attributes:
        domain: dark on light, or light on dark
    """

    domain: Literal["plain", "inverted"] = "plain"


class EmojiOptions(Options):
    """Of ``emoji:``.

    Attributes:
        level: `kinds`: a class is a kind of things (bird, fruit), and no style trains on things of the test; `names`: a
            class is a thing, and tests come from the styles `test=` of another designer
        test: the styles of the test, at `level=names`; without it the source is only to be tested on
        drawn_by: only things that these styles have too, so that sites agree on their classes
        purpose: `validation`: the things of validation instead of the test's, for choosing settings
    """

    level: Literal["kinds", "names"] = "kinds"
    test: Text | None = None
    drawn_by: Text | None = None
    purpose: Literal["test", "validation"] = "test"


class ScenesOptions(Options):
    """Of ``emoji-scenes:``.

    Attributes:
        count: training scenes to draw
        test_count: test scenes to draw
        seed: other scenes
        purpose: `train`: test scenes show the things of training, for choosing settings
    """

    count: FewScenes = 1000
    test_count: FewScenes = 500
    seed: Seed = 0
    purpose: Literal["test", "train"] = "test"


class SolarOptions(Options):
    """Of ``solar``.

    Attributes:
        domain: the kind of silicon: 1,074 or 1,550 cells, which look different
        defect: a cell is defective if its label, 0, 1/3, 2/3 or 1, is at least this, else functional; `grades`: four
            classes, one for each label
        per_class: at most so many of a class, in training and tests together
    """

    domain: Literal["mono", "poly"] | None = None
    defect: Literal["grades"] | Annotated[FiniteFloat, Field(gt=0, le=1)] = Field(
        0.5, title="a number above 0 and up to 1, or grades"
    )
    per_class: AtLeastTwo | None = None


class StampsOptions(Options):
    """Of ``stamps``.

    Attributes:
        level: `kinds`: 13 classes (bird, fruit, vehicle ...); `names`: a class for each name of at most four words that
            a caption begins with; most have one picture
        root: the folder of the stamps
        per_class: at most so many of a class, in training and tests together
    """

    level: Literal["kinds", "names"] = "kinds"
    root: Text = str(STAMPS)
    per_class: AtLeastTwo | None = None


class TorchvisionOptions(_Greys):
    """Of ``torchvision:``.

    Attributes:
        root: the folder in which torchvision finds the data set; it must be given
    """

    root: Text | None = None


class HuggingFaceOptions(_Greys):
    """Of ``hf:``.

    Attributes:
        config: the data set's configuration
        image: the column of images, where several could be meant
        label: the column of labels, where several could be meant
        train: the split for training
        test: the split for tests, by default `test` or `validation`
    """

    config: Text | None = None
    image: Text | None = None
    label: Text | None = None
    train: Text = "train"
    test: Text | None = None


def _wrong(item: Mapping[str, Any], text: str, may_be: str | None) -> str:
    """A value and what is wrong with it, by one of pydantic's errors; ``may_be``: what it says of such an option."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if may_be is not None:
        return f"{text} is not {may_be}"
    if kind == "literal_error":
        return f"{text} is not known; choose one of {context['expected'].replace(' or ', ', ')}".replace("'", "")
    if kind.startswith("int_"):
        return f"{text} is not a whole number; write one, as in {item['loc'][0]}=8"
    faults = {
        "greater_than_equal": "is less than {ge}", "less_than_equal": "is more than {le}, the most that is taken",
        "greater_than": "is not more than {gt:g}", "less_than": "is not less than {lt:g}",
        "string_too_short": "is empty; give a value, or leave it out",
    }  # fmt: skip
    return f"{text} {faults.get(kind, 'is not a number').format(**context)}"
