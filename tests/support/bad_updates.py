"""Bad updates without end, from a seed: mutations of a good one, and safetensors files that lie in every field."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from promptfed.coordinator.aggregation.rows import change_norm
from promptfed.shared.tensors import TensorError, Tensors
from promptfed.shared.tensors.torch_tensors import check, decode
from promptfed.testing.clients import content_digest, update_body

EXPECTED = {"context": ((4, 8), "float32")}
MOST_NORM = 1e6
MOST_BYTES = 4096
DTYPES = ("F32", "F64", "F16", "BF16", "I64", "I32", "I8", "U8", "BOOL", "F8_E4M3", "", "f32", "X" * 50)
NUMBERS = (
    -1, 0, 1, 2, 3, 4, 7, 8, 31, 32, 127, 128, 129, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 2**64 + 1, 10**30,
)  # fmt: skip
TEXTS = (
    "", "\0", "context\0", "ctx", "../../etc/passwd", "Контекст", "💥", "a" * 5000, "__metadata__", "\ud800", "%s%n",
    "'; DROP TABLE tasks",
)  # fmt: skip
ODD: tuple[Any, ...] = (None, True, -1, 1e308, "x", [], {}, [[]], {"a": {"b": []}}, 10**400)


@dataclass(frozen=True)
class BadUpdate:
    """One body with the headers that it is sent with."""

    origin: str
    body: bytes
    headers: dict[str, str]


class Attacker:
    """Draws bad updates for one task of a federation with one context ``(4, 8)``; ``payload`` is what it was given."""

    def __init__(self, task: dict[str, Any], seed: int, payload: Tensors):
        self._task = task
        self._payload = payload
        self._draws = random.Random(seed)
        self._about = {
            "task_id": task["task_id"],
            "payload_sha256": task["payload"]["sha256"],
            "metrics": {"loss": 0.5},
        }
        self._good = update_body({"context": torch.ones(4, 8)}, task)
        self._kinds: tuple[Callable[[], bytes], ...] = (
            self._mutated, self._mutated_header, self._lying_header, self._lying_metadata, self._lying_numbers,
            self._lying_tensors, self._noise,
        )  # fmt: skip

    def __iter__(self) -> Iterator[BadUpdate]:
        while True:
            kind = self._draws.choice(self._kinds)
            body = kind()
            headers = self._headers(body)
            announced = headers.get("Content-Digest") == content_digest(body)
            if announced and self.is_good(body):
                continue  # A flipped bit of a number or a metric is still an update.
            yield BadUpdate(kind.__name__, body, headers)

    def is_good(self, body: bytes) -> bool:
        """Whether the body is an update after all."""
        try:
            tensors, about = decode(body)
            check(tensors, EXPECTED)
        except TensorError:
            return False
        if len(body) > MOST_BYTES or change_norm(tensors, self._payload) > MOST_NORM or not isinstance(about, dict):
            return False
        return (
            about.get("task_id") == self._about["task_id"]
            and about.get("payload_sha256") == self._about["payload_sha256"]
        )

    def _headers(self, body: bytes) -> dict[str, str]:
        digest = content_digest(body)
        if self._draws.random() < 0.9:
            return {"Content-Digest": digest}
        draws = self._draws
        return draws.choice([
            {}, {"Content-Digest": ""}, {"Content-Digest": content_digest(body + b"x")},
            {"Content-Digest": digest.replace("sha-256", "sha-512")},
            {"Content-Digest": digest[: draws.randrange(len(digest))]},
            {"Content-Digest": "sha-256=:" + "A" * draws.randrange(200) + ":"},
            {
                "Content-Digest": digest,
                "Content-Type": draws.choice(["application/json", "text/html", "multipart/form-data"]),
            },
            {"Content-Digest": digest, "Content-Encoding": draws.choice(["gzip", "br", "identity", "x" * 99])},
        ])  # fmt: skip

    def _some(self, *choices: Any) -> Any:
        return self._draws.choice(choices)

    def _mutated(self, body: bytes | None = None, end: int | None = None) -> bytes:
        content = bytearray(self._good if body is None else body)
        for _ in range(self._draws.randint(1, 4)):
            at = self._draws.randrange(max(1, min(len(content), end or len(content))))
            what = self._draws.randrange(6)
            if what == 0 and content:
                content[at] ^= 1 << self._draws.randrange(8)
            elif what == 1:
                del content[at:]
            elif what == 2:
                content[at:at] = self._draws.randbytes(self._draws.randint(1, 20))
            elif what == 3:
                content += content[at : at + 50]
            elif what == 4:
                del content[at : at + self._draws.randint(1, 9)]
            else:
                content[at : at + 8] = bytes(8)
        return bytes(content)

    def _mutated_header(self) -> bytes:
        (length,) = struct.unpack("<Q", self._good[:8])
        return self._mutated(end=8 + length)

    def _noise(self) -> bytes:
        length = self._some(0, 7, 8, 9, 100, 4096, 4097, 5000)
        return bytes(self._draws.randbytes(length))

    def _file(self, header: Any, data: bytes, length: int | None = None) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode(errors="surrogatepass")
        return struct.pack("<Q", (len(text) if length is None else length) % 2**64) + text + data

    def _metadata(self, about: Any = None) -> dict[str, str]:
        return {"promptfed": json.dumps(self._about if about is None else about)}

    def _lying_header(self) -> bytes:
        """A header whose fields are right but for one or two."""
        entry: dict[str, Any] = {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}
        header: dict[str, Any] = {"__metadata__": self._metadata(), "context": entry}
        data = bytes(128)
        length = None
        for _ in range(self._draws.randint(1, 2)):
            match self._draws.randrange(11):
                case 0:
                    entry["dtype"] = self._some(*DTYPES, *ODD)
                case 1:
                    entry["shape"] = [self._some(*NUMBERS) for _ in range(self._draws.randint(0, 5))]
                case 2:
                    entry["data_offsets"] = [self._some(*NUMBERS) for _ in range(self._draws.randint(0, 3))]
                case 3:
                    entry[self._some("dtype", "shape", "data_offsets", "more")] = self._some(*ODD)
                case 4:
                    header[self._some(*TEXTS)] = self._some(entry, *ODD)
                case 5:
                    header["context"] = self._some(*ODD)
                case 6:
                    data = bytes(self._some(0, 1, 127, 129, 1000))
                case 7:
                    length = self._some(*NUMBERS)
                case 8:
                    entry.pop(self._some("dtype", "shape", "data_offsets"), None)
                case 9:
                    header["__metadata__"] = self._some(*ODD)
                case _:
                    depth = self._some(10, 500, 1500)
                    return self._file(b"[" * depth + b"]" * self._some(0, depth), data)
        return self._file(header, data, length)

    def _lying_metadata(self) -> bytes:
        about: Any = dict(self._about)
        match self._draws.randrange(8):
            case 0:
                about["task_id"] = self._some("0" * 32, self._some(*TEXTS, *ODD))
            case 1:
                about["payload_sha256"] = self._some("sha256:" + "0" * 64, self._some(*TEXTS, *ODD))
            case 2:
                about["metrics"] = self._some(*ODD, {"loss": "low"}, {"a" * 101: 1}, {str(i): 0 for i in range(300)})
                about["task_id"] = "x"
            case 3:
                about[self._some(*TEXTS, "weight", "num_samples")] = 1
            case 4:
                del about[self._some("task_id", "payload_sha256")]
            case 5:
                about = self._some(*ODD)
            case 6:
                text = self._some("", "{", "NaN", "[" * 1500, '{"task_id": NaN}', "\0", '{"metrics": 1e999}')
                return self._file({"__metadata__": {"promptfed": text}, **self._entry()}, bytes(128))
            case _:
                extra = self._metadata() | {self._some(*TEXTS): "more"}
                return self._file({"__metadata__": extra, **self._entry()}, bytes(128))
        return self._file({"__metadata__": self._metadata(about), **self._entry()}, bytes(128))

    def _entry(self) -> dict[str, Any]:
        return {"context": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}}

    def _lying_numbers(self) -> bytes:
        context = torch.ones(4, 8)
        value = self._some(float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e6)
        for _ in range(self._draws.randint(1, 32)):
            context[self._draws.randrange(4), self._draws.randrange(8)] = value
        return update_body({"context": context}, self._task)

    def _lying_tensors(self) -> bytes:
        """Whole safetensors files of tensors that nobody asked for."""
        other = self._some(torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
        tensors: Tensors = {"context": torch.ones(self._some((4, 8), (4, 8), (8, 4), (32,))).to(other)}
        if self._draws.random() < 0.4:
            return update_body(tensors, self._task)
        for _ in range(self._draws.randint(1, 3)):
            kind = self._some(
                torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool
            )
            shape = [self._some(0, 1, 2, 4, 8) for _ in range(self._draws.randint(0, 4))]
            tensors[self._some("context", "Context", "context ", "more", *TEXTS[2:8])] = torch.ones(shape).to(kind)
        if self._draws.random() < 0.3:
            del tensors["context"]
        return update_body(tensors, self._task)
