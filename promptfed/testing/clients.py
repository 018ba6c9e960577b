"""Clients that follow a script: they enrol, pull, push and evaluate over plain httpx, without a backbone or training.

Their updates depend only on what they pulled, on their name, the round and the phase.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch

from promptfed.sdk.arguments import all_checked, checked
from promptfed.shared.seeds import generator
from promptfed.shared.service import digests
from promptfed.shared.spec.spec import merged
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode
from promptfed.shared.versions import PROTOCOL, VERSION

PATIENCE = 300.0  # seconds until a test is taken to hang: a bound, not a measure of speed
SHAPE = {"d_t": 8, "d_e": 8, "d_v": 8}
WHOLE_SHAPE = SHAPE | {
    "text_layers": 12, "vision_layers": 12, "context_length": 77, "patch_size": 4, "patch_tokens": 4, "positions": 5,
    "mlp_width": 16, "heads_v": 2, "heads_t": 2,
}  # fmt: skip
"""A backbone that every method takes."""
FINGERPRINT = "sha256:" + "ab" * 32
DEADLINE = 3600.0  # seconds that a phase is open: a machine that stands still for a while ends none, tests leap
ASKED_FOR = {"aggregators": ("aggregator",)}  # by phase; elsewhere all that came down goes up
CLASSES = ["circle", "square", "star"]
content_digest = digests.field_of
Expected = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each tensor that an update holds."""


def spec(**changes: Any) -> dict[str, Any]:
    """A small federation; sections given are merged over it."""
    base: dict[str, Any] = {
        "name": "eyes",
        "method": {"name": "promptfl", "m": 4},
        "backbone": {"model": "promptfed-tiny"},
        "rounds": 2,
        "participation": {"min_clients": 2, "deadline_seconds": DEADLINE},
        "seed": 7,
    }
    if isinstance(named := changes.get("method"), dict) and named.get("name", "promptfl") != "promptfl":
        base["method"] = {}  # whose options are others
    return merged(base, changes)


def secret_of(name: str) -> str:
    """A client's secret; the same name always has the same."""
    return hashlib.sha256(f"secret of {name}".encode()).hexdigest()


def enrolment(name: str, **changes: Any) -> dict[str, Any]:
    """The body of an enrolment."""
    return {
        "name": name,
        "secret": secret_of(name),
        "role": "trainer",
        "num_samples": 10,
        "class_names": CLASSES,
        "backbone_fingerprint": FINGERPRINT,
        "backbone_shape": SHAPE,
        **changes,
    }


def bearer(token: str) -> dict[str, str]:
    """The headers of a client or an operator of this release."""
    return {"Authorization": f"Bearer {token}", PROTOCOL: str(VERSION)}


def trained(tensors: Tensors, name: str, task: dict[str, Any], expected: Expected | None = None) -> Tensors:
    """A deterministic "training": the payload plus noise that depends on client, round and phase alone.

    ``expected``: what goes up, where it is not what came down; what is no part of the payload begins at zero.
    """
    draws = generator(0, task["round"], name, task["phase"])
    if expected is not None:
        start = {key: torch.zeros(shape, dtype=getattr(torch, dtype)) for key, (shape, dtype) in expected.items()}
        start |= {key: tensors[key] for key in start if key in tensors and tensors[key].shape == start[key].shape}
        return {key: one + (0.1 * torch.randn(one.shape, generator=draws)).to(one.dtype) for key, one in start.items()}
    names = ASKED_FOR.get(task["phase"], tuple(tensors))
    return {key: tensors[key] + torch.randn(tensors[key].shape, generator=draws) for key in names}


def update_body(tensors: Tensors, task: dict[str, Any], **about: Any) -> bytes:
    """An update as a client sends it."""
    metadata = {"task_id": task["task_id"], "payload_sha256": task["payload"]["sha256"], "metrics": {"loss": 0.5}}
    return encode(tensors, metadata | about)


@all_checked
@dataclass
class ScriptedClient:
    """A client by hand: every method is one request."""

    http: httpx.Client
    federation: str
    name: str
    accuracy: float = 0.5
    sent: dict[str, bytes] = field(default_factory=dict)
    expected: Callable[[str], Expected] | None = None  # by phase

    @property
    def path(self) -> str:
        return f"/v1/federations/{self.federation}"

    @property
    def headers(self) -> dict[str, str]:
        return bearer(secret_of(self.name))

    def enrol(self, token: str, **changes: Any) -> httpx.Response:
        return self.http.post(f"{self.path}/clients", json=enrolment(self.name, **changes), headers=bearer(token))

    def task(self, wait: float = 0) -> httpx.Response:
        return self.http.get(f"{self.path}/task", params={"wait": wait}, headers=self.headers)

    def payload(self, task: dict[str, Any]) -> Tensors:
        response = self.http.get(task["payload"]["url"], headers=self.headers)
        response.raise_for_status()
        assert "sha256:" + hashlib.sha256(response.content).hexdigest() == task["payload"]["sha256"]
        assert len(response.content) == task["payload"]["bytes"]
        return decode(response.content)[0]

    def send(self, task: dict[str, Any], body: bytes, **headers: str) -> httpx.Response:
        url = f"{self.path}/tasks/{task['task_id']}/update"
        return self.http.put(
            url, content=body, headers={**self.headers, "Content-Digest": content_digest(body), **headers}
        )

    def evaluate(self, task: dict[str, Any], accuracy: float | None = None) -> httpx.Response:
        result = {"accuracy": self.accuracy if accuracy is None else accuracy, "num_samples": 20}
        body = {"splits": {"test": result}, "zero_shot": {"test": {"accuracy": 0.25, "num_samples": 20}}}
        return self.http.put(f"{self.path}/tasks/{task['task_id']}/evaluation", json=body, headers=self.headers)

    def fail(self, task: dict[str, Any]) -> httpx.Response:
        body = {"type": "out-of-memory", "detail": "no room"}
        return self.http.post(f"{self.path}/tasks/{task['task_id']}/failure", json=body, headers=self.headers)

    def answer(self, task: dict[str, Any]) -> httpx.Response:
        """Carry out a task of either kind."""
        if task["kind"] == "evaluate":
            self.payload(task)
            return self.evaluate(task)
        # As the protocol asks of clients: what was made once is sent again, never made again.
        if task["task_id"] not in self.sent:
            expected = self.expected(task["phase"]) if self.expected is not None else None
            self.sent[task["task_id"]] = update_body(trained(self.payload(task), self.name, task, expected), task)
        return self.send(task, self.sent[task["task_id"]])

    def work(self, until: float = PATIENCE) -> bool:
        """Answer tasks until the federation has ended (true), or until there is none for a moment (false)."""
        end = time.monotonic() + until
        while time.monotonic() < end:
            response = self.task()
            if response.status_code == 410:
                return True
            if response.status_code == 204:
                return False
            response.raise_for_status()
            answered = self.answer(response.json())
            assert answered.is_success, answered.text
        raise AssertionError("the federation does not end")


@checked
def drive(clients: Sequence[ScriptedClient], seconds: float = PATIENCE) -> None:
    """Let all clients work until the federation has ended."""
    end = time.monotonic() + seconds
    while [client for client in clients if not client.work()]:
        assert time.monotonic() < end, "the federation does not end"
        time.sleep(0.005)
