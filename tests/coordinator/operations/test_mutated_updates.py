"""Mutations of a good update: refused or good, and nothing breaks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.operations import submissions
from promptfed.testing.clients import trained, update_body
from tests.support.coordinators import in_thread
from tests.support.open_phases import kind, open_first_phase, stored_rows

mutations = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "repeat", "zero"]), st.integers(0, 10**6), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


def mutate(body: bytes, steps: list[tuple[str, int, int]]) -> bytes:
    content = bytearray(body)
    for what, where, value in steps:
        at = where % max(1, len(content))
        if what == "flip" and content:
            content[at] ^= value or 1
        elif what == "cut":
            del content[at:]
        elif what == "insert":
            content[at:at] = bytes([value]) * (1 + where % 9)
        elif what == "repeat":
            content += content[at : at + 50]
        elif content:
            content[at : at + 8] = bytes(min(8, len(content) - at))
    return bytes(content)


@pytest.mark.extended
def test_mutated_updates_are_refused_or_good_and_never_break_anything(tmp_path_factory: pytest.TempPathFactory) -> None:
    with in_thread(tmp_path_factory.mktemp("fuzz") / "data") as coordinator:
        federation, (a, _), (task, _) = open_first_phase(coordinator)
        good = update_body(trained(a.payload(task), "a", task), task)
        live = coordinator.registry.federations[federation]
        client = live.clients["a"]
        before = stored_rows(coordinator.registry, federation)
        seen: set[str] = set()

        @settings(max_examples=300, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
        @given(mutations, st.booleans())
        @example([("flip", good.index(task["task_id"].encode()), 1)], True)
        @example([("flip", good.index(b"payload_sha256"), 1)], True)
        def one(steps: list[tuple[str, int, int]], over_http: bool) -> None:
            body = mutate(good, steps)
            refusal = judged(coordinator.registry, live, client, task, body)
            if refusal is None:
                return  # A flipped bit of a number or a metric is still an update.
            seen.add(refusal)
            if over_http:
                response = a.send(task, body)
                assert 400 <= response.status_code < 500, response.text
                assert kind(response) == refusal
            assert coordinator.registry.federations[federation].run == before[0]

        one()
        assert stored_rows(coordinator.registry, federation) == before
        assert {"not-safetensors", "bad-metadata", "wrong-task"} <= seen
        assert a.send(task, good).status_code == 201


def judged(registry: Registry, live: Any, client: Any, task: dict[str, Any], body: bytes) -> str | None:
    """The kind of the refusal that a body meets, or None: the examination by itself, without storing."""
    from promptfed.coordinator.problems import Refusal
    from promptfed.coordinator.store.blobs import Upload, digest_of

    path = registry.blobs.temporary()
    path.write_bytes(body)
    try:
        asked = submissions.asked_task(registry.database, live, client, task["task_id"])
        submissions._examine(registry.blobs, live, client, asked, Upload(path, len(body), digest_of(body)))
    except Refusal as refusal:
        return refusal.kind
    finally:
        path.unlink()
    return None
