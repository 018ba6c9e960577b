"""A federation of processes on this machine: what its clients are told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from promptfed.client_service.settings import ledger_path
from promptfed.runtime.processes import LocalFederation, Site


class Recording:
    """Processes that are only noted; the coordinator answers by its files at once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.commands: dict[str, list[str]] = {}

    def start(self, name: str, arguments: Sequence[str]) -> Any:
        self.commands[name] = list(arguments)
        if name == "coordinator":
            (self.folder / "coordinator").mkdir()
            (self.folder / "coordinator" / "operator.token").write_text("token\n")
            (self.folder / "coordinator.url").write_text("http://127.0.0.1:1234\n")
        return SimpleNamespace(command=list(arguments))

    def watch(self) -> list[str]:
        return []


def test_clients_of_a_launch_pay_from_a_ledger_of_the_run(tmp_path: Path) -> None:
    processes = Recording(tmp_path)
    federation = LocalFederation(processes, tmp_path)
    for name in ("a", "b"):
        federation.start_client("f-1", Site(name, "symbols:painting"), None)
    ledgers = [
        Path(option.removeprefix("--ledger="))
        for name in ("client-a", "client-b")
        for option in processes.commands[name]
        if option.startswith("--ledger=")
    ]
    assert ledgers == [tmp_path / "ledgers" / "a.jsonl", tmp_path / "ledgers" / "b.jsonl"]
    assert ledger_path("default") not in ledgers
