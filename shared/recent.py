"""What was used last, in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The values that were used last, by key, up to ``most`` of their sizes together; thread-safe."""

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._size = 0

    def get(self, key: Hashable) -> Value | None:
        """The value, if it is kept."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def add(self, key: Hashable, value: Value, size: int = 1) -> None:
        """Keep the value, and drop what was not used for longest."""
        with self._lock:
            if key in self._values or size > self._most:
                return
            self._values[key] = value, size
            self._size += size
            while self._size > self._most:
                self._size -= self._values.popitem(last=False)[1][1]

    def made(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value, made if it is missing. Two threads may make it at the same time; one of theirs is kept."""
        value = self.get(key)
        if value is None:
            value = make()
            self.add(key, value)
        return value

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Keep none of these."""
        with self._lock:
            for key in keys:
                if key in self._values:
                    self._size -= self._values.pop(key)[1]
