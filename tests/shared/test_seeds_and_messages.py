"""Seeds do not depend on what ran before; messages refuse what they do not know."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from promptfed.shared.messages import Domain, EnrolRequest, EvaluationRequest, Problem, UpdateMetadata
from promptfed.shared.seeds import derive_seed, generator, sampling_order

ENROL: dict[str, Any] = {
    "name": "hospital-a", "secret": "ab" * 32, "num_samples": 10, "class_names": ["cat", "dog"],
    "backbone_fingerprint": "sha256:" + "0" * 64, "backbone_shape": {"d_e": 8},
}  # fmt: skip


def test_seeds_are_of_their_purpose_alone() -> None:
    first = torch.rand(3, generator=generator(1, 2, "a", "batches"))
    torch.manual_seed(99)
    torch.rand(10)
    assert torch.equal(first, torch.rand(3, generator=generator(1, 2, "a", "batches")))
    seeds = {derive_seed(1, 2, "a"), derive_seed(1, 2, "b"), derive_seed(1, 3, "a"), derive_seed(2, 2, "a")}
    assert len(seeds) == 4
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_sampling_order_is_by_hash() -> None:
    names = ["c", "a", "b"]
    wanted = sorted(names, key=lambda name: hashlib.sha256(f"7|3|{name}".encode()).hexdigest())
    assert sampling_order(7, 3, names) == wanted
    assert sampling_order(7, 3, names[::-1]) == wanted
    assert len({tuple(sampling_order(7, round, names)) for round in range(20)}) > 1


def test_enrolment_is_checked() -> None:
    assert EnrolRequest.model_validate(ENROL).role == "trainer"
    for change in (
        {"secret": "short"},
        {"name": "<b>"},
        {"role": "admin"},
        {"num_samples": -1},
        {"class_names": []},
        {"class_names": ["cat", "cat"]},
        {"domain": {"name": "sketch", "description": "a sketch"}},
        {"more": 1},
    ):
        with pytest.raises(ValidationError):
            EnrolRequest.model_validate(ENROL | change)


def test_messages_refuse_numbers_that_are_not_finite() -> None:
    with pytest.raises(ValidationError):
        UpdateMetadata.model_validate({"task_id": "t", "payload_sha256": "sha256:" + "0" * 64, "metrics": {"l": "nan"}})
    with pytest.raises(ValidationError):
        EvaluationRequest.model_validate({"splits": {"test": {"accuracy": 1.2, "num_samples": 3}}})
    assert Domain(name="sketch", description="a sketch of a {}").name == "sketch"


def test_problem_kind_is_the_end_of_its_type() -> None:
    problem = Problem(type="https://promptfed.invalid/problems/phase-closed", title="t", status=409, detail="d")
    assert problem.kind == "phase-closed"


LARGE = ("torch", "open_clip", "torchvision", "transformers", "scipy", "matplotlib")
COMMAND = "from promptfed.cli.main import command; sys.argv = ['promptfed', {}]; command()"
COORDINATOR = """
import asyncio, tempfile
from promptfed.coordinator.app import create_app, lifespan
from promptfed.coordinator.settings import Settings

async def start():
    async with lifespan(create_app(Settings(data_dir=tempfile.mkdtemp()))):
        pass

asyncio.run(start())
"""
STARTS = {
    "promptfed.shared.spec.spec": ("import promptfed.shared.spec.spec", []),
    "promptfed.shared.messages": ("import promptfed.shared.messages", []),
    "--help": (COMMAND.format("'--help'"), []),
    "join": (COMMAND.format("'join', 'no invitation'"), []),
    "client": (COMMAND.format("'client', '--help'"), []),
    "client up to the consent": ("import promptfed.client_service.worker", ["torch"]),
    "coordinator": (COORDINATOR, []),
}


@pytest.mark.extended
@pytest.mark.parametrize("start", STARTS)
def test_starts_import_no_large_library_that_they_do_not_need(start: str) -> None:
    code, allowed = STARTS[start]
    told = f"lambda: print([name for name in {LARGE} if name in sys.modules], file=sys.stderr)"
    code = f"import atexit, sys\natexit.register({told})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == str(allowed), done.stderr


@pytest.mark.extended
def test_methods_and_backbones_import_no_open_clip() -> None:
    code = "import sys, promptfed.shared.methods, promptfed.shared.clip; print('open_clip' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
