"""The tensor worker: a process that computes with torch, so that the coordinator itself needs none.

It is started when there is something to compute, and ends after a minute without work. If it dies, the computation
fails and the next one starts another process.
"""

from __future__ import annotations

import pickle
import select
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from promptfed.shared.methods.core.interface.base import MethodError

IDLE_SECONDS = 60.0
TRIES = 2  # it may end for want of work just when it is asked


class CannotCompute(MethodError):
    """A server function could not be computed here and now; nothing is wrong with the method or its updates."""


class WorkerDied(CannotCompute):
    """The tensor worker ended before it answered, such as when the system has no memory left."""


class TensorWorker:
    """Runs functions in the process, one after another. Functions and arguments are sent by pickle, over pipes."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of ``function(*arguments)``; what it raises is raised here.

        Raises:
            WorkerDied: the process ended, twice, before it answered.
        """
        job = pickle.dumps((function, arguments))
        with self._turn:
            for _ in range(TRIES):
                try:
                    succeeded, result = self._ask(job)
                except (EOFError, BrokenPipeError, pickle.UnpicklingError):
                    self._end()
                    continue
                except BaseException:
                    self._end()  # Part of an answer may be left in the pipe.
                    raise
                if succeeded:
                    return result
                error, told = result
                error.add_note(told)  # the traceback there, which pickle drops
                raise error
        raise WorkerDied("the tensor worker ended before it answered: see whether the system has memory left")

    def _ask(self, job: bytes) -> Any:
        if self._process is None or self._process.poll() is not None:
            self._end()
            command = [sys.executable, "-m", "promptfed.coordinator.aggregation.tensor_worker"]
            # In a session of its own: Ctrl-C is for the coordinator, whose end closes the pipes.
            self._process = subprocess.Popen(  # noqa: S603 (ourselves)
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(job)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)  # noqa: S301 (our own process)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def stop(self) -> None:
        """End the process, if there is one."""
        with self._turn:
            self._end()


WORKER = TensorWorker()


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Answer jobs until none comes for `IDLE_SECONDS` or the pipe is closed."""
    while select.select([jobs], [], [], IDLE_SECONDS)[0]:
        try:
            function, arguments = pickle.load(jobs)  # noqa: S301 (from our own parent)
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, function(*arguments)))
        except Exception as error:
            answer = pickle.dumps((False, (_sendable(error), traceback.format_exc())))
        answers.write(answer)
        answers.flush()


def _sendable(error: Exception) -> Exception:
    """``error``, or its text where it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (our own)
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    pipe = sys.stdout.buffer
    sys.stdout = sys.stderr  # what a method prints must not get between the answers
    serve(sys.stdin.buffer, pipe)
