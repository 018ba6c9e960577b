"""The places of a client's bodies are counted, and forgotten with the last one."""

from __future__ import annotations

from typing import Any

from promptfed.coordinator.http.uploads import Incoming, Uploads


def test_a_client_s_places_are_shared_by_its_bodies_until_the_last_has_left() -> None:
    receive: Any = None
    registry: Any = None
    uploads, body, other = Uploads(registry, 4, 1.0, 1.0), Incoming(receive, 10, "a"), Incoming(receive, 10, "b")
    first, second, third = uploads.enter(body), uploads.enter(body), uploads.enter(other)
    assert first is second
    assert (first.bodies, third.bodies) == (2, 1)
    uploads.leave(body, first)
    assert uploads._by_client == {"a": first, "b": third}
    uploads.leave(body, first)
    assert uploads._by_client == {"b": third}
