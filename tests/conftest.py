"""What every test gets."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logging_is_put_back() -> Iterator[None]:
    """A service that is started in this process sets up logging to a stream that ends with its test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
