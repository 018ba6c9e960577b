"""Common parts of the benchmarks: options, clocks, coordinator processes, the machine, tables and files."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.support.coordinators import CoordinatorProcess

BENCHMARKS = Path(__file__).parent
DOCS = BENCHMARKS.parent / "docs"


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option ``--json FILE``, which shows ``description`` without wrapping it."""
    command = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--json", type=Path, help="write all numbers to this file")
    return command


def integers(text: str) -> list[int]:
    """The numbers of ``0,1,2``."""
    return [int(number) for number in text.split(",") if number]


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


def fill_tables(page: str, name: str, made: Mapping[str, str]) -> str:
    """``page`` with the tables of ``made`` between ``<!-- table: name KEY -->`` and ``<!-- end of table -->``.

    SystemExit if the page has no such place.
    """
    for key, text in made.items():
        begin, end = f"<!-- table: {f'{name} {key}'.strip()} -->\n", "\n<!-- end of table -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if not pattern.search(page):
            raise SystemExit(f"the page has no place for the table: {begin.strip()}")
        page = pattern.sub(lambda _, text=f"{begin}{text}{end}": text, page)  # type: ignore[misc]
    return page


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


@dataclass
class Footprint:
    """Memory (MB) and open files of a process at one moment. ``peak_mb``: its largest memory so far."""

    resident_mb: float
    peak_mb: float
    open_files: int


def memory(pid: int, field: str) -> int:
    """Bytes of a field of /proc/PID/status, such as VmRSS. LookupError if there is none."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise LookupError(field)


def footprint(pid: int) -> Footprint:
    """Memory and open files of a process."""
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Footprint(memory(pid, "VmRSS") / 2**20, memory(pid, "VmHWM") / 2**20, files)


def cpu_seconds_of(pid: int) -> float:
    """CPU seconds that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def allow_many_connections() -> None:
    """Raise the limit on open files. SIGTERM now raises SystemExit, so that started processes are ended as well."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
