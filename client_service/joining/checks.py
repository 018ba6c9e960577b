"""Checks of a data owner's machine and data, one line each."""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from promptfed.client_service.state.private_state import DATA
from promptfed.shared.data import DataError, Source, Split
from promptfed.shared.data.identity import DataIdentity, identity_of
from promptfed.shared.data.partition import class_counts
from promptfed.shared.plain_text import alike_text, counted

Verdict = Literal["pass", "warn", "fail"]

FREE_BYTES = 1 << 30  # for features and a state; weights that open_clip downloads want more
SAMPLE_IMAGES = 64  # of each split that are decoded: all are, before anything is sent, where features are kept
FEW_IMAGES = 4  # of a class
ACCEPT = "give --new-data to go on with them, or another --state-dir"


@dataclass(frozen=True)
class Check:
    """The result of one check: ``text`` is the finding, ``advice`` what to do about it."""

    name: str
    verdict: Verdict
    text: str
    advice: str | None = None

    def line(self) -> str:
        """The check as a line for people."""
        advice = f": {self.advice}" if self.advice else ""
        return f"{self.verdict:<4}  {self.name:<12}  {self.text}{advice}"


def check_versions() -> Check:
    """The versions of Python, torch and open_clip."""
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {metadata.version(name)}" for name in ("torch", "open_clip_torch")]
    return Check("versions", "pass", ", ".join(versions))


def check_device(device: str) -> Check:
    """Whether there is a GPU, and which device ``device`` (auto, cpu, cuda, cuda:N) means."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.startswith("cuda"):
        number = int(device.partition(":")[2] or 0)
        if number >= count:
            text = f"{device} is not here (this machine has {counted(count, 'GPU')})"
            return Check("device", "fail", text, "give --device cpu, or install the GPU's driver and a torch with CUDA")
        return Check("device", "pass", _gpu(number))
    if device == "auto" and count:
        return Check("device", "pass", _gpu(0))
    if count:
        return Check("device", "warn", "the CPU computes though a GPU is here", "give --device auto to use it")
    advice = "enough for the embedded backbone and small data; ViT-B and larger are slow without a GPU"
    return Check("device", "warn", "no GPU: the CPU computes", advice)


def _gpu(number: int) -> str:
    about = torch.cuda.get_device_properties(number)
    return f"{about.name}, {about.total_memory / (1 << 30):.0f} GiB"


def check_disk(folder: Path) -> Check:
    """Whether the state folder, or the folder that will hold it, is writable and has room."""
    place = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    try:
        free = shutil.disk_usage(place).free
        writable = _writable(place)
    except OSError as error:
        return Check("disk", "fail", f"{folder}: {error.strerror}", "give another --state-dir")
    if not writable:
        return Check("disk", "fail", f"{place} cannot be written", "give another --state-dir")
    text = f"{free / (1 << 30):.1f} GiB free for {folder}"
    if free < FREE_BYTES:
        return Check("disk", "warn", text, "features of many images may not fit")
    return Check("disk", "pass", text)


def _writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_data(source: Source, role: str) -> list[Check]:
    """How many images of which classes there are, whether names look alike, and whether some images can be read."""
    return [_counts(source, role), *_look_alike(source), *_left_out(source), *_readable(source)]


def changed_data(before: DataIdentity | None, now: DataIdentity) -> str:
    """What has changed in the data since this client last started; "" if nothing is."""
    changed = before.changes(now) if before is not None else ""
    return changed and f"the data have changed since this client last started: {changed}"


def check_recorded(folder: Path, source: Source, tests: Mapping[str, Source], accepted: bool) -> list[Check]:
    """Whether a start would refuse these data, since the client in ``folder`` last started with others."""
    try:
        enrolled = json.loads((folder / "identity.json").read_bytes())["client_id"] is not None
        before = DataIdentity.model_validate_json((folder / DATA).read_bytes())
        changed = changed_data(before, identity_of(source, tests)) if enrolled else ""
    # A new folder, or one that a start refuses for what it holds.
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [Check("recorded data", "warn" if accepted else "fail", changed, ACCEPT)] if changed else []


def _left_out(source: Source) -> list[Check]:
    if not source.left_out:
        return []
    text = f"{counted(len(source.left_out), 'file or line', 'files or lines')} cannot be read, and left out"
    return [Check("files", "warn", text, "`promptfed data show` names them")]


def _look_alike(source: Source) -> list[Check]:
    text = alike_text(source.class_names)
    advice = "rename them, or merge classes that are one"
    return [Check("classes", "warn", f"these names look alike: {text}", advice)] if text else []


def _counts(source: Source, role: str) -> Check:
    train, test = len(source.train), len(source.test)
    classes = counted(len(source.class_names), "class", "classes")
    text = f"{train} training and {counted(test, 'test image')} of {classes}"
    if role == "trainer":
        text += f", {_shown(source.class_names)}"
        if not train:
            return Check("data", "fail", text, "a trainer needs training images; or give --role evaluator")
        counts = class_counts(source.train.labels, len(source.class_names))
        few = [name for label, name in enumerate(source.class_names) if counts[label] < FEW_IMAGES]
        if few:
            text += f"; only {FEW_IMAGES - 1} training images or fewer of {_shown(few)}"
            return Check("data", "warn", text, "add images, or leave the class out")
    elif not test:
        return Check("data", "fail", text, "an evaluator needs test images")
    if not test:
        return Check("data", "warn", text, "without test images nobody learns what the prompts are worth here")
    return Check("data", "pass", text)


def _shown(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _readable(source: Source) -> list[Check]:
    looked, digests = 0, []
    try:
        for split in (source.train, source.test):
            rows = _some(split)
            looked += len(rows)
            digests.append({split.digest(row) for row in rows})
    except DataError as error:
        return [Check("images", "fail", str(error))]
    held = len(source.train) + len(source.test)
    text = f"{looked} of {held} were read" + (", a sample" if looked < held else "")
    both = digests[0] & digests[1]
    if both:
        advice = "test accuracy will look better than it is: keep copies on one side"
        return [Check("images", "warn", f"{text}; {len(both)} are training and test images alike", advice)]
    return [Check("images", "pass", text)]


def _some(split: Split) -> list[int]:
    """Rows evenly over the split."""
    count = min(len(split), SAMPLE_IMAGES)
    return [number * len(split) // count for number in range(count)]
