"""What is shipped of others' files is theirs to the byte, and nothing else is needed for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import sklearn
from PIL import Image
from sklearn.datasets import load_digits

from promptfed.shared.data import digits
from promptfed.shared.data.symbols import FONT

PLOTTING = ("matplotlib", "sklearn", "contourpy", "joblib")
RUN = """
from promptfed.shared.data.registry import open_source
for uri in ("symbols:chalk?topic=weather&per_class=2&test_per_class=1", "digits"):
    source = open_source(uri)
    print(len(source.train), source.train.digest(0)[:20])
from promptfed.cli.main import command
sys.argv[1:1] = ["simulate"]
command()
"""


@pytest.mark.parametrize(("file", "original"), [
    (FONT, Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")),
    (FONT.with_name("LICENSE-DEJAVU.txt"), Path(matplotlib.get_data_path(), "fonts", "ttf", "LICENSE_DEJAVU")),
    (FONT.with_name("digits.csv.gz"), Path(sklearn.__file__).with_name("datasets") / "data" / "digits.csv.gz"),
])  # fmt: skip
def test_each_file_is_the_original(file: Path, original: Path) -> None:
    assert file.read_bytes() == original.read_bytes()
    assert file.name in file.with_name("NOTICE.txt").read_text()


def test_the_digits_are_scikit_learns() -> None:
    reference = load_digits()
    images, labels = digits.digit_images()
    assert labels.dtype == np.int64
    assert np.array_equal(labels, reference.target)
    for image, ink in zip(images, reference.images, strict=True):
        small = Image.fromarray((255 - ink * (255 / 16)).round().astype(np.uint8))
        assert np.array_equal(image[4:-4, 4:-4], np.asarray(small.resize((40, 40), Image.Resampling.BICUBIC)))
        assert (image[:4] == 255).all()


@pytest.mark.extended
def test_a_federation_runs_where_nothing_can_plot(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        "name: a\nmethod: {name: promptfl, m: 2}\nrounds: 1\n"
        "clients: [{name: b, data: 'symbols:chalk?topic=weather&per_class=2&test_per_class=1'}]\n"
    )
    absent = f"import sys; sys.modules.update(dict.fromkeys({PLOTTING}))\n"
    arguments = [sys.executable, "-c", absent + RUN, str(run)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "Accuracy of promptfl after 1 round" in done.stdout
