"""What commands and services import: each large library only where it is used, since its import takes seconds."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from promptfed.shared.clip import shape_of
from promptfed.shared.methods.core.spec_backbone import open_backbone
from promptfed.shared.service.reasons import Exit
from promptfed.shared.spec.spec import BackboneSpec
from tests.support.coordinators import in_thread
from tests.support.waiting import PATIENCE, wait_for

LARGE = ("torch", "open_clip", "torchvision", "timm", "transformers", "scipy", "matplotlib", "sklearn", "sympy")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-X", "importtime", "-m", *arguments]


def large(told: str) -> dict[str, int]:
    """How many modules of each large library were imported, by what Python has ``told`` on stderr."""
    names = re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", told, re.MULTILINE)
    assert "argparse" in names
    assert "torch._dynamo" not in names
    counted = Counter(name.partition(".")[0] for name in names)
    return {name: counted[name] for name in LARGE if counted[name]}


def ran(*arguments: str) -> tuple[int, dict[str, int]]:
    done = subprocess.run(
        command(*arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )
    return done.returncode, large(done.stderr)


def test_help_and_a_bad_invitation_import_nothing_large() -> None:
    assert ran("promptfed", "--help") == (0, {})
    assert ran("promptfed", "join", "no-invitation", "--name", "a", "--data", "symbols") == (Exit.NOT_ALLOWED, {})


def test_a_coordinator_imports_nothing_large(tmp_path: Path) -> None:
    place = tmp_path / "url"
    options = [f"--data-dir={tmp_path / 'data'}", "--database-url=", "--port=0", f"--port-file={place}"]
    with (
        (tmp_path / "told").open("w") as told,
        subprocess.Popen(command("promptfed.coordinator", *options), stdout=told, stderr=told) as running,
    ):
        wait_for("its address", lambda: place.exists() or running.poll() is not None)
        running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE) == 0
    assert large((tmp_path / "told").read_text()) == {}


def test_a_client_imports_torch_alone_up_to_the_consent(tmp_path: Path) -> None:
    with in_thread(tmp_path / "data") as server:
        backbone = open_backbone(BackboneSpec(model="promptfed-tiny"), allow_backbone=False)
        about = {
            "model": "promptfed-tiny",
            "fingerprint": backbone.fingerprint,
            "shape": shape_of(backbone).model_dump(),
        }
        spec = {"name": "pets", "method": {"name": "promptfl", "m": 4}, "backbone": about}
        server.post("/v1/federations", spec, status=201)
        (tmp_path / "token").write_text(server.token("pets"))
        code, found = ran("promptfed.client_service", *given(server.url, tmp_path))
    assert code == Exit.DECLINED  # what was agreed to is another offer
    assert found.keys() == {"torch"}


def given(url: str, folder: Path) -> Sequence[str]:
    options = {
        "coordinator": url, "federation": "pets", "name": "a", "data": "symbols:neon?only=sun,cloud",
        "agree": "sha256:" + "0" * 64,
    }  # fmt: skip
    options |= {"enrolment-token-file": str(folder / "token"), "state-dir": str(folder / "state")}
    return [f"--{name}={value}" for name, value in options.items()]
