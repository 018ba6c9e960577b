"""DICOM files in number: first and later start, memory beside a run with 100 files, features beside decoding alone.

``python -m benchmarks.medical_files --files 100000`` draws the files, and opens them in new processes, of which the
last also runs a federation of one client and one round. Then it reads ``--rate`` large files in JPEG 2000, as of a
mammograph, in turn by decoding alone and through the feature cache.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import pydicom
from pydicom.uid import JPEG2000Lossless

import promptfed
from benchmarks.harness import parser, shown, write
from promptfed.shared.clip import FeatureCache, load_backbone
from promptfed.shared.data import Source, open_source
from promptfed.shared.data.medical.phantoms import CLASSES, write_patients
from promptfed.shared.data.medical.readers import Request, readers

EACH = 20  # images of a patient
FEW = 100
SMALL, LARGE = 64, 2048  # pixels of a side: of the files that are counted, and of those that are read for the rates


def opened(folder: Path, index: Path) -> tuple[Source, float]:
    """The source, and the seconds that opening it took."""
    started = time.perf_counter()
    source = open_source(f"dicom:{folder}?index={index}")
    return source, time.perf_counter() - started


def start(folder: Path, index: Path, run: bool) -> dict[str, float]:
    """Seconds and peak memory in MB of this process, which opens a folder, or runs a federation over it."""
    if run:
        started = time.perf_counter()
        data = {"site": f"dicom:{folder}?index={index}"}
        promptfed.run("fedclipadapter", data, rounds=1, class_names=sorted(CLASSES))
        seconds, images = time.perf_counter() - started, {}
    else:
        source, seconds = opened(folder, index)
        images = {"images": len(source.train) + len(source.test)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**images, "seconds": seconds, "peak_mb": peak}


def in_new_process(folder: Path, index: Path, run: bool) -> dict[str, float]:
    """As `start`, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.medical_files", "--start", str(folder), "--index", str(index)]
    done = subprocess.run([*command, *["--run"] * run], capture_output=True, text=True, check=True)  # noqa: S603
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def starts(files: int, scratch: Path) -> dict[str, float]:
    """The figures of `start` with few and with many files: at the first start, at a later one, and of a run."""
    figures: dict[str, float] = {"files": files}
    for name, count in (("few", FEW), ("many", files)):
        folder = write_patients(scratch / name, count // EACH, EACH, 1, side=SMALL)
        for turn in ("first", "later", "run"):
            told = in_new_process(folder, scratch / f"index-{name}", turn == "run")
            figures |= {f"{name}_{turn}_{key}": value for key, value in told.items()}
        shutil.rmtree(folder)
    for turn in ("first", "later", "run"):
        figures[f"more_mb_{turn}"] = figures[f"many_{turn}_peak_mb"] - figures[f"few_{turn}_peak_mb"]
    return figures


def compress(folder: Path) -> Path:
    """The folder, with its images in JPEG 2000."""
    for path in folder.rglob("*.dcm"):
        data = pydicom.dcmread(path)
        data.compress(JPEG2000Lossless, generate_instance_uid=False)
        data.save_as(path)
    return folder


def rates(folder: Path, scratch: Path, repeats: int) -> dict[str, float]:
    """Images per second by decoding alone, and through the feature cache with the embedded backbone.

    Both in turn; ``share`` is the median of the quotients of neighbours.
    """
    source, _ = opened(folder, scratch / "index")
    paths = [source.train.origin(row).path for row in range(len(source.train))]
    backbone = load_backbone("promptfed-tiny", "embedded")
    FeatureCache(scratch / "warm").features(backbone, source.test)  # starts the children, measures the slots of batches
    alone, both = [], []
    for turn in range(repeats):
        started = time.perf_counter()
        for answer in readers().each(Request("pixels", "dicom", path) for path in paths):
            assert answer.image is not None
        middle = time.perf_counter()
        FeatureCache(scratch / f"features-{turn}").features(backbone, source.train)
        ended = time.perf_counter()
        alone.append(len(paths) / (middle - started))
        both.append(len(paths) / (ended - middle))
    shares = [own / other for own, other in zip(both, alone, strict=True)]
    return {
        "decoding_per_second": median(alone),
        "features_per_second": median(both),
        "share": median(shares),
        "least_share": min(shares),
        "largest_share": max(shares),
    }


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--files", type=int, default=10_000)
    command.add_argument("--rate", type=int, default=200, help="JPEG 2000 images of 2048 pixels a side for the rates")
    command.add_argument("--repeats", type=int, default=5, help="measurements of both rates")
    command.add_argument("--start", type=Path, help="used by itself: open this folder and print the figures")
    command.add_argument("--index", type=Path)
    command.add_argument("--run", action="store_true")
    options = command.parse_args()
    if options.start is not None:
        print(json.dumps(start(options.start, options.index, options.run)))
        return
    figures: dict[str, Any] = {"processors": readers().count, "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as root:
        scratch = Path(root)
        if options.files:
            figures |= starts(options.files, scratch)
        if options.rate:
            large = write_patients(scratch / "large", options.rate // EACH, EACH, 2, side=LARGE)
            figures |= rates(compress(large), scratch, options.repeats)
    figures["load_after"] = os.getloadavg()[0]
    print(shown(figures))
    write(options.json, figures)


if __name__ == "__main__":
    main()
