"""Recorded federations: `tests/data/recorded-1.tar.xz`, a coordinator's data folder.

Made by the code of commit f9d2222, and never made again: later code must compute the states in it to the same hashes.
This script shows how it was made: `python -m tests.support.recording OUT.tar.xz`. Updates are random numbers from
seeds. Those of different federations begin alike, so that the archive stays small.
"""

from __future__ import annotations

import lzma
import sqlite3
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from promptfed.coordinator.store.opening import ID_FILE, SQLITE_FILE
from promptfed.shared.tensors import DTYPES, Shape, Tensors, encode
from promptfed.testing.clients import CLASSES, PATIENCE, ScriptedClient, spec, update_body
from promptfed.testing.coordinator import LocalCoordinator, local_coordinator
from tests import ROOT
from tests.support.secure_clients import SecureClient

ARCHIVE = ROOT / "tests" / "data" / "recorded-1.tar.xz"
SHAPE = {
    "d_t": 8, "d_e": 8, "d_v": 8, "text_layers": 2, "vision_layers": 2, "context_length": 16, "patch_size": 2,
    "patch_tokens": 4, "mlp_width": 8, "positions": 5, "heads_t": 2, "heads_v": 2,
}  # fmt: skip
WIDE = SHAPE | {"d_t": 32}
LONG = SHAPE | {"d_t": 300, "context_length": 77}
SAMPLES = {"B": 10, "a": 30, "c": 25, "d": 7, "e": 12, "f": 18}
DRAWN = 1 << 10  # numbers of a client in a phase, which repeat in a longer update
WITHDRAWN = "withdrawn"
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 1, "lp": 2, "pb": 2}]  # for float32


@dataclass(frozen=True)
class Case:
    """One federation. ``clients`` take part from the start, ``late`` ones join after it.

    ``supplied``: the operator supplies its initial state. ``outlier``: the last client's updates are far from the rest.
    """

    name: str
    method: dict[str, Any]
    clients: str = "Bac"
    late: str = ""
    shape: dict[str, int] = field(default_factory=lambda: SHAPE)
    supplied: bool = False
    outlier: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    def spec(self) -> dict[str, Any]:
        given = {"rounds": 2, "class_names": CLASSES, "evaluation": {"every": 9}, "retention": "all"}
        participation = {"min_clients": len(self.clients)}
        changes = given | {"participation": participation} | self.changes
        return spec(name=self.name, **changes) | {"method": self.method}


TEXT = {"m": 4}
TOWER = {"trainable": "last_k", "k": 1}
METHODS: dict[str, dict[str, Any]] = {
    "coop": TEXT,
    "diprompt": {"m": 2},
    "fast_pt": TEXT,
    "fedapt": {"m": 2},
    "fedavg": {"trainable": "all"},
    "fedbabu": {"trainable": "norms"},
    "fedclip": {},
    "fedcocoop": TEXT | {"reduction": 2},
    "fedkgcoop": TEXT,
    "fedlora": {"r": 2},
    "fedmaple": {"m": 2},
    "fedotp": TEXT,
    "fedpgp": TEXT,
    "fedpr": {"m": 2},
    "fedprox": {"trainable": "biases"},
    "fedrep": TOWER,
    "fedrod": {"trainable": "norms"},
    "fedtpg": TEXT,
    "fedvpt": TEXT,
    "fedvpt_deep": {"m": 2},
    "perfedavg": {"trainable": "norms"},
    "pfedmoap": TEXT,
    "pfedpg": {"m": 2, "inner_width": 4},
    "pfedprompt": TEXT,
    "plan": {"m": 2, "reduction": 4},
    "promptfl": TEXT,
    "promptfl_amp": TEXT,
    "promptfl_ft": TEXT,
    "promptfl_per": TEXT,
    "promptfl_prox": TEXT,
    "promptfolio": TEXT,
    "singleset_full": {"trainable": "norms"},
    "singleset_vpt": {"m": 2},
    "zero_shot": {},
}
RULES: dict[str, dict[str, Any]] = {
    "median": {"rule": "median"},
    "trimmed_mean": {"rule": "trimmed_mean"},
    "trimmed_mean-samples": {"rule": "trimmed_mean", "weighting": "samples", "clip_norm": 8.0},
    "krum": {"rule": "krum"},
    "multi_krum": {"rule": "multi_krum"},
    "multi_krum-clip": {"rule": "multi_krum", "clip_norm": "median"},
    "geometric_median": {"rule": "geometric_median"},
    "flame": {"rule": "flame"},
    "flame-quiet": {"rule": "flame", "flame_noise": 0.0},
    "flame-updates": {"rule": "flame", "flame_of": "updates"},
    "clip_norm": {"clip_norm": 4.0},
    "clip_median": {"clip_norm": "median"},
    "cap": {"max_weight_share": 0.25},
    "uniform": {"weighting": "uniform", "max_weight_share": 1.0},
}
OPTIMIZERS = ("momentum", "adagrad", "adam", "yogi")
PRIVACY = {"level": "client", "clip": 1.5, "noise_multiplier": 1.0, "accept_noise": True}
UNIFORM = {"weighting": "uniform"}
PROMPTFL: dict[str, Any] = {"name": "promptfl", "m": 8}


def _cases() -> list[Case]:
    cases = [Case(name, {"name": name, **given}) for name, given in METHODS.items()]
    cases += [
        Case(f"rule-{name}", PROMPTFL, "Bacde", shape=WIDE, outlier=True, changes={"aggregation": given})
        for name, given in RULES.items()
    ]
    cases += [
        Case(f"server-{name}", PROMPTFL, shape=WIDE, changes={"aggregation": {"server": {"optimizer": name}}})
        for name in OPTIMIZERS
    ]
    joining: tuple[dict[str, Any], ...] = (
        {"name": "pfedmoap"} | TEXT,
        {"name": "fast_pt"} | TEXT,
        {"name": "fedapt", "m": 2},
        {"name": "pfedpg", "m": 2, "generator": "mlp", "hidden": 5},
        {"name": "fedavg", "trainable": "norms", "weighting": "ga"},
    )
    cases += [Case(f"join-{method['name']}", method, late="Ez") for method in joining]
    cases += [
        Case(f"fedlora-{kind}", {"name": "fedlora", "r": 2, "towers": "text", "aggregation": kind})
        for kind in ("freeze_a", "alternate", "svd")
    ]
    adaptive = PRIVACY | {"adaptive_clip": {"count_noise": 2.0}}
    private: dict[str, Any] = {"privacy": PRIVACY, "aggregation": UNIFORM}
    clipped = {"aggregation": RULES["clip_median"]}
    return [
        *cases,
        Case("long", PROMPTFL | {"m": 64}, shape=LONG, supplied=True, changes=clipped),  # two chunks
        Case("short", {"name": "promptfl", "m": 1}, changes={"seed": (1 << 62) + 11}),  # draws of under 16 numbers
        Case("fedavg-ga", {"name": "fedavg", "trainable": "norms", "weighting": "ga"}, changes={"rounds": 3}),
        Case("fedavg-bfloat16", {"name": "fedavg", "trainable": "norms", "transport": "bfloat16"}),
        Case("fedavg-linear", {"name": "fedavg", "trainable": "none", "head": "linear", "fedsr": True, "d_z": 4}),
        Case("plan-mean", {"name": "plan", "m": 2, "text_aggregation": "mean", "visual_aggregation": "mean"}),
        Case("supplied-pfedmoap", {"name": "pfedmoap"} | TEXT, supplied=True),
        Case("private", PROMPTFL, "Bacde", shape=WIDE, changes=private),
        Case("private-adaptive", PROMPTFL, "Bacde", shape=WIDE, changes=private | {"privacy": adaptive}),
        Case("secure", {"name": "promptfl"} | TEXT, changes={"secure_aggregation": {}}),
        Case(WITHDRAWN, {"name": "promptfl_amp"} | TEXT, changes={"rounds": 3, "participation": {"quorum": 0.5}}),
    ]


CASES = {case.name: case for case in _cases()}


def drawn(client: str, round: int, phase: str, outlier: bool) -> np.ndarray[Any, np.dtype[np.float32]]:
    """``(DRAWN,)`` numbers: what all clients have in common, and noise; an outlier's point the other way."""
    common = np.random.default_rng([round, *phase.encode()]).standard_normal(DRAWN)
    own = np.random.default_rng([round, *client.encode(), 0, *phase.encode()]).standard_normal(DRAWN)
    return (0.1 * ((-4 if outlier else 1) * common + 0.5 * own)).astype(np.float32)


def cut(numbers: np.ndarray[Any, np.dtype[np.float32]], wanted: dict[str, tuple[Shape, str]]) -> Tensors:
    """The numbers, repeated as often as needed, as tensors of these shapes and dtypes, one after the other."""
    tensors, begin = {}, 0
    for name, (shape, dtype) in sorted(wanted.items()):
        end = begin + int(np.prod(shape))
        values = np.resize(numbers, end)[begin:]
        tensors[name] = torch.from_numpy(values).reshape(shape).to(DTYPES[dtype])
        begin = end
    return tensors


class RecordedClient(ScriptedClient):
    """Sends random updates of the expected shapes."""

    def __init__(self, coordinator: LocalCoordinator, federation: str, name: str, case: Case):
        super().__init__(coordinator.http, federation, name)
        self._registry, self._case = coordinator.registry, case

    def answer(self, task: dict[str, Any]) -> httpx.Response:
        if task["kind"] == "train":
            federation = self._registry.get(self.federation)
            phases = {phase.name: phase for phase in federation.method.phases(task["round"], federation.spec.rounds)}
            info, context = federation.clients[self.name].info(), federation.context()
            wanted = federation.method.expected_update(phases[task["phase"]], info, context)
            outlier = self._case.outlier and self.name == self._case.clients[-1]
            numbers = drawn(self.name, task["round"], task["phase"], outlier)
            self.sent[task["task_id"]] = update_body(cut(numbers, wanted), task)
        return super().answer(task)


def record(coordinator: LocalCoordinator, case: Case) -> None:
    """Play one federation to its end."""
    federation = str(coordinator.post("/v1/federations", case.spec(), status=201)["id"])
    token = coordinator.token(federation)

    def enrolled(names: str) -> list[ScriptedClient]:
        clients: list[ScriptedClient] = []
        for name in names:
            client: ScriptedClient = RecordedClient(coordinator, federation, name, case)
            if "secure_aggregation" in case.changes:
                client = SecureClient(coordinator.http, federation, name)
            domain = {"name": f"style-{name}", "description": f"a drawing of a {{}} by {name}"}
            changes = {"num_samples": SAMPLES.get(name, 20), "backbone_shape": case.shape, "domain": domain}
            answer = client.enrol(token, **changes)
            assert answer.status_code == 201, answer.text
            clients.append(client)
        return clients

    clients = enrolled(case.clients)
    if case.supplied:
        supply(coordinator, federation)
    coordinator.start(federation)
    if case.late:
        tasks = coordinator.training(clients)
        clients += enrolled(case.late)
        for client, task in zip(clients, tasks, strict=False):
            client.answer(task).raise_for_status()
    if case.name == WITHDRAWN:
        clients = withdraw(coordinator, federation, clients)
    finish(coordinator, federation, clients)


def supply(coordinator: LocalCoordinator, federation: str) -> None:
    """Supply an initial state of random numbers."""
    known = coordinator.registry.get(federation)
    dims = known.method.dims(known.context())
    wanted = {tensor.name: (tensor.resolve(dims), tensor.dtype) for tensor in known.method.state_tensors()}
    kept = {name: kind for name, kind in wanted.items() if name not in ("client_contexts", "answered")}
    body = encode(cut(drawn("operator", 0, "start", False), kept))
    answer = coordinator.http.put(
        f"/v1/federations/{federation}/initial-state", content=body, headers=coordinator.operator
    )
    assert answer.status_code == 200, answer.text


def withdraw(coordinator: LocalCoordinator, federation: str, clients: list[ScriptedClient]) -> list[ScriptedClient]:
    """After round 1 the last client is withdrawn, and its updates are deleted. Returns the others."""
    for client, task in zip(clients, coordinator.training(clients), strict=True):
        client.answer(task).raise_for_status()
    for client in clients:
        assert coordinator.task(client)["round"] == 2
    coordinator.delete(f"{federation}/clients/{clients[-1].name}")
    coordinator.delete(f"{federation}/clients/{clients[-1].name}/updates")
    return clients[:-1]


def finish(coordinator: LocalCoordinator, federation: str, clients: list[ScriptedClient]) -> None:
    """Let the clients work until the federation has finished."""
    end = time.monotonic() + PATIENCE
    while not all([client.work() for client in clients]):  # noqa: C419 (all of them work)
        assert time.monotonic() < end, coordinator.get(federation)
        time.sleep(0.005)
    view = coordinator.get(federation)
    assert view["state"] == "finished", view


def pack(folder: Path, archive: Path) -> None:
    """Write the database and the folder's name, without keys and tokens; a start makes new ones."""
    connection = sqlite3.connect(folder / SQLITE_FILE)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("VACUUM")
    connection.close()
    with (
        lzma.open(archive, "wb", filters=FILTERS) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name in (SQLITE_FILE, ID_FILE):
            entry = tarfile.TarInfo(name)
            entry.size = (folder / name).stat().st_size
            with (folder / name).open("rb") as file:
                tar.addfile(entry, file)


def main(archive: Path) -> None:
    """Record all cases."""
    with tempfile.TemporaryDirectory() as folder:
        with local_coordinator(Path(folder)) as coordinator:
            for case in CASES.values():
                record(coordinator, case)
        pack(Path(folder), archive)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
