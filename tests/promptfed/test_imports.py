"""What commands and services import: each large library only where it is used, since its import takes seconds."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from promptfed.shared.clip import shape_of
from promptfed.shared.clip.embedded import EMBEDDED
from promptfed.shared.methods.core.spec_backbone import open_backbone
from promptfed.shared.service.reasons import Exit
from promptfed.shared.spec.spec import BackboneSpec
from tests.support.coordinators import in_thread
from tests.support.waiting import PATIENCE, wait_for

LARGE = ("torch", "open_clip", "torchvision", "timm", "transformers", "scipy", "matplotlib", "sklearn", "sympy")


# One process asks for help and then takes a bad invitation: it starts once, and only imports more.
HELP = """
import sys
from promptfed.cli.main import command, main
sys.argv = ["promptfed", "--help"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
sys.argv = ["promptfed", "join", "no-invitation", "--name", "a", "--data", "symbols"]
command()
"""

# A client comes up to the consent. Then each embedded backbone computes, and each optimizer takes a step.
CLIENT = f"""
import sys
from promptfed.client_service.__main__ import main
large = {{*{LARGE}, "ftfy", "torch._dynamo"}}
print(main(sys.argv[1:]), sorted(large & set(sys.modules)))
import torch
from PIL import Image
from promptfed.shared.clip import load_backbone, shape_of
from promptfed.shared.clip.sizes import shape_by_name
from promptfed.shared.methods.core.training import make_optimizer
from promptfed.shared.spec.spec import TrainingSpec
for name in {list(EMBEDDED)}:
    backbone = load_backbone(name, "embedded")
    backbone.fingerprint, shape_of(backbone), shape_by_name(name)
    backbone.encode_text(["a sun"]), backbone.encode_images(backbone.preprocess(Image.new("RGB", (50, 50)))[None])
for name in ("sgd", "adam", "adamw"):
    part = torch.ones(2, requires_grad=True)
    optimizer = make_optimizer([part], TrainingSpec(optimizer=name), 0.1)
    part.sum().backward()
    optimizer.step()
print(sorted(large & set(sys.modules)))
"""


def started(*arguments: str) -> list[str]:
    return [sys.executable, "-X", "importtime", *arguments]


def large(told: str) -> set[str]:
    """The large libraries that were imported, by what Python has ``told`` on stderr."""
    names = re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", told, re.MULTILINE)
    assert "argparse" in names
    return {name.partition(".")[0] for name in names} & set(LARGE)


def test_help_and_a_bad_invitation_import_nothing_large() -> None:
    done = subprocess.run(
        started("-c", HELP), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == Exit.NOT_ALLOWED, done.stderr
    assert done.stdout.strip().startswith("Usage: promptfed ")
    assert large(done.stderr) == set()


def test_a_coordinator_imports_nothing_large(tmp_path: Path) -> None:
    place = tmp_path / "url"
    options = [f"--data-dir={tmp_path / 'data'}", "--database-url=", "--port=0", f"--port-file={place}"]
    with (
        (tmp_path / "told").open("w") as told,
        subprocess.Popen(started("-m", "promptfed.coordinator", *options), stdout=told, stderr=told) as running,
    ):
        wait_for("its address", lambda: place.exists() or running.poll() is not None)
        running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE) == 0
    assert large((tmp_path / "told").read_text()) == set()


def test_a_client_imports_torch_alone_up_to_the_consent_and_afterwards(tmp_path: Path) -> None:
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
        command = [sys.executable, "-c", CLIENT, *given(server.url, tmp_path)]
        told = subprocess.check_output(command, stdin=subprocess.DEVNULL, text=True, timeout=PATIENCE)
    # What was agreed to is another offer.
    assert told.splitlines() == [f"{Exit.DECLINED:d} ['torch']", "['torch']"]


def given(url: str, folder: Path) -> Sequence[str]:
    options = {
        "coordinator": url, "federation": "pets", "name": "a", "data": "symbols:neon?only=sun,cloud",
        "agree": "sha256:" + "0" * 64,
    }  # fmt: skip
    options |= {"enrolment-token-file": str(folder / "token"), "state-dir": str(folder / "state")}
    return [f"--{name}={value}" for name, value in options.items()]
