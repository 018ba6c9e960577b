"""Text prompts in every configuration that open_clip ships, against the library's own forward pass.

The configurations are real, with two blocks, random weights and float64. Of a vocabulary only the first words are kept,
since 50,000 in float64 take half a gigabyte; a tokenizer's name is no part of a tower, so fewer of them differ.
"""

import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import pytest
import torch
from open_clip.model import CLIP, _build_text_tower

from promptfed.shared.clip.loading import seeded
from promptfed.shared.clip.towers.dense import DenseEncoder
from promptfed.shared.clip.towers.hub_text import text_tower_of
from promptfed.shared.clip.towers.prefix import PrefixEncoder
from promptfed.shared.clip.towers.text import ClassPrompts
from tests.shared.clip.conftest import assert_text_weights_equal, noise, prompts_hooked_in, value_and_gradients
from tests.support.equality import assert_gradients, assert_values

DATA = Path(__file__).parents[2] / "data"
ONE_BLOCK = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 32}
WORDS = 1000
M = 4
LARGE = re.compile(r"-[gHEe]-|bigG|gopt|SO400M|xl-|XL|large|xxl|CLIPA")

# The published config.json of each text model on the hub, but for the depth and large vocabularies.
ON_THE_HUB = {
    name: config
    | {key: 2 for key in ("num_hidden_layers", "num_layers", "encoder_layers") if key in config}
    | {key: 1 for key in ("num_decoder_layers", "decoder_layers") if key in config}
    | {"vocab_size": WORDS}
    for name, config in json.loads((DATA / "text_models.json").read_text()).items()
}
BIOMEDCLIP = {
    "embed_dim": 512, "custom_text": True, "quick_gelu": False,
    "text_cfg": {
        "hf_model_name": "microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract", "hf_proj_type": "mlp",
        "hf_pooler_type": "cls_last_hidden_state_pooler", "context_length": 256,
    },
}  # fmt: skip


@cache
def configurations() -> dict[str, list[str]]:
    """Names of configurations by the description of their text tower, cut to two blocks."""
    found = {json.dumps(BIOMEDCLIP, sort_keys=True): ["BiomedCLIP"]}
    for path in sorted((Path(open_clip.__file__).parent / "model_configs").glob("*.json")):
        config = json.loads(path.read_text())
        wanted = {key: config.get(key, False) for key in ("embed_dim", "text_cfg", "quick_gelu", "custom_text")}
        if "hf_model_name" not in wanted["text_cfg"]:
            wanted["text_cfg"] |= {"layers": 2, "vocab_size": WORDS}
            for name in ("hf_tokenizer_name", "tokenizer_kwargs"):
                wanted["text_cfg"].pop(name, None)
        found.setdefault(json.dumps(wanted, sort_keys=True), []).append(path.stem)
    return found


SIZES = {"layers", "width", "heads", "context_length", "vocab_size"}


def towers() -> list[Any]:
    """The second tier takes a quarter of the smallest tower of each kind but large ones; the third all sizes."""
    kinds, found = set(), []
    plain = [(json.loads(wanted), wanted) for wanted in configurations()]
    for options, wanted in sorted(plain, key=lambda one: one[0]["text_cfg"].get("width", 0)):
        config = options["text_cfg"]
        named = sorted((key, str(config[key])) for key in config.keys() - SIZES)
        kind = str((options["quick_gelu"], options["custom_text"], named))
        names = configurations()[wanted]
        name, large = names[0], all(map(LARGE.search, names))
        mark = pytest.mark.slow if large or kind in kinds else pytest.mark.extended
        if mark == pytest.mark.extended:
            kinds.add(kind)
            wanted = quarter(options)
        found.append(pytest.param(wanted, id=name, marks=mark))
    return found


def quarter(options: dict[str, Any]) -> str:
    """The description with a quarter of the heads, each as wide as it is."""
    config = options["text_cfg"]
    if "heads" in config:
        heads = max(1, config["heads"] // 4)
        config |= {"heads": heads, "width": config["width"] // config["heads"] * heads}
    return json.dumps(options, sort_keys=True)


def build(description: str, folder: Path) -> Any:
    wanted = json.loads(description)
    name = wanted["text_cfg"].get("hf_model_name")
    if name is not None:
        (folder / "config.json").write_text(json.dumps(ON_THE_HUB[name]))
        wanted["text_cfg"] |= {"hf_model_name": str(folder), "hf_model_pretrained": False}
    with seeded():
        if wanted["custom_text"] or name is not None:
            model = SimpleNamespace(
                text=_build_text_tower(wanted["embed_dim"], wanted["text_cfg"], wanted["quick_gelu"])
            )
            model.text.double().eval().requires_grad_(False)
            return model
        clip = CLIP(wanted["embed_dim"], ONE_BLOCK, wanted["text_cfg"], wanted["quick_gelu"])
        return clip.double().eval().requires_grad_(False)


def prompts_for(tower: Any, model: Any) -> ClassPrompts:
    """Three class names of 1, 3 and 6 tokens, with a start token, an end token and padding."""
    inner = getattr(model, "text", None)
    config = getattr(inner, "config", None)
    if config is not None:
        pad, end, length = int(config.pad_token_id), 2, 20
    else:
        holder = model if inner is None else inner
        words = holder.token_embedding.num_embeddings
        pad, end = 0, words - 1
        if str(getattr(holder, "pool_type", getattr(holder, "text_pool_type", ""))) == "eos":
            end = int(getattr(holder, "eos_id", getattr(holder, "text_eos_id", 0)))
        length = len(holder.positional_embedding) - (1 if getattr(holder, "cls_emb", None) is not None else 0)
    ids = torch.full((3, length), pad)
    for row, count in enumerate((1, 3, 6)):
        ids[row, : 2 + M + count] = torch.tensor([3, *[7] * M, *range(10, 10 + count), end])
    ends = tower.pooled_position(ids)
    buckets: dict[int, list[int]] = {}
    for index, position in enumerate(ends.tolist()):
        buckets.setdefault(position, []).append(index)
    return ClassPrompts(
        names=("a", "b", "c"), context_length=M, start=1, ids=ids, end=ends,
        buckets=tuple((position, tuple(buckets[position])) for position in sorted(buckets)),
    )  # fmt: skip


def reference(tower: Any, model: Any, prompts: Any, context: Any, deep: Any) -> Any:
    encode = model.text if hasattr(model, "text") else lambda ids: model.encode_text(ids, normalize=False)
    holder = getattr(model, "text", None) or model
    hub = hasattr(holder, "config")
    embedding = holder.transformer.get_input_embeddings() if hub else holder.token_embedding
    with prompts_hooked_in(embedding, tower.blocks, 1, context, deep):
        features = encode(prompts.ids)
    return features[0] if isinstance(features, tuple) else features


def test_every_configuration_is_tried() -> None:
    names = [name for names in configurations().values() for name in names]
    assert len(names) == 145  # BiomedCLIP comes from the hub
    assert sum("hf_model_name" in wanted for wanted, names in configurations().items() for _ in names) == 11


@pytest.mark.usefixtures("a_tower_ends")
@pytest.mark.parametrize("description", towers())
def test_prompts_and_weights_equal_the_library_s(description: str, tmp_path: Path) -> None:
    if "hf_model_name" in description:
        pytest.importorskip("transformers")
    model = build(description, tmp_path)
    tower = text_tower_of(model, {})
    tower.require()
    prompts = prompts_for(tower, model)
    if "hf_model_name" not in description:
        alone = hasattr(model, "text")
        encode = model.text if alone else lambda ids: model.encode_text(ids, normalize=False)
        assert_text_weights_equal(tower, model.text if alone else model, prompts.ids, encode)
    encoders = {"plain": tower.encode_plain}
    if tower.flags.short:
        encoders["short"] = tower.encode_short
    if tower.dense:
        encoders["dense"] = DenseEncoder(tower).encode
    if tower.flags.prefix:
        encoders["prefix"] = PrefixEncoder(tower).encode
    for depth in (0, 1):
        leaves = [noise(M, tower.width, scale=0.5, dtype=torch.float64)]
        leaves += [noise(depth, M, tower.width, seed=1, scale=0.5, dtype=torch.float64)] * (depth > 0)
        wanted, wanted_gradients = value_and_gradients(
            lambda context, deep=None: reference(tower, model, prompts, context, deep), *leaves
        )
        for path, encode in encoders.items():

            def found_by(context: Any, deep: Any = None, path: Any = path, encode: Any = encode) -> Any:
                context = context[None] if path == "prefix" else context[None, None]
                return encode(context, None if deep is None else deep[None], prompts)[0]

            found, gradients = value_and_gradients(found_by, *leaves)
            assert_values(found, wanted)
            for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
                assert_gradients(gradient, wanted_gradient)
