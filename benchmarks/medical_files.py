"""DICOM files in number: first and later start, memory beside a run with 100 files, features beside decoding alone.

``python -m benchmarks.medical_files --files 100000`` draws the files, opens them in new processes, and reads ``--rate``
large ones in JPEG 2000, as of a mammograph, once by decoding alone and once through the feature cache.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pydicom
from pydicom.uid import JPEG2000Lossless

from benchmarks.harness import parser, shown, write
from promptfed.shared.clip import FeatureCache, load_backbone
from promptfed.shared.data import Source, open_source
from promptfed.shared.data.medical.phantoms import write_patients
from promptfed.shared.data.medical.readers import Request, readers

EACH = 20  # images of a patient
FEW = 100
SMALL, LARGE = 64, 2048  # pixels of a side: of the files that are counted, and of those that are read for the rates


def opened(folder: Path, index: Path) -> tuple[Source, float]:
    """The source, and the seconds that opening it took."""
    started = time.perf_counter()
    source = open_source(f"dicom:{folder}?index={index}")
    return source, time.perf_counter() - started


def start(folder: Path, index: Path) -> dict[str, float]:
    """Seconds and peak memory in MB of this process, which opens a folder and does nothing else."""
    source, seconds = opened(folder, index)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"images": len(source.train) + len(source.test), "seconds": seconds, "peak_mb": peak}


def in_new_process(folder: Path, index: Path) -> dict[str, float]:
    """As `start`, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.medical_files", "--start", str(folder), "--index", str(index)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    told: dict[str, float] = json.loads(done.stdout)
    return told


def compress(folder: Path) -> Path:
    """The folder, with its images in JPEG 2000."""
    for path in folder.rglob("*.dcm"):
        data = pydicom.dcmread(path)
        data.compress(JPEG2000Lossless, generate_instance_uid=False)
        data.save_as(path)
    return folder


def rates(folder: Path, scratch: Path) -> dict[str, float]:
    """Images per second by decoding alone, and through the feature cache with the embedded backbone."""
    source, _ = opened(folder, scratch / "index")
    paths = [source.train.origin(row).path for row in range(len(source.train))]
    backbone = load_backbone("promptfed-tiny", "embedded")
    warm = FeatureCache(scratch / "warm")
    warm.features(backbone, source.test)  # starts the children, and measures the slots of batches
    started = time.perf_counter()
    for answer in readers().each(Request("pixels", "dicom", path) for path in paths):
        assert answer.image is not None
    alone = len(paths) / (time.perf_counter() - started)
    started = time.perf_counter()
    warm.features(backbone, source.train)
    both = len(paths) / (time.perf_counter() - started)
    return {"decoding_per_second": alone, "features_per_second": both, "share": both / alone}


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--files", type=int, default=10_000)
    command.add_argument("--rate", type=int, default=200, help="JPEG 2000 images of 2048 pixels a side for the rates")
    command.add_argument("--start", type=Path, help="used by itself: open this folder and print the figures")
    command.add_argument("--index", type=Path)
    options = command.parse_args()
    if options.start is not None:
        print(json.dumps(start(options.start, options.index)))
        return
    figures: dict[str, Any] = {"files": options.files, "processors": readers().count}
    with tempfile.TemporaryDirectory() as root:
        scratch = Path(root)
        for name, count in (("few", FEW), ("many", options.files)):
            folder = write_patients(scratch / name, count // EACH, EACH, 1, side=SMALL)
            for turn in ("first", "later"):
                told = in_new_process(folder, scratch / f"index-{name}")
                figures |= {f"{name}_{turn}_{key}": value for key, value in told.items()}
        figures["more_mb_first"] = figures["many_first_peak_mb"] - figures["few_first_peak_mb"]
        figures["more_mb_later"] = figures["many_later_peak_mb"] - figures["few_later_peak_mb"]
        large = write_patients(scratch / "large", options.rate // EACH, EACH, 2, side=LARGE)
        figures |= rates(compress(large), scratch)
    print(shown(figures))
    write(options.json, figures)


if __name__ == "__main__":
    main()
