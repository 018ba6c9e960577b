"""What every test gets."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
import typer.testing
from hypothesis import settings

from promptfed.shared import machine
from tests import ROOT

# How long an example takes says nothing about it, whichever file is run alone.
settings.register_profile("any_speed", deadline=None)
settings.load_profile("any_speed")

# What changes the shape of a command's words, or keeps it from a hub that the tests bring themselves.
UNWANTED = ("COLUMNS", "LINES", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


# The tree of all commands takes a tenth of a second to make: once, not for each command line that a test runs.
typer.main.get_command = cache(typer.main.get_command)
typer.testing._get_command = typer.main.get_command

STATE = tempfile.TemporaryDirectory(prefix="promptfed-state-", ignore_cleanup_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test-all` says what it has installed."""
    parser.addoption("--extras", default="", help="extras, by commas: a skip because one is missing is an error")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells the first process its peak memory, which looks at what was skipped."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = _peak()
    elif session.config.option.extras and session.exitstatus == 0:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        skipped = [report.longrepr[2] for report in reporter.getreports("skipped")]
        wanted = [f"pip install '.[{name}]'" for name in session.config.option.extras.split(",")]
        if missing := sorted({reason for reason in skipped if any(how in reason for how in wanted)}):
            reporter.write_line(f"\nskipped although it should be installed: {', '.join(missing)}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_configure() -> None:
    """The same whoever starts the tests: what the shell says of terminals, proxies and settings of ours is no part."""
    # A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in list(os.environ):
        if name in UNWANTED or name.startswith(("PROMPTFED_CLIENT_", "PROMPTFED_COORDINATOR", "PROMPTFED_OPERATOR_")):
            del os.environ[name]
    machine.share_heaps()
    # What a client leaves in its account's folder: also those of processes that a test starts.
    os.environ["XDG_STATE_HOME"] = STATE.name
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"


# Files that take a minute and more, since they start many processes: first, so that none is waited for at the end.
LONG = (
    "test_simulation.py",
    "test_tutorials.py",
    "test_guides.py",
    "test_effects.py",
    "test_demo.py",
    "test_text_federations.py",
    "test_wheel.py",
    "test_process.py",
    "test_states.py",
    "test_contributing.py",
    "test_operating.py",
    "test_planted.py",
    "test_accelerator_steps.py",
    "test_full_presets.py",
    "test_four_users.py",
    "test_on_ray.py",
    # These need hundreds of megabytes: they run while a process holds little else.
    "test_exports.py",
    "test_augmentation.py",
    "test_client_level.py",
    "test_restored.py",
    "test_agreement.py",
)


# Files whose tests run in `make test-all` only: they take most of the time. One path a line, `#` starts a comment.
EXTENDED = frozenset(
    line.partition("#")[0].strip()
    for line in (ROOT / "tests" / "extended.txt").read_text().splitlines()
    if line.partition("#")[0].strip()
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The first tier imports no file of the second that guards no door."""
    named = collection_path.suffix == ".py" and str(collection_path.relative_to(ROOT)) in EXTENDED
    unasked = named and config.option.markexpr.endswith("not extended")
    return True if unasked and "mark.door" not in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of the second tier are marked, but for doors. The longest files come first, each in its order."""
    for item in items:
        named = str(item.path.relative_to(ROOT)) in EXTENDED
        if named and not item.get_closest_marker("door"):
            item.add_marker("extended")
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test begins with one thread of torch, whatever ran before it: several processes share the cores."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line of what was skipped and how to get it: a reason reads `what: how`."""
    largest = max(PEAKS.values(), default=_peak())
    terminalreporter.write_line(f"peak memory of a process that ran tests: {largest:,.0f} MB")
    reasons = {report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped")}
    groups = {what: how.partition(";")[0] for what, _, how in (reason.partition(": ") for reason in reasons)}
    if "not slow" in config.option.markexpr:
        groups["kills, attacks and partitions at length"] = "make test-faults"
    if "not extended" in config.option.markexpr:
        groups["the second tier"] = "make test-all"
    if groups:
        terminalreporter.write_line("skipped: " + ", ".join(f"{what} ({groups[what]})" for what in sorted(groups)))


PEAKS: dict[str, float] = {}
"""The peak memory of each process that ran tests, in MB, by its name."""


_process = cache(psutil.Process)  # a fork is another one


def _resident() -> float:
    return float(_process(os.getpid()).memory_info().rss / (1 << 20))


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Note the peak memory of a worker that has ended."""
    if "peak" in getattr(node, "workeroutput", {}):
        PEAKS[node.gateway.id] = node.workeroutput["peak"]


def pytest_collection_finish() -> None:
    """What has been imported stays: a collection looks through what tests have made alone, and takes little time."""
    gc.collect()
    gc.freeze()
    machine.give_back()


USUAL = gc.get_threshold()
GROWTH = 64  # MB
_held = _floor = _resident()


def _give_back() -> None:
    """What was left goes back to the system."""
    global _held
    gc.collect()
    machine.give_back()
    _held = _resident()


@pytest.fixture(autouse=True, scope="module")
def modules_leave_little() -> Iterator[None]:
    """A service may collect seldom, and what a module's fixtures held is free now."""
    global _floor
    yield
    gc.set_threshold(*USUAL)
    if _resident() > _floor + GROWTH / 2:
        _give_back()
        _floor = _held


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """Workers run thousands of tests. Looking for what they left takes longer than most: only once it is much."""
    yield
    if _resident() > _held + GROWTH:
        _give_back()


@pytest.fixture(autouse=True)
def logging_is_put_back() -> Iterator[None]:
    """A service that is started in this process sets up logging to a stream that ends with its test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
