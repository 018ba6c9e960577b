"""Updates of hundreds of megabytes: the same bits by entry as by update, in files, within limits that grow with it."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from promptfed.coordinator.aggregation import rows, rules
from promptfed.coordinator.aggregation.rules import Rule, weighted_mean
from promptfed.coordinator.store.blobs import Blobs
from promptfed.coordinator.store.stored_tensors import put_tensors, room
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core.costs import exchanged, needed_bytes, update_limit
from promptfed.shared.methods.core.interface import ClientUpdate, Method, MethodError, ServerContext
from promptfed.shared.methods.core.refusals import check_sizes
from promptfed.shared.spec.sections import AggregationSpec
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import decode_file, encode, encode_file, state_hash
from promptfed.shared.tensors.torch_tensors import arrays_of
from tests.support.coordinators import InThread

SIZES = {"d_t": 512, "d_v": 768, "d_e": 512, "text_layers": 12, "vision_layers": 12, "context_length": 77}
VIT_B_32 = BackboneShape(patch_size=32, mlp_width=3072, positions=50, **SIZES)


def updates_in(folder: Path, count: int = 5) -> list[ClientUpdate]:
    """Mapped from files, as the coordinator has them."""
    found = []
    for number in range(count):
        draws = torch.Generator().manual_seed(number)
        tensors = {"b": torch.randn(3, 16_411, generator=draws), "a": torch.randn(7, generator=draws)}
        tensors["c"] = torch.tensor(float(number))
        path = folder / f"{number}.safetensors"
        encode_file(arrays_of(tensors), path)
        found.append(ClientUpdate(f"client-{number}", (number + 1) / 15, decode_file(path)[0]))
    return found


def test_by_entry_comes_to_the_bits_of_update_by_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = updates_in(tmp_path)
    by_update = weighted_mean(updates)
    monkeypatch.setattr(rules, "LARGE", 0)
    blobs = Blobs(tmp_path)
    blobs.open()
    with room(blobs) as space:
        by_entry = weighted_mean(iter(updates), space)
        assert len(list(blobs.incoming.iterdir())) == 3
    assert list(blobs.incoming.iterdir()) == [], "nothing is left on the disk"
    assert state_hash(by_entry) == state_hash(by_update)
    with pytest.raises(ValueError, match="no update"):
        weighted_mean([])


RULES = ("mean", "median", "trimmed_mean", "krum", "multi_krum")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block", [rows.BLOCK, 10_000])  # one that holds all, and some that end within tensors
def test_a_robust_rule_comes_to_the_same_bits_from_files(
    rule: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BLOCK", block)
    updates = updates_in(tmp_path, 7)
    base = arrays_of({"b": torch.full((3, 16_411), 0.25), "a": torch.ones(8)})  # another size: begins at zero
    spec = {"rule": rule, "clip_norm": 200.0}
    held, mapped = (Rule(AggregationSpec.model_validate({**spec, "weighting": "uniform"}), base) for _ in range(2))
    in_memory = held(updates)
    monkeypatch.setattr(rows, "LARGE", 0)
    monkeypatch.setattr(rows.Rows, "_flat", None)  # nothing is put together
    blobs = Blobs(tmp_path)
    blobs.open()
    with room(blobs) as mapped.room:
        from_files = mapped(updates)
        assert len(list(blobs.incoming.iterdir())) >= 4, "the vector and three tensors"
    assert list(blobs.incoming.iterdir()) == [], "nothing is left on the disk"
    assert state_hash(from_files) == state_hash(in_memory)
    assert mapped.judged == held.judged


def test_a_file_of_tensors_has_the_bytes_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_tensors = {"b": torch.randn(3, 5), "a": torch.arange(4), "c": torch.randn(2).bfloat16()}
    tensors = arrays_of(torch_tensors) | {"d": np.arange(16.0, dtype=np.float32).reshape(4, 4).T}
    encode_file(tensors, tmp_path / "file", {"task": "ü"})
    assert (tmp_path / "file").read_bytes() == encode(tensors, {"task": "ü"})
    monkeypatch.setattr("promptfed.coordinator.store.stored_tensors.LARGE", 0)
    blobs = Blobs(tmp_path)
    blobs.open()
    with blobs.hold() as held:
        stored = put_tensors(blobs, held, tensors)
        assert held.put(encode(tensors)) == stored.digest
    assert blobs.read(stored.digest) == encode(tensors)
    assert stored.size == len(encode(tensors))
    assert list(blobs.incoming.iterdir()) == []


def sized(shape: BackboneShape = VIT_B_32, rounds: int = 20, **options: object) -> tuple[Method, ServerContext]:
    context = ServerContext(TrainingSpec(), shape, None, (), seed=0, rounds=rounds)
    return make_method({"name": "fedavg", **options}), context


def spec_of(**given: object) -> Any:
    return resolve_spec({"name": "large", "method": {"name": "fedavg"}, **given})


def test_limits_grow_with_what_a_method_sends() -> None:
    method, context = sized()
    _, up = exchanged(method, context)
    assert up == 4 * 87_849_216
    assert update_limit(spec_of(), method, context) == int(1.1 * up) + (1 << 20)
    assert update_limit(spec_of(admission={"max_bytes": 1 << 20}), method, context) == 1 << 20
    small, _ = sized(trainable="norms")
    assert update_limit(spec_of(), small, context) == 64 << 20
    assert needed_bytes(spec_of(), method, context, 10) == 2 * 11 * up + 2 * up
    assert needed_bytes(spec_of(), small, context, 10) == 0


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    method, context = sized()
    check_sizes(spec_of(), method, context, 10)
    with pytest.raises(MethodError, match=r"take 671 s at 1 MB/s, and participation.deadline_seconds is 600"):
        check_sizes(spec_of(participation={"deadline_seconds": 600.0}), method, context, 10)
    with pytest.raises(MethodError, match=r"an update has 351,396,864 bytes, and admission.max_bytes allows 1,000,000"):
        check_sizes(spec_of(admission={"max_bytes": 1_000_000}), method, context, 10)
    with pytest.raises(MethodError, match="take krum"):
        check_sizes(spec_of(aggregation={"rule": "median"}), method, context, 10)
    patient = {"min_clients": 5, "deadline_seconds": 3600.0}
    check_sizes(spec_of(aggregation={"rule": "krum"}, participation=patient), method, context, 10)
    last, _ = sized(trainable="last_k", k=3)
    check_sizes(spec_of(aggregation={"rule": "median"}), last, context, 3)
    larger = {"d_v": 1664, "mlp_width": 8192, "vision_layers": 48, "positions": 257, "patch_size": 14}
    giant = VIT_B_32.model_copy(update=larger)
    with pytest.raises(MethodError, match="2,147,483,648 is the most"):
        check_sizes(spec_of(), method, ServerContext(TrainingSpec(), giant, None, (), seed=0, rounds=2), 1)


# Whole towers: the disk that they need is looked at before the start.

BYTES = 4 * 87_849_216  # of a ViT-B/32's tower


Usage = namedtuple("Usage", "total used free")


def test_a_disk_without_room_keeps_a_federation_from_starting(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = VIT_B_32.model_dump(mode="json")
    backbone = {"model": "ViT-B-32", "pretrained": "openai", "shape": shape}
    spec = {"name": "whole", "method": {"name": "fedavg"}, "backbone": backbone, "rounds": 2}
    coordinator.post("/v1/federations", json=spec, status=201)
    coordinator.enrol("whole", "a", "b", backbone_shape=shape)
    # Updates and payload of two rounds, and two states that are being written.
    needed = 2 * (2 + 1) * BYTES + 2 * BYTES
    free = needed - 1
    usage = "promptfed.coordinator.engine.jobs.shutil.disk_usage"
    monkeypatch.setattr(usage, lambda path: Usage(0, 0, free))
    refused = coordinator.post("whole/start", status=409)
    assert refused["type"].endswith("/cannot-start")
    assert f"2 trainers need about {needed:,} bytes of disk at once, and {free:,} are free: make" in refused["detail"]
