"""A text tower as of transformers, written out: its prompts by hand, where the library is not installed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from promptfed.shared.clip.towers.hub_text import HubTextTower, text_tower_of
from promptfed.shared.clip.towers.text import ClassPrompts, TextTower, prompts_of
from tests.shared.clip.conftest import noise
from tests.support.equality import assert_values


class Block(nn.Module):
    """Mixes rows where the mask has them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        means = (rows * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return rows + torch.tanh(self.linear(rows)) + means


class Library(nn.Module):
    """BERT's names for its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(Block() for _ in range(3))

    def get_input_embeddings(self) -> nn.Embedding:
        return self.words

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        for block in self.encoder.layer:
            inputs_embeds = block(inputs_embeds, attention_mask.float())
        return inputs_embeds


def encoder(kind: str = "bert") -> Any:
    torch.manual_seed(0)
    config = SimpleNamespace(model_type=kind, pad_token_id=0, hidden_size=6)
    projection, library = nn.Linear(6, 4), Library()
    return SimpleNamespace(config=config, transformer=library, proj=projection, pooler=lambda rows, mask: rows[:, 0])


IDS = torch.tensor([[2, 1, 1, 5, 3, 0, 0, 0], [2, 1, 1, 5, 6, 3, 0, 0]])


def prompts() -> ClassPrompts:
    return prompts_of(["a", "b"], IDS, 1, 2, torch.full((2,), -1))


def by_hand(inner: Any, context: Tensor, deep: Tensor | None, ids: Tensor) -> Tensor:
    """Features (C, d_e) of one context (m, d) and what replaces it before later blocks (depth, m, d)."""
    rows, mask = inner.transformer.words(ids), (ids != 0).float()
    for number, block in enumerate(inner.transformer.encoder.layer):
        fresh = context if number == 0 else deep[number - 1] if deep is not None and number <= len(deep) else None
        if fresh is not None:
            rows = torch.cat([rows[:, :1], fresh.expand(2, -1, -1), rows[:, 3:]], dim=1)
        rows = block(rows, mask)
    return inner.proj(rows[:, 0])


@pytest.mark.parametrize("depth", [None, 1, 2])
@pytest.mark.parametrize("path", ["encode_plain", "encode_short"])
def test_prompts_take_their_places_in_every_block(path: str, depth: int | None) -> None:
    inner = encoder()
    tower = HubTextTower(inner, 8)
    context, deep = noise(2, 1, 2, 6), None if depth is None else noise(2, depth, 2, 6, seed=1)
    found = getattr(tower, path)(context, deep, prompts())
    wanted = [by_hand(inner, context[n, 0], None if deep is None else deep[n], IDS) for n in range(2)]
    assert_values(found, torch.stack(wanted))
    assert not any(block._forward_pre_hooks for block in tower.blocks)


def test_other_threads_pass_the_blocks_as_they_are() -> None:
    tower = HubTextTower(encoder(), 8)
    rows, mask = noise(2, 8, 6), torch.ones(2, 8)
    usual, found = tower.blocks[1](rows, mask), []
    with tower._replacing(noise(1, 1, 2, 6), 1, 3):
        own = tower.blocks[1](rows, mask)
        other = threading.Thread(target=lambda: found.append(tower.blocks[1](rows, mask)))
        other.start()
        other.join()
    assert torch.equal(found[0], usual)
    assert not torch.equal(own, usual)


def test_what_it_says_of_itself() -> None:
    tower = HubTextTower(encoder())
    assert (tower.width, tower.dense, tower.context_length, tower.flags.refusal) == (6, False, 77, None)
    assert (tower.flags.short, tower.flags.prefix) == (True, False)
    assert (tower.dtype, tower.device.type, len(tower.blocks)) == (torch.float32, "cpu", 3)
    assert tower.pooled_position(IDS).tolist() == [-1, -1]
    assert torch.equal(tower.embed(IDS), tower._inner.transformer.words(IDS))
    other = HubTextTower(encoder("t5"))
    assert other.flags.refusal == "it is a t5 of transformers"
    with pytest.raises(ValueError, match="takes no prompts: it is a t5"):
        other.embed(IDS)


def test_only_an_encoder_of_transformers_has_such_a_tower(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("HFTextEncoder", (SimpleNamespace,), {})
    monkeypatch.setattr("open_clip.hf_model.HFTextEncoder", kind)
    inner = kind(**vars(encoder()))
    found = text_tower_of(SimpleNamespace(text=inner), {"context_length": 9})
    assert (type(found), found.context_length) == (HubTextTower, 9)
    assert text_tower_of(SimpleNamespace(text=inner), {}).context_length == 77
    assert type(text_tower_of(small("small-custom").model, {})) is TextTower
