"""Memory of a coordinator while updates of hundreds of megabytes come in and are aggregated.

The coordinator is a process. This process plays clients of ``fedavg`` that train all weights of a ViT-B/32: it writes
one update after another to a file and streams it. The bar is less than 1 GB above idle with ten clients.

    python -m benchmarks.large_updates --json benchmarks/large_updates.json
    python -m benchmarks.large_updates --clients 5 --rule krum --json benchmarks/large_updates_krum.json

- anonymous: the largest RssAnon minus that before the first enrolment. The system can take mapped files back, so they
  count in the peak (VmHWM) only.
- seconds: of all uploads in turn, and from the last one's answer to the task of the next round.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import coordinator, machine, memory, parser, write
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface.base import ServerContext
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import encode_file
from promptfed.testing.clients import ScriptedClient, digest_header_of

SHAPE = {
    "d_t": 512,
    "d_v": 768,
    "d_e": 512,
    "text_layers": 12,
    "vision_layers": 12,
    "context_length": 77,
    "patch_size": 32,
    "mlp_width": 3072,
    "positions": 50,
}
METHOD = {"name": "fedavg", "trainable": "all"}
PART = 1 << 20
BAR = 1 << 30  # bytes of anonymous memory above idle


class Watch:
    """The largest anonymous memory of a process during a block, read twenty times a second, in bytes."""

    def __init__(self, pid: int):
        self._pid, self._stop = pid, threading.Event()
        self.most = self.idle = memory(pid, "RssAnon")
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._stop.wait(0.05):
            self.most = max(self.most, memory(self._pid, "RssAnon"))

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def parts_of(path: Path) -> Iterator[bytes]:
    """A file in parts of `PART` bytes."""
    with path.open("rb") as file:
        while part := file.read(PART):
            yield part


def changes() -> Tensors:
    """A seeded update, which all clients send."""
    method = make_method(METHOD)
    context = ServerContext(TrainingSpec(), BackboneShape(**SHAPE), None, (), seed=0, rounds=2)
    dims, [phase] = method.dims(context), method.phases(1, 2)
    draws = torch.Generator().manual_seed(0)
    return {spec.name: torch.randn(spec.resolve(dims), generator=draws).mul_(1e-4) for spec in phase.up}


def run(clients: int, rule: str) -> dict[str, Any]:
    """Play one round; its figures."""
    with coordinator() as process, Watch(process.pid) as watch:
        spec: dict[str, Any] = {"name": "large", "method": METHOD, "rounds": 2}
        if rule != "mean":
            spec |= {"aggregation": {"rule": rule}, "participation": {"min_clients": clients, "quorum": 1.0}}
        federation = process.post("/v1/federations", json=spec, status=201)["id"]
        names = [f"site-{number:02}" for number in range(clients)]
        players = process.enrol(federation, *names, backbone_shape=SHAPE)
        process.post(f"{federation}/start")
        began, sent = time.monotonic(), 0
        fetch(players[0], waited(players[0]))  # one client's download of the payload is enough
        for player in players:
            player.evaluate(waited(player)).raise_for_status()
        tensors, body = changes(), process.folder.parent / "update"
        for player in players:
            sent += send(player, waited(player), tensors, body)
        uploads = time.monotonic() - began
        began = time.monotonic()
        next_round = waited(players[0], longest=600)
        seconds = time.monotonic() - began
        fetch(players[0], next_round)
        peak = memory(process.pid, "VmHWM")
    return {
        "clients": clients,
        "rule": rule,
        "bytes": sent // clients,
        "anonymous_above_idle": watch.most - watch.idle,
        "idle": watch.idle,
        "peak": peak,
        "upload_seconds": round(uploads, 1),
        "aggregate_seconds": round(seconds, 1),
        "round": next_round["round"],
    }


def waited(player: ScriptedClient, longest: float = 300) -> dict[str, Any]:
    """The player's next task; SystemExit if there is none after ``longest`` seconds."""
    end = time.monotonic() + longest
    while time.monotonic() < end:
        response = player.task(wait=20)
        if response.status_code == 200:
            task: dict[str, Any] = response.json()
            return task
    raise SystemExit("the coordinator has no task")


def fetch(player: ScriptedClient, task: dict[str, Any]) -> None:
    """Download a payload and drop it."""
    with player.http.stream("GET", task["payload"]["url"], headers=player.headers) as response:
        response.raise_for_status()
        size = sum(len(part) for part in response.iter_bytes())
    assert size == task["payload"]["bytes"]


def send(player: ScriptedClient, task: dict[str, Any], tensors: Tensors, body: Path) -> int:
    """Write an update to the file ``body`` and stream it; its size in bytes."""
    about = {"task_id": task["task_id"], "payload_sha256": task["payload"]["sha256"], "metrics": {"loss": 0.5}}
    encode_file(tensors, body, about)
    size = body.stat().st_size
    headers = {**player.headers, "Content-Digest": digest_header_of(body), "Content-Length": str(size)}
    url = f"{player.path}/tasks/{task['task_id']}/update"
    player.http.put(url, content=parts_of(body), headers=headers).raise_for_status()
    return size


def main() -> int:
    """Run and print; 1 if the bar is missed."""
    command = parser(__doc__)
    command.add_argument("--clients", type=int, default=10)
    rules = "krum or multi_krum with five clients or more, flame with three"
    command.add_argument("--rule", default="mean", help=rules)
    options = command.parse_args()
    torch.set_num_threads(1)
    figures = run(options.clients, options.rule)
    write(options.json, {"machine": machine(), **figures})
    above = figures["anonymous_above_idle"]
    print(
        f"{figures['clients']} updates of {figures['bytes'] / 1e6:.0f} MB: {above / 1e6:.0f} MB above idle "
        f"({figures['idle'] / 1e6:.0f} MB), {figures['peak'] / 1e6:.0f} MB with what is mapped; uploads "
        f"{figures['upload_seconds']} s, then {figures['aggregate_seconds']} s to the next task"
    )
    return int(above > BAR)


if __name__ == "__main__":
    sys.exit(main())
