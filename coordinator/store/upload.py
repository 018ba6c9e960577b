"""A body that has arrived, in memory or in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from promptfed.coordinator.store.blobs import Held
from promptfed.shared.tensors import Arrays, TensorError, decode, decode_file


@dataclass(frozen=True)
class Upload:
    """A body with its size in bytes and its digest; ``too_large`` if it was cut off at the limit.

    A small one is in memory (``content``), a larger one is the file at ``path``.
    """

    path: Path
    size: int
    sha256: str
    too_large: bool = False
    content: bytes | None = None

    def read(self) -> bytes:
        """The whole body."""
        return self.content if self.content is not None else self.path.read_bytes()

    def tensors(self) -> tuple[Arrays, object | None]:
        """Tensors and metadata. Raises TensorError."""
        if self.content is None:
            return decode_file(self.path)
        try:
            return decode(self.content)
        except TensorError:
            # The library says of bytes in other words what is wrong than of a file, and the texts are promised.
            try:
                self.path.write_bytes(self.content)
                return decode_file(self.path)
            finally:
                self.path.unlink(missing_ok=True)

    def keep(self, held: Held) -> None:
        """Store it as a blob; a small one waits for ``Change.keep``."""
        if self.content is not None:
            held.add_small(self.content, self.sha256)
        else:
            held.adopt(self.path, self.sha256)
