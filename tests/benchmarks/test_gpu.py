"""The GPU's benchmark without a GPU: its numbers, its page, and that all parts run on the embedded backbone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import open_clip
import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import with_words
from promptfed.experiments.simulation.preparation import prepare
from promptfed.shared.clip import load_backbone
from promptfed.shared.data import open_source
from promptfed.shared.methods import METHODS

SIGLIP = {
    "embed_dim": 16, "custom_text": True, "init_logit_bias": -10,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {
        "context_length": 16, "vocab_size": 1000, "hf_tokenizer_name": "nobody/has-this", "width": 24, "heads": 4,
        "layers": 2, "no_causal_mask": True, "proj_bias": True, "pool_type": "last",
    },
}  # fmt: skip


def test_the_distance_of_two_states() -> None:
    wanted = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([0.5]), "none": torch.zeros(0)}
    state = {"a": torch.tensor([1.0, -3.0]), "b": torch.tensor([0.25]), "none": torch.zeros(0)}
    assert gpu.distance(state, wanted) == 0.25
    assert gpu.distance(wanted, wanted) == 0
    assert gpu.distance({}, {}) == 0


def test_a_case_that_fails_or_has_no_time_is_told_and_the_others_stay(tmp_path: Path) -> None:
    part = gpu.Part("cpu", gpu.SMALL, time.monotonic() + 300, tmp_path / "figures.jsonl", True, "steps")

    def full() -> dict[str, object]:
        raise torch.OutOfMemoryError("the device is\nfull")

    part.case("well", lambda: {"seconds": 1.0})
    part.case("badly", full)
    part.until = 0.0
    part.case("late", full)
    found = gpu.read(part.out)
    assert found is not None
    assert found["parts"]["steps"] == {
        "well": {"seconds": 1.0},
        "badly": {"failed": "OutOfMemoryError: the device is full"},
        "late": {"skipped": "no time was left"},
    }


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    assert "there is no CUDA device here" in capsys.readouterr().err


def test_all_parts_end_within_ten_minutes() -> None:
    runs = [budget + gpu.STARTING for name, budget in gpu.BUDGETS.items() for _ in range(gpu.BACKBONES.get(name, 1))]
    assert sum(runs) <= 600
    assert gpu.BUDGETS["methods"] / 2 > gpu.REFERENCES
    assert set(gpu.BUDGETS) == set(gpu.PARTS)


def test_the_page_is_made_of_the_numbers_or_says_that_there_are_none() -> None:
    wanted = gpu.page(gpu.read(gpu.NUMBERS))
    assert gpu.PAGE.read_text() == wanted, "python -m benchmarks.gpu --page"


def test_the_page_shows_a_method_beside_its_run_on_the_cpu() -> None:
    methods = {
        "ViT-B-16 plan": {"task_seconds": 0.0123456, "peak_mib": 900},
        "ViT-B-16 plan cpu": {"task_seconds": 4.5, "distance": 3e-6},
        "ViT-L-14 plan": {"failed": "OutOfMemoryError: full"},
    }
    parts = {"methods": methods, "twice": {"ViT-B-16 plan": {"state_hashes": ["sha256:" + "a" * 64], "same": True}}}
    shown = gpu.page({"about": {"device": "X", "torch": "2"}, "smoke": False, "seconds": 9.0, "parts": parts})
    assert "| ViT-B-16 plan | 0.0123 | 900 | 4.5 | 3e-06 |  |" in shown
    assert "| ViT-L-14 plan |  |  |  |  | OutOfMemoryError: full |" in shown
    assert "| ViT-B-16 plan | True | sha256:aaaaaaaaaaaa... |" in shown


@pytest.mark.parametrize("model", ["promptfed-tiny", "small-siglip"])
def test_each_method_has_a_federation_that_fits(model: str, tmp_path: Path) -> None:
    (tmp_path / "small-siglip.json").write_text(json.dumps(SIGLIP))
    open_clip.add_model_config(tmp_path)
    backbone = with_words(load_backbone(model, "embedded" if model == "promptfed-tiny" else None))
    for name in sorted(METHODS):
        spec, sites = gpu.plan(model, backbone.pretrained or "random", name, 2)
        domains = {open_source(site.data).domain.description for site in sites}
        assert len(domains) == 2
        prepare(spec, sites, 1, backbone, False)


@pytest.mark.parametrize("method", ["promptfl", "plan"])
def test_a_plain_loop_runs_beside_ours(method: str) -> None:
    found = gpu.beside(load_backbone("promptfed-tiny", "embedded"), method, 3, 1)
    assert set(found) == {"ours, s", "plain, s", "ratio"}
    assert found["ratio"] == pytest.approx(found["ours, s"] / found["plain, s"], rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_parts_run_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "smoke.jsonl"
    assert gpu.main(["--device", "cpu", "--smoke", "--seconds", "600", "--out", str(out)]) == 0
    found = gpu.read(out)
    assert found is not None
    parts = found["parts"]
    assert set(parts) == set(gpu.PARTS)
    cases = [case for part in parts.values() for case in part.values()]
    assert not [case for case in cases if {"failed", "skipped"} & set(case)]
    model = next(iter(gpu.SMALL))
    for name in METHODS:
        assert parts["methods"][f"{model} {name} cpu"]["distance"] == 0  # the same computation on the same device
    assert parts["clients"][f"{model} pool 4"]["same_state_as_in_turn"]
    hashes = {parts["crews"][f"{model} crews {count}"]["state_hash"] for count in (1, 2)}
    assert hashes == {parts["clients"][f"{model} pool 1"]["state_hash"]}
    assert parts["twice"][f"{model} promptfl"]["same"]
    full = parts["memory"][f"{model} plan"]
    assert full["named"], full["failure"]
    assert full["same_state_after"]
