"""Child processes that read files in parallel. A file that takes too long costs a child, not this process."""

from __future__ import annotations

import atexit
import io
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from promptfed.shared import machine

SECONDS = 60.0  # for one request
MOST_CHILDREN = 16
AHEAD = 4  # requests for each child that are under way or wait to be read
PIPE_BYTES = 1 << 20  # what a child can write before it is read, where the system allows that much
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}

_turn = threading.Lock()


@dataclass(frozen=True)
class Request:
    """A file to be read: its ``facts``, whether it can be decoded (``check``), or its ``pixels``.

    ``cut``: what a `Cut` makes of several images, which ``settings`` name with their digests and scales.
    """

    do: str
    path: str = ""
    place: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What a file has; ``error`` names no file and no value of its header."""

    error: str | None = None
    facts: dict[str, Any] | None = None
    digest: str = ""
    image: Image.Image | None = None


class _Child:
    """One process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, request: Request, into: memoryview | None) -> Answer:
        told = self._asked(request, into)
        if told is None:  # it may have ended for lack of requests, or by what it read before
            told = self._asked(request, into)
        return told or Answer("reading it ended the process that reads; it needs too much memory, or is damaged")

    def _asked(self, request: Request, into: memoryview | None) -> Answer | None:
        process = self._running()
        assert process.stdin is not None
        assert isinstance(process.stdout, io.BufferedReader)
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(SECONDS, give_up)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(json.dumps(request.__dict__).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
            told = json.loads(line) if line else {}
            count = told.get("bytes", 0)
            body = into if into is not None and len(into) == count else memoryview(bytearray(count))
            whole = process.stdout.readinto(body) == count
        except OSError:
            line = b""
        finally:
            timer.cancel()
        if not line or not whole:
            self.close()
            return Answer(f"reading it takes more than {SECONDS:.0f} s") if late.is_set() else None
        if into is not None and body is not into and "error" not in told:
            return Answer(f"{count:,} bytes of pixels came where {len(into):,} were asked for")
        return _answer(told, body)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-P", "-m", "promptfed.shared.data.worker"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(  # noqa: S603
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, pipesize=PIPE_BYTES
            )
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    try:
                        stream.close()
                    except OSError:  # what it did not take any more
                        continue
        self._process = None


def _answer(told: dict[str, Any], body: memoryview) -> Answer:
    if "mode" not in told:
        return Answer(told.get("error"), told.get("facts"))
    image = Image.frombytes(told["mode"], tuple(told["size"]), body).convert("RGB") if body else None
    return Answer(digest=told.get("digest", ""), image=image)


class Readers:
    """As many children as there are processors; each is started when it is first needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(count, "reader")
        self._own = threading.local()
        self._children: list[_Child] = []

    def submit(self, request: Request, into: memoryview | None = None) -> Future[Answer]:
        """Have a file read. ``into``: where the pixels of cut images go; an error may leave a part of them there."""
        return self._threads.submit(self._read, request, into)

    def each(self, requests: Iterable[Request]) -> Iterator[Answer]:
        """Answers in the order of ``requests``, of which few are under way at a time."""
        waiting: deque[Future[Answer]] = deque()
        for request in requests:
            waiting.append(self.submit(request))
            if len(waiting) >= AHEAD * self.count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def close(self) -> None:
        """End the children."""
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.close()

    def _read(self, request: Request, into: memoryview | None) -> Answer:
        if not hasattr(self._own, "child"):
            self._own.child = _Child()
            self._children.append(self._own.child)
        answer: Answer = self._own.child.read(request, into)
        return answer


_readers: dict[int, Readers] = {}  # by process, since a fork has no threads


def readers() -> Readers:
    """The readers of this process."""
    with _turn:
        if os.getpid() not in _readers:
            _readers.clear()
            _readers[os.getpid()] = Readers(min(machine.processors(), MOST_CHILDREN))
            atexit.register(_close, os.getpid())
        return _readers[os.getpid()]


def _close(pid: int) -> None:
    if pid == os.getpid() and pid in _readers:
        _readers.pop(pid).close()
