"""What is continued knows its data: a simulated run, a client, a bench; each says what changed, and how to go on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from promptfed.client_service.training.data import TEST, ClientData
from promptfed.client_service.training.evaluation import Evaluation
from promptfed.experiments.bench.entries import parse_entries
from promptfed.experiments.bench.protocols import PROTOCOLS, Setting
from promptfed.experiments.bench.runner import Bench, Runner, read_run
from promptfed.experiments.simulation.run_folder import run_folder
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import ImageDomain, Source, open_source
from promptfed.shared.data.identity import identity_of
from promptfed.shared.errors import PromptfedError
from promptfed.shared.methods.core.interface import ClientContext
from tests.support.fake_coordinator import made_up_source
from tests.support.own_images import picture, write_folder


def swapped(root: Path) -> None:
    """Two class folders are exchanged."""
    (root / "circle").rename(root / "t")
    (root / "square").rename(root / "circle")
    (root / "t").rename(root / "square")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "fewer": (lambda root: (root / "bar" / "1.png").unlink(), r"fewer train images? \(20, now 19\)"),
    "more": (lambda root: picture("bar", 77).save(root / "bar" / "9.png"), r"1 more train image \(20, now 21\)"),
    "others": (lambda root: picture("bar", 78).save(root / "bar" / "1.png"), r"other (train|test) images \(of "),
    "relabelled": (swapped, "with other labels|other train images"),
    "a class": (lambda root: (root / "bar").rename(root / "oval"), "-'bar', "),
    "words": (lambda root: (root / "domain.txt").write_text("a sketch of a {}"), "other words for the domain"),
}


def opened(root: Path) -> Source:
    return open_source(f"folder:{root}")


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "a class"])
def test_a_change_of_the_data_is_said_in_one_line(tmp_path: Path, change: str) -> None:
    root = write_folder(tmp_path / "d")
    before = identity_of(opened(root), {"far": opened(root)})
    again = identity_of(opened(root), {})
    assert before.changes(again) == again.changes(before) == ""
    CHANGES[change][0](root)
    told = before.changes(identity_of(opened(root), {}))
    assert re.search(CHANGES[change][1], told), told
    assert "\n" not in told
    assert str(tmp_path) not in told
    assert not any(split.images[:8] in told for split in before.splits.values())


def test_classes_and_further_test_sets_are_told_by_name(tmp_path: Path) -> None:
    one = made_up_source()
    before = identity_of(one, {"far": one})
    assert "other classes" in before.changes(identity_of(replace(one, class_names=one.class_names[::-1]), {}))
    assert before.changes(identity_of(one, {"far": made_up_source(1)})) == "other far test images (of 24)"
    assert "domain" in before.changes(identity_of(replace(one, domain=ImageDomain("n", "x {}")), {}))


def test_drawn_pictures_are_what_their_uri_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is drawn for it."""
    sources = [open_source(f"symbols:neon?topic=weather&per_class={count}&test_per_class=1") for count in (2, 2, 3)]
    for source in sources:
        monkeypatch.setattr(source.train, "_read", None)
    first, same, other = (identity_of(source, {}) for source in sources)
    assert first.changes(same) == ""
    assert "10 more train images (20, now 30)" in first.changes(other)


def test_the_order_of_files_is_no_change_and_a_regrouped_image_is(tmp_path: Path) -> None:
    source = made_up_source()
    turned = replace(source, train=source.train.select(torch.arange(24).flip(0)))
    assert identity_of(source, {}) == identity_of(turned, {})
    grouped = source.train.select(torch.arange(24))
    grouped.groups = ("a", *["b"] * 23)
    told = identity_of(source, {}).changes(identity_of(replace(source, train=grouped), {}))
    assert told == "train images with other labels or groups"


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_is_gone_on_with_on_the_same_data_alone(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    root, place = write_folder(tmp_path / "d"), tmp_path / "run"

    def start(accept: bool = False) -> None:
        with run_folder(place, "a run", "--out", accept) as run:
            run.expect_data([("site", opened(root), {})])
            (place / "coordinator").mkdir(exist_ok=True)

    start()
    start()
    assert (place / "data-of-clients" / "site.json").stat().st_mode & 0o077 == 0
    CHANGES[change][0](root)
    for _ in range(2):
        with pytest.raises(
            PromptfedError, match=r"the data have changed since .* began: client site: .*; give --new-data"
        ):
            start()
    start(accept=True)
    start()
    assert not caplog.records
    shutil.rmtree(place / "data-of-clients")  # as of a run that was begun before this was kept
    start()
    assert "did not know its data: it takes those of today" in caplog.text
    start()
    assert len(caplog.records) == 1


TINY = {"rounds": 1, "backbone": {"model": "promptfed-tiny"}}


def test_a_bench_runs_no_cell_as_done_that_other_data_have_made(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "d", each=8)
    setting = Setting(data=(f"folder:{root}",), clients=2, partition="iid")
    bench = Bench(PROTOCOLS["personalisation"], parse_entries("promptfl"), setting, (0,), TINY)
    (job,) = bench.jobs()

    def run(accept: bool = False) -> str:
        runner = Runner(tmp_path / "out", new_data=accept)
        (done,) = runner.run_all([job], lambda *about: None)
        assert read_run(runner.path(job)).data == done.data
        return done.data

    before = run()
    assert run() == before
    swapped(root)
    with pytest.raises(PromptfedError, match=r"the data have changed since .* was computed .*; give --new-data"):
        run()
    after = run(accept=True)
    assert after != before
    assert run() == after
    path = Runner(tmp_path / "out").path(job)
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"backbone": "sha256:" + "0" * 64}))  # as --backbone-file has named another
    for accept in (False, True):
        with pytest.raises(
            PromptfedError, match=r"was computed with another backbone .*; give the same --backbone-file"
        ):
            run(accept)


def test_what_an_accuracy_is_of_has_its_labels(tmp_path: Path) -> None:
    """A stored zero-shot count is not told of a test set whose labels have changed."""
    source = open_source(f"folder:{write_folder(tmp_path / 'd', each=8)}")
    test = copy(source.test)
    test.labels = test.labels.flip(0)
    other = replace(source, test=test)
    one, two = (ClientData(each, cast(Backbone, None), FeatureCache(tmp_path / "features")) for each in (source, other))
    assert one.images_hash(TEST) == two.images_hash(TEST)
    context = SimpleNamespace(class_names=source.class_names, template=source.template)
    keys = [
        Evaluation.zero_shot_keys(
            cast(Evaluation, SimpleNamespace(data=data, contexts=lambda own, template: [(TEST, own)])),
            cast(ClientContext, context),
            None,
        )
        for data in (one, two, one)
    ]
    assert keys[0] == keys[2] != keys[1]
