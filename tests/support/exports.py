"""Federations of every method at one coordinator, with the embedded backbone, as exports are made of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from promptfed.sdk.client import Coordinator
from promptfed.sdk.operations import take
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, load_backbone, shape_of
from promptfed.shared.data import open_source
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode, state_hash
from tests.support.coordinators import InThread

NAMES = ["anchor", "sun", "umbrella", "pair of scissors"]
DOMAINS = ("sketch", "neon")
SPECS: dict[str, dict[str, Any]] = {
    "promptfl": {"m": 4}, "fedpgp": {"m": 4}, "fedtpg": {"m": 4}, "fast_pt": {"m": 2}, "zero_shot": {}, "fedclip": {},
    "plan": {"m": 2}, "pfedpg": {"m": 2}, "coop": {"m": 4},
}  # fmt: skip

# Runs cards' code in their folders where nothing of promptfed can be imported, and writes the logits.
WITHOUT_PROMPTFED = """
import importlib.abc, sys
OURS = {"promptfed", "shared", "coordinator", "client_service"}

class ImportRefuser(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OURS:
            raise ModuleNotFoundError(f"{name} is not to be had here", name=name)

sys.meta_path.insert(0, ImportRefuser())
try:
    import promptfed
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("promptfed was imported")
import os, torch
from safetensors.torch import save_file
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    os.chdir(folder)
    found = {}
    exec(compile(open("snippet.py", encoding="utf-8").read(), "snippet.py", "exec"), found)
    save_file({"logits": found["logits"].contiguous()}, "logits.safetensors")
assert not OURS & {name.partition(".")[0] for name in sys.modules}
"""


@cache
def backbone() -> Backbone:
    """The embedded one, on one thread."""
    torch.set_num_threads(1)
    return load_backbone("promptfed-tiny", "embedded")


def start_federations(server: InThread, model: Backbone, **changes: Any) -> None:
    """One started federation of each method, named as the method."""
    for method, hyper in SPECS.items():
        spec = {"name": method.replace("_", "-"), "method": {"name": method, **hyper}, "class_names": NAMES}
        spec["backbone"] = {"model": "promptfed-tiny"}
        start_federation(server, model, spec | changes)


def start_federation(server: InThread, model: Backbone, spec: dict[str, Any]) -> None:
    """A started federation with two trainers."""
    federation = str(server.post("/v1/federations", spec, status=201)["id"])
    for name, domain in zip("ab", DOMAINS, strict=True):
        about = {"name": domain, "description": f"a {domain} of a {{}}"}
        known = {"backbone_fingerprint": model.fingerprint, "backbone_shape": shape_of(model).model_dump()}
        server.enrol(federation, name, domain=about, class_names=NAMES, **known)
    server.post(f"{federation}/start")


def api(server: InThread) -> Coordinator:
    """The command's view of a coordinator."""
    return Coordinator(server.url, (server.settings.data_dir / "operator.token").read_text().strip())


def finished_result(server: InThread, method: str) -> FederationResult:
    """What `promptfed export` takes of the federation of ``method``."""
    with api(server) as calls:
        return calls.run(take(method.replace("_", "-")))


def with_state(found: FederationResult, **tensors: torch.Tensor) -> FederationResult:
    """The same federation, with other tensors in its state."""
    state: Tensors = decode(found.body)[0] | tensors
    card = found.card | {"hashes": found.card["hashes"] | {"state": state_hash(state)}}
    return replace(found, body=encode(state), state_hash=state_hash(state), card=card)


def picture() -> Image.Image:
    """An embedded drawing."""
    return open_source("symbols:sketch?test_per_class=1").test.image(0)


def code_of(card: Path) -> str:
    """The Python code in a card."""
    text = card.read_text(encoding="utf-8")
    assert text.count("```python\n") == 1
    return text.split("```python\n")[1].split("```")[0]


PYTHON = sys.executable
