"""`promptfed data check`: everything that may be wrong with a source's images, for their owner."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from promptfed.cli.common import confirm
from promptfed.client_service.joining.enrolled import send_data_check, settings_in
from promptfed.client_service.privacy.policy import read_policy
from promptfed.client_service.settings import Settings
from promptfed.client_service.training.data import TEST, ClientData
from promptfed.sdk.backbone import open_backbone
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import console, print_json, say, table
from promptfed.shared.clip import FeatureCache
from promptfed.shared.data import DataError, Source, Split, open_source
from promptfed.shared.files import write_whole
from promptfed.shared.messages import DataCheckRequest
from promptfed.shared.metrics.disclosure import FLOOR, coded
from promptfed.shared.plain_text import counted, plain
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import BackboneSpec

try:
    from promptfed.shared.data.medical.check import FLAT, KINDS, Finding, Looks, findings, look, suspected_labels
    from promptfed.shared.data.medical.report import html_report
except ImportError:
    raise CommandError("data check needs imagehash and cleanlab: install promptfed[medical]", Exit.BAD_INPUT) from None

NAMED = 5  # findings of a kind that the terminal shows; the report has all
_SKIPPING = ("folder", "csv", "dicom", "dicomweb", "nifti", "wsi")  # sources that can leave out what cannot be read


@dataclass(frozen=True)
class Checked:
    """What a check found. ``left_out``: a sentence for each unreadable file; ``remark``: why it cannot be used."""

    uri: str
    images: Split
    looks: Looks
    found: list[Finding]
    left_out: tuple[str, ...]
    remark: str | None

    def counts(self) -> dict[str, int]:
        """Images by kind of finding; of what cannot be read, files."""
        rows = {kind: {row for one in self.found if one.kind == kind for row in one.rows} for kind in KINDS}
        return {kind: len(self.left_out) if kind == "unreadable" else len(rows[kind]) for kind in KINDS}


def check(uri: str, backbone: BackboneSpec) -> Checked:
    """Look at every image of ``uri``. Raises DataError or CommandError if the data cannot be opened at all."""
    lenient = uri
    if uri.partition(":")[0] in _SKIPPING and "on_unreadable=" not in uri:
        lenient = f"{uri}{'&' if '?' in uri else '?'}on_unreadable=skip"
    whole = open_source(lenient, "evaluator")
    in_train, remark = _in_train(lenient, whole.test)
    looks = look(whole.test, whole.class_names, in_train)
    wrong = _label_errors(whole, looks, backbone) if whole.test.labels.ndim == 1 else []
    return Checked(uri, whole.test, looks, findings(looks, wrong), whole.left_out, remark)


def _in_train(uri: str, split: Split) -> tuple[np.ndarray | None, str | None]:
    """Which images are for training, by the data or by the seed; else why they cannot be split."""
    origins = [split.origin(row) for row in range(len(split))]
    if any(origin.split is not None for origin in origins):
        return np.array([origin.split == "train" for origin in origins]), None
    try:
        train = open_source(uri).train
    except DataError as error:
        return None, str(error)
    paths = {train.origin(row).path for row in range(len(train))}
    return np.array([origin.path in paths for origin in origins]), None


def _label_errors(source: Source, looks: Looks, spec: BackboneSpec) -> list[int]:
    """By the features of a backbone and the cosines of zero-shot; images that show nothing are not judged."""
    backbone = open_backbone(spec, allow_backbone=False)
    with TemporaryDirectory(prefix="promptfed-check-") as folder:
        features = ClientData(source, backbone, FeatureCache(Path(folder))).features(TEST, bar=True)
    texts = backbone.encode_text([source.template.format(name) for name in source.class_names])
    both = np.hstack([features.numpy(), (features @ texts.T).numpy()])
    labels = np.where(np.array(looks.deviations) < FLAT, -1, source.test.labels.numpy())
    return suspected_labels(labels, both, source.test.groups)


def run_check(
    uri: str, out: Path, share: Path | None, backbone: BackboneSpec, floor: int | None, yes: bool, as_json: bool
) -> None:
    """Check ``uri``, write the report to ``out``, and share the counts: with a coordinator, or in a file.

    Raises:
        CommandError, ClientError: the data or the backbone cannot be used, a file cannot be written, or the
            coordinator cannot be told.
    """
    settings = settings_in(share) if share is not None and share.is_dir() else None
    checked = check(uri, backbone)
    page = html_report(uri, checked.looks, checked.found, checked.left_out, checked.images)
    _write(out, page)
    if as_json:
        print_json(_as_json(checked))
    else:
        _show(checked)
        say(f"{out}: the report with thumbnails. It names files: keep it here.")
    if share is None:
        return
    told = shared_counts(checked, _floor(floor, settings))
    shared = json.dumps(told.model_dump(mode="json"), indent=1)
    place = settings.coordinator if settings is not None else str(share)
    say(f"These counts would go to {place}, and nothing else, rounded down to multiples of {told.floor}:")
    console.print(shared, markup=False)
    confirm(f"{place} would get them.", yes)
    if settings is not None:
        send_data_check(settings, told)
        say(f"{place} has them, as the last check of this client.")
    else:
        _write(share, shared + "\n")


def shared_counts(checked: Checked, floor: int = FLOOR) -> DataCheckRequest:
    """The images by kind of finding, and of all, as the disclosure floor lets them leave."""
    counts = {"images": len(checked.images), **checked.counts()}
    return DataCheckRequest(floor=floor, counts={name: coded(count, floor).low for name, count in counts.items()})


def _floor(given: int | None, settings: Settings | None) -> int:
    """The floor that was given; at least that of the site's policy, where a client has one."""
    if settings is None or settings.policy_file is None:
        return given or FLOOR
    return max(2, given or 0, read_policy(settings.policy_file)[0].metrics.floor)


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode(), mode=0o600)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {why(error)}", Exit.BAD_INPUT) from None


def _show(checked: Checked) -> None:
    counts = checked.counts()
    rows = [[KINDS[kind], f"{count:,}"] for kind, count in counts.items()]
    console.print(table(f"{counted(len(checked.images), 'image')} of {checked.uri}", ["what", "images"], rows))
    if checked.remark is not None:
        say(f"They cannot be split: {plain(checked.remark)}")
    for problem in checked.left_out[:NAMED]:
        say(f"unreadable: {plain(problem)}")
    for kind in KINDS:
        for one in [one for one in checked.found if one.kind == kind][:NAMED]:
            say(f"{kind}: {plain(_files(checked, one.rows))}: {plain(one.text)}")


def _files(checked: Checked, rows: Sequence[int]) -> str:
    paths = [checked.looks.origins[row].path for row in rows[:3]]
    return ", ".join(paths) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")


def _as_json(checked: Checked) -> dict[str, Any]:
    listed = [
        {"kind": one.kind, "files": [checked.looks.origins[row].path for row in one.rows], "text": one.text}
        for one in checked.found
    ]
    unreadable = list(checked.left_out)
    return {"uri": checked.uri, "counts": checked.counts(), "findings": listed, "unreadable": unreadable}
