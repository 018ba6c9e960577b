"""The demonstrations' data: what their settings name exists, and the unseen domain is no client's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from promptfed.shared.data import open_source
from promptfed.shared.data.demo import DEMOS, Demo
from promptfed.shared.spec.spec import TrainingSpec

EMBEDDED = {name: demo for name, demo in DEMOS.items() if not demo.scans}


@pytest.mark.parametrize("demo", EMBEDDED.values(), ids=list(EMBEDDED))
def test_clients_share_classes_and_template_but_not_the_unseen_domain(demo: Demo) -> None:
    sources = [open_source(uri) for _, uri in demo.clients]
    unseen = open_source(demo.unseen[1])
    assert len({name for name, _ in [*demo.clients, demo.unseen]}) == len(demo.clients) + 1
    assert {s.class_names for s in sources} == {unseen.class_names}
    assert demo.class_names in (None, unseen.class_names)
    assert {s.template for s in [*sources, unseen]} == {demo.template}
    assert unseen.domain is not None
    assert unseen.domain not in [s.domain for s in sources]


@pytest.mark.parametrize("demo", DEMOS.values(), ids=list(DEMOS))
def test_training_settings_are_a_spec_s(demo: Demo) -> None:
    for method in (demo.method, *demo.others, "promptfl"):
        assert TrainingSpec.model_validate(dict(demo.training(method))).epochs == 1


def test_the_settings_are_read_without_torch() -> None:
    code = "import promptfed.shared.data.demo, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
