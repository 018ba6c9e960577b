"""Common parts of the benchmarks: options, clocks, coordinator processes, the machine, tables and files."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.support.coordinators import CoordinatorProcess

DOCS = Path(__file__).parents[1] / "docs"


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option ``--json FILE``, which shows ``description`` without wrapping it."""
    command = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--json", type=Path, help="write all numbers to this file")
    return command


def write(path: Path | None, numbers: object) -> None:
    """Write the file of ``--json``; None: nothing is written."""
    if path is not None:
        path.write_text(json.dumps(numbers, indent=1) + "\n")


def shown(figures: Mapping[str, Any]) -> str:
    """A line for each figure."""
    return "\n".join(
        f"{name:28s} {value:,.4g}" if isinstance(value, float) else f"{name:28s} {value}"
        for name, value in figures.items()
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A Markdown table. The first ``texts`` columns are aligned left, the others right."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|" + "---|" * texts + "--:|" * (len(columns) - texts), *lines[1:]])


def in_words(seconds: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def medians(runs: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each entry's runs."""
    return {name: statistics.median(values) for name, values in runs.items()}


def in_own_process(module: str, *options: str) -> Any:
    """Run ``python -m module``; the JSON in the last line that it prints."""
    command = [sys.executable, "-m", module, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(  # noqa: S603 (our own modules)
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> dict[str, Any]:
    """The processor, its load, and the versions of torch and Python."""
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@contextlib.contextmanager
def coordinator(*options: str) -> Iterator[CoordinatorProcess]:
    """Run a coordinator process on a temporary folder. SystemExit with its log if it does not start."""
    from tests.support.coordinators import CoordinatorProcess

    with tempfile.TemporaryDirectory(prefix="promptfed-benchmark-") as folder:
        process = CoordinatorProcess(Path(folder) / "data", *options)
        try:
            if process.dead:
                raise SystemExit(process.log())
            yield process
        finally:
            process.signal(signal.SIGTERM)
            process.wait()
            process.http.close()


def peak_mb(pid: int) -> float:
    """The largest memory (MB) of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def cpu_seconds_of(pid: int) -> float:
    """CPU seconds that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def allow_many_connections() -> None:
    """Raise the limit on open files. SIGTERM now raises SystemExit, so that started processes are ended as well."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
