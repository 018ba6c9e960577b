"""The kinds of data sources, a row each. Importing this module does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from promptfed.shared.data import options
from promptfed.shared.data.options import Options

if TYPE_CHECKING:
    from promptfed.shared.data.source import Source

EMBEDDED = "embedded"
OF_CLASSES = ("only", "min_per_class")


@dataclass(frozen=True)
class Scheme:
    """A kind of source, ``scheme:body?option=value``.

    Attributes:
        opener: ``module:function`` below `promptfed.shared.data`: the body and the options -> the whole source.
        options: what may follow ``?``.
        example, holds, where: a URI, what its pictures are, and where they come from.
        of_files: these are the owner's files: hashed when they are opened, and for an evaluator all test images.
        at_opening: common options that the opener applies itself: a class left out may be as it likes.
        redrawn: test images are drawn, and ``test_seed=`` draws others. Elsewhere they are what there is.
    """

    opener: str
    options: type[Options]
    example: str
    holds: str
    where: str = EMBEDDED
    of_files: bool = False
    at_opening: tuple[str, ...] = ()
    redrawn: bool = False

    def open(self, body: str, options: Options) -> Source:
        """The whole source. Raises DataError as the opener does."""
        module, _, name = self.opener.partition(":")
        source: Source = getattr(import_module(f"promptfed.shared.data.{module}"), name)(body, options)
        return source


SCHEMES = {
    "symbols": Scheme(
        "symbols:open_symbols", options.SymbolsOptions,
        "symbols:sketch?topic=weather", "102 drawn symbols in ten styles", redrawn=True,
    ),
    "digits": Scheme("digits:open_digits", options.DigitsOptions, "digits?domain=inverted", "1,797 handwritten digits"),
    "emoji": Scheme(
        "emoji.source:open_emoji", options.EmojiOptions,
        "emoji:flat", "521 things as three designers drew them, in seven styles",
    ),
    "emoji-scenes": Scheme(
        "emoji.scenes:open_scenes", options.ScenesOptions,
        "emoji-scenes:flat", "scenes of one to five emoji, with several labels each",
    ),
    "folder": Scheme(
        "folder:open_folder", options.FolderOptions, "folder:/data/pets", "class folders of images", "yours",
        of_files=True, at_opening=OF_CLASSES,
    ),
    "csv": Scheme(
        "folder:open_csv", options.CsvOptions, "csv:/data/table.csv",
        "a table of paths and labels, one or several for each image", "yours", of_files=True, at_opening=OF_CLASSES,
    ),
    "dicom": Scheme(
        "medical.opening:open_dicom", options.DicomOptions,
        "dicom:/data/scans", "DICOM images, series or studies with a table of labels", "promptfed[medical]",
        of_files=True,
    ),
    "solar": Scheme(
        "photographs:open_solar", options.SolarOptions, "solar?domain=mono",
        "2,624 photographs of solar cells, functional or defective", "promptfed[photos]",
    ),
    "stamps": Scheme(
        "photographs:open_stamps", options.StampsOptions, "stamps",
        "cut-out photographs of animals and things", "apt-get install tuxpaint-stamps-default",
    ),
    "torchvision": Scheme(
        "public_sets:open_torchvision", options.TorchvisionOptions, "torchvision:OxfordIIITPet?root=/data",
        "data sets that torchvision reads", "yours, downloaded before",
    ),
    "hf": Scheme(
        "public_sets:open_hugging_face", options.HuggingFaceOptions, "hf:owner/name",
        "data sets of the Hugging Face library", "promptfed[hf]",
    ),
}  # fmt: skip


def scheme_of(uri: str) -> Scheme | None:
    """The kind of source that a data URI names; None for an unknown one."""
    return SCHEMES.get(re.split("[:?]", uri, maxsplit=1)[0])


def all_drawn(uris: Iterable[str]) -> bool:
    """Whether all of these URIs name embedded drawings."""
    return all((scheme := scheme_of(uri)) is not None and scheme.where == EMBEDDED for uri in uris)
