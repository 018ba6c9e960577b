"""Where jobs run, and that a stop reaches them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from promptfed.client_service.training.compute import Compute


def thread() -> str:
    return threading.current_thread().name


def test_jobs_run_in_the_thread_of_all_or_in_one_of_its_own() -> None:
    own = Compute()
    with ThreadPoolExecutor(1, "of all") as executor:
        shared = Compute(executor)
        assert asyncio.run(shared.run(thread)) == "of all_0"
        assert asyncio.run(own.run(thread)) == "compute_0"
