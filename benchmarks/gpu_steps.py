"""Training steps beside those of a plain open_clip loop, on one device in one process; for `benchmarks.gpu`."""

from __future__ import annotations

import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.step import Task, make_task
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.clip.towers.tokens import PromptTokenizer
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface.base import ServerContext
from promptfed.shared.seeds import initial_draws

BATCH = 32
NO_RATE = 1e-30
PROMPTS = {"promptfl": 16, "plan": 8}  # vectors: those of the methods' papers
REPEATS = 3


class WordTokenizer:
    """Each word is a token, numbered by a checksum: it stands in for a tokenizer that would have to be downloaded."""

    pad_token_id = 1  # SigLIP's, which also ends a text
    all_special_ids = (1,)

    def __init__(self, vocabulary: int):
        self.tokenizer = self  # as open_clip wraps those of transformers
        self._numbers = vocabulary - 2

    def __call__(self, texts: Sequence[str], context_length: int) -> Tensor:
        ids = torch.full((len(texts), context_length), self.pad_token_id)
        for row, text in zip(ids, texts, strict=True):
            words = text.replace(".", " .").split()[: context_length - 1]
            row[: len(words)] = torch.tensor([2 + zlib.crc32(word.encode()) % self._numbers for word in words])
        return ids


def with_words(backbone: Backbone) -> Backbone:
    """The backbone, with `WordTokenizer` where its own tokenizer is one of the Hugging Face hub."""
    text = backbone.open_clip_config["model_cfg"].get("text_cfg", {})
    if text.get("hf_tokenizer_name"):
        words = WordTokenizer(int(text["vocab_size"]))
        backbone.__dict__["_tokenizer"] = PromptTokenizer(words, backbone.context_length)
    return backbone


class PlainLoop:
    """Prompt learning as it is written in an hour: open_clip's own blocks, every position of every class, no cache.

    ``deep``: prompts enter every block of both towers, as in PLAN; else a context is trained alone.
    """

    def __init__(self, task: Task, length: int, deep: bool, autocast: bool):
        backbone, device = task.kept.backbone, task.kept.backbone.device
        self._model, self._deep, self._autocast, self._m = backbone.model, deep, autocast, length
        prompts = backbone.class_prompts(task.names, length)
        self._start, self._ends = prompts.start, prompts.end.to(device)
        self._rows = torch.arange(len(prompts), device=device)
        with torch.no_grad():
            self._words = self._model.token_embedding(prompts.ids.to(device))
        blocks = backbone.text_layers if deep else 1
        draws = torch.Generator().manual_seed(0)
        sizes = [(blocks, length, backbone.d_t), *([(backbone.vision_layers, length, backbone.d_v)] if deep else [])]
        self.trained = [(0.02 * torch.randn(size, generator=draws)).to(device).requires_grad_() for size in sizes]
        self._images, self._labels = task.kept.pixels.to(device), task.kept.classes.to(device)
        self._optimizer = torch.optim.SGD(self.trained, lr=NO_RATE, momentum=0.9)
        self._scaler = torch.amp.GradScaler(device.type, enabled=autocast)

    def _replaced(self, rows: Tensor, prompts: Tensor, at: int, behind: int) -> Tensor:
        return torch.cat([rows[:, :at], prompts.to(rows.dtype).expand(len(rows), -1, -1), rows[:, behind:]], 1)

    def _text(self) -> Tensor:
        model, prompts, end = self._model, self.trained[0], self._start + self._m
        rows = self._replaced(self._words, prompts[0], self._start, end) + model.positional_embedding
        for number, block in enumerate(model.transformer.resblocks):
            if 0 < number < len(prompts):
                rows = self._replaced(rows, prompts[number], self._start, end)
            rows = block(rows, attn_mask=model.attn_mask)
        pooled: Tensor = model.ln_final(rows)[self._rows, self._ends] @ model.text_projection
        return pooled

    def _features(self) -> Tensor:
        tower = self._model.visual
        if not self._deep:
            with torch.no_grad():
                found: Tensor = tower(self._images)
                return found
        rows = tower._embeds(self._images)
        for number, block in enumerate(tower.transformer.resblocks):
            rows = block(self._replaced(rows, self.trained[1][number], 1, 1 if number == 0 else 1 + self._m))
        pooled: Tensor = tower._pool(rows)[0] @ tower.proj
        return pooled

    def step(self) -> None:
        """One step on the batch."""
        with torch.autocast(self._images.device.type, torch.float16, enabled=self._autocast):
            cosines = F.normalize(self._features(), dim=-1) @ F.normalize(self._text(), dim=-1).T
            loss = F.cross_entropy(self._model.logit_scale.exp() * cosines, self._labels)
        self._optimizer.zero_grad()
        torch.autograd.backward(self._scaler.scale(loss))
        self._scaler.step(self._optimizer)
        self._scaler.update()


def _task(backbone: Backbone, name: str, classes: int, folder: Path) -> Task:
    """A task on one batch whose features and pixels are on the device."""
    task = make_task(backbone, "promptfl", classes, BATCH, folder)
    kept = task.kept
    task.kept = replace(kept, encoded=kept.encoded.to(backbone.device), pixels=kept.pixels.to(backbone.device))
    if name == "plan":  # without the global prediction, which no plain loop has
        method = make_method({"name": name, "m": PROMPTS[name], "alpha": 0.0})
        server = ServerContext(task.training, shape_of(backbone), task.names, (), 0, 1)
        state = method.initial_state_with(backbone, server, initial_draws(0))
        payload = {spec.name: state[spec.name] for spec in method.phases(1, 1)[0].down}
        task = replace(task, method=method, payload=payload)
    return task


def beside(backbone: Backbone, name: str, classes: int, count: int) -> dict[str, Any]:
    """Seconds and peak memory (MiB) of one of ``count`` steps: the method's, a plain loop's, and that with autocast."""
    with tempfile.TemporaryDirectory() as folder:
        task, length = _task(backbone, name, classes, Path(folder)), PROMPTS[name]
        found: dict[str, Any] = {}
        ways: dict[str, Callable[[], object]] = {
            "ours": lambda: task.train(replace(task.kept, steps=count), NO_RATE, backbone)
        }
        for way, autocast in {"plain": False, "plain fp16": True}.items():
            if not autocast or backbone.device.type == "cuda":
                loop = PlainLoop(task, length, name == "plan", autocast)
                ways[way] = lambda loop=loop: [loop.step() for _ in range(count)]  # type: ignore[misc]
        for way, run in ways.items():
            found |= {f"{way}, s": round(_seconds(run, backbone.device) / count, 5)}
            if backbone.device.type == "cuda":
                found |= {f"{way}, MiB": torch.cuda.max_memory_allocated() >> 20}
    plain = min(value for key, value in found.items() if key.startswith("plain") and key.endswith(", s"))
    return found | {"ratio": round(found["ours, s"] / plain, 3)}


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of a few runs after one that does not count."""
    seconds = []
    for _ in range(1 + REPEATS):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
