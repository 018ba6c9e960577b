"""Groups such as patients: read from files and tables, sampled as one, enrolled and spent as units of their own."""

from __future__ import annotations

import asyncio
import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.privacy.policy import Policy, facts_of, refusals
from promptfed.client_service.privacy.protection import groups_of, units_of
from promptfed.client_service.settings import Settings
from promptfed.shared.data import open_source
from promptfed.shared.data.source import DataError, Source
from promptfed.shared.messages import EnrolmentInfo
from promptfed.shared.privacy.accounting import Event
from promptfed.shared.privacy.settings import PrivacySpec
from promptfed.shared.spec.spec import TrainingSpec
from tests.client_service.conftest import Make

GROUP = PrivacySpec(level="sample", clip=0.3, noise_multiplier=2.0, delta=1e-3, unit="group", per_group=2)
CLASSES = ("sun", "umbrella")


def image(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten patients with two images of each class, named p03_1.png."""
    root, number = tmp_path / "eyes", 0
    for patient in range(10):
        for label in CLASSES:
            for one in range(2):
                number += 1
                image(root / label / f"p{patient:02}_{one}.png", number)
    return root


@pytest.fixture
def table(folder: Path) -> Path:
    path = folder.parent / "eyes.csv"
    with path.open("w", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(["path", "label", "patient"])
        for file in sorted(folder.rglob("*.png")):
            writer.writerow([file.relative_to(folder.parent), file.parent.name, file.name[:3]])
    return path


def opened(folder: Path) -> Source:
    return open_source(f"folder:{folder}?group=^(p\\d%2B)_")


def test_a_group_is_trained_on_or_tested_on_as_a_whole(folder: Path, table: Path) -> None:
    for source in (opened(folder), open_source(f"csv:{table}?group=patient")):
        train, test = source.train.groups, source.test.groups
        assert train is not None
        assert test is not None
        assert not set(train) & set(test)
        assert (len(set(train)), len(set(test))) == (8, 2)
        assert (len(source.train), len(source.test)) == (32, 8)
        assert len(set(train)) * 4 == len(train)
    again = opened(folder)
    assert again.train.groups == opened(folder).train.groups
    held = open_source(f"folder:{folder}?group=^(p\\d%2B)_&validation=0.25")
    assert held.train.groups is not None
    assert held.test.groups is not None
    assert not set(held.train.groups) & set(held.test.groups)


def test_what_names_no_groups_is_refused(folder: Path, table: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"its name has no group \(\^\(q\)\)"):
        open_source(f"folder:{folder}?group=^(q)")
    with pytest.raises(DataError, match="captures nothing"):
        open_source(f"folder:{folder}?group=p")
    with pytest.raises(DataError, match="is not a regular expression"):
        open_source(f"folder:{folder}?group=(p")
    with pytest.raises(DataError, match=r"has no column doctor"):
        open_source(f"csv:{table}?group=doctor")
    for split in ("train", "test"):
        for number, label in enumerate(CLASSES):
            image(tmp_path / "split" / split / label / "p1_x.png", number + 10 * len(split))
    with pytest.raises(DataError, match="the group p1 has images in train and in test"):
        open_source(f"folder:{tmp_path / 'split'}?group=^(p1)")
    with pytest.raises(ClientError, match="the data name none: add group=COLUMN to a csv: URI") as error:
        groups_of(GROUP, open_source(f"folder:{folder}").train)
    assert error.value.exit is Exit.LEDGER


def test_the_first_images_of_a_group_in_order_of_digest_stand_for_it(folder: Path) -> None:
    train = opened(folder).train
    groups = groups_of(GROUP, train)
    assert groups is not None
    assert train.groups is not None
    assert [len(rows) for rows in groups] == [2] * 8
    for name, rows in zip(sorted(set(train.groups)), groups, strict=True):
        mine = [row for row, group in enumerate(train.groups) if group == name]
        assert list(rows) == sorted(mine, key=train.digest)[:2]
    assert groups_of(GROUP.model_copy(update={"unit": "record"}), train) is None


def test_a_client_enrols_its_groups_and_spends_them(
    folder: Path, make: Make, settings: Settings, tmp_path: Path
) -> None:
    training = TrainingSpec(learning_rate=0.1, batch_size=4).model_dump()
    coordinator = make.coordinator(privacy=GROUP.model_dump(), training=training, rounds=1, class_names=list(CLASSES))
    own = settings.model_copy(update={"ledger": tmp_path / "ledger.jsonl", "max_epsilon": 50.0})
    assert asyncio.run(make.worker(coordinator, settings=own, source=opened(folder)).run()) is Exit.OK
    ledger = Ledger(own.ledger_file)
    assert ledger.kept_unit() == "group"
    assert [one.events for one in ledger.spends()] == [(Event("gaussian", 0.5, 2.0, 2),)], "8 groups in batches of 4"
    assert coordinator.client is not None
    told = coordinator.client.protection
    assert told is not None
    assert (coordinator.client.num_samples, told.units, told.noise_multiplier) == (32, 8, 2.0)
    single = make.coordinator(privacy=GROUP.model_copy(update={"unit": "record"}).model_dump(), training=training)
    another = own.model_copy(update={"state_dir": tmp_path / "other"})
    with pytest.raises(ClientError, match="the ledger of 'default' is of groups, and the federation protects records"):
        asyncio.run(make.worker(single, settings=another).run())


def test_a_site_s_policy_names_the_unit_and_counts_steps_over_groups(folder: Path) -> None:
    info = EnrolmentInfo.model_validate(
        {
            "federation_id": "fed-1", "name": "eyes", "method": {"name": "promptfl"}, "backbone": {},
            "class_names": list(CLASSES), "template": None, "state": "enrolling", "rounds": 1, "seed": 0,
            "training": TrainingSpec(batch_size=4).model_dump(), "evaluate_every": 1, "privacy": GROUP.model_dump(),
        }
    )  # fmt: skip
    train = opened(folder).train
    facts = facts_of(info, "https://x", "trainer", len(train), units_of(info, train))
    assert (facts.unit, facts.steps) == ("group", 2)
    offended = {
        unit: [one.kind for one in refusals(Policy.model_validate({"version": 1, "privacy": {"unit": unit}}), facts)]
        for unit in ("record", "group")
    }
    assert offended == {"record": ["policy-unit"], "group": []}
