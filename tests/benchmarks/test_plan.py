"""The benchmark of PLAN measures what it says: equal towers, the method's own step, the paper's numbers."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks.plan import OPTIONS, Bench, count_numbers, make_bench, measure_time, plain_images
from tests.support.equality import assert_gradients, assert_values
from tests.support.visual_clients import filled


@pytest.fixture(scope="module")
def bench() -> Bench:
    return make_bench(
        argparse.Namespace(model="promptfed-tiny", batch=4, clients=3), ("sun", "umbrella", "chess knight")
    )


def test_the_plain_towers_are_the_same_towers(bench: Bench) -> None:
    prompts = bench.state["visual_prompts"]
    pair = []
    for encode in (plain_images, lambda backbone, *given: backbone.encode_images_prompted(*given)):
        leaf = prompts.clone().requires_grad_()
        found = encode(bench.backbone, bench.batch.pixels, leaf)
        weight = filled({"w": tuple(found.shape)}, 1, 1.0)["w"]
        pair.append((found, torch.autograd.grad((found * weight).sum(), leaf)[0]))
    assert_values(pair[0][0], pair[1][0])
    assert_gradients(pair[0][1], pair[1][1])


def test_a_step_is_the_method_s_own(bench: Bench) -> None:
    for phase, names in (("prompts", {"text_prompts", "visual_prompts"}), ("aggregators", set())):
        update = bench.step(phase)
        assert set(update) == (names or {name for name in bench.state if "aggregator" in name})
        assert any(not tensor.equal(bench.state[name]) for name, tensor in update.items())
    plain = bench.step("prompts")["visual_prompts"] - bench.state["visual_prompts"]
    for name, options in OPTIONS.items():
        other = bench.step("prompts", **options)["visual_prompts"] - bench.state["visual_prompts"]
        assert float((other - plain).norm() / plain.norm()) < (0.1 if "bf16" in name else 1e-4)


def test_all_ways_are_timed(bench: Bench) -> None:
    found = measure_time(bench, repeats=2, plain_repeats=1)
    for phase in ("prompts", "aggregators"):
        assert {way: len(runs) for way, runs in found[phase]["runs"].items()} == {"step": 2, "floor": 2, "plain": 1}
        ratio = found[phase]["median"]["step"] / found[phase]["median"]["floor"] - 1
        assert found[phase]["over_floor"] == pytest.approx(ratio, abs=1e-4)


def test_numbers_that_travel() -> None:
    found = count_numbers()
    assert found["plan"]["both_ways"] == 11_152_896
    assert found["fedmaple"]["both_ways"] == 2 * 9 * (8 * 512 + 768 * 512 + 768)
    assert found["fedvpt_deep"]["both_ways"] == 2 * 12 * 768
