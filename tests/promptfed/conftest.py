"""An export of a federation over pictures of one's own, and the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import promptfed
from promptfed.cli.main import app
from promptfed.shared.clip import Backbone
from tests.support import exports
from tests.support.coordinators import InThread, in_thread
from tests.support.own_images import SHAPES, write_folder


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return exports.backbone()


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory, backbone: Backbone) -> Iterator[InThread]:
    """With a started federation of each method."""
    with in_thread(tmp_path_factory.mktemp("coordinator") / "data") as server:
        exports.start_federations(server, backbone)
        yield server


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    data = {name: f"folder:{write_folder(folder / name, seed=seed, each=4)}" for seed, name in enumerate(("a", "b"))}
    spec = {"name": "promptfl", "m": 2}
    result = promptfed.run(spec, data, rounds=1, class_names=list(SHAPES), backbone=exports.backbone())
    result.export(folder / "export")
    return folder / "export"
