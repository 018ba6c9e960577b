"""Visual prompts in every shipped configuration with a transformer, against the library's own forward pass.

The configurations are real, with two blocks, random weights and float64.
"""

import json
import re
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip.model import _build_vision_tower

from promptfed.shared.clip import BackboneError
from promptfed.shared.clip.building import seeded
from promptfed.shared.clip.towers.copies import vision_tower
from promptfed.shared.clip.towers.vision import prompted_tower, refusal_of
from tests.shared.clip.conftest import assert_image_weights_equal, noise
from tests.support.equality import assert_gradients, assert_values

PLAIN = 56
LARGE = re.compile(r"336|378|384|448|512|-[gHE]-|bigG|gopt|SO400M|CLIPA")
REFUSED = {"TimmModel": 78, "ModifiedResNet": 10}


@cache
def configurations() -> dict[str, list[str]]:
    """Names of configurations by the description of their image tower, cut to two blocks."""
    found: dict[str, list[str]] = {}
    for path in sorted((Path(open_clip.__file__).parent / "model_configs").glob("*.json")):
        config = json.loads(path.read_text())
        wanted = {key: config.get(key, False) for key in ("embed_dim", "vision_cfg", "quick_gelu")}
        if isinstance(wanted["vision_cfg"].get("layers"), int):
            wanted["vision_cfg"] |= {"layers": 2}
        found.setdefault(json.dumps(wanted, sort_keys=True), []).append(path.stem)
    return found


def is_plain(description: str) -> bool:
    return isinstance(json.loads(description)["vision_cfg"].get("layers"), int)


def build(description: str) -> Any:
    wanted = json.loads(description)
    return _build_vision_tower(wanted["embed_dim"], wanted["vision_cfg"], wanted["quick_gelu"])


@cache
def refusals() -> dict[str, str | None]:
    with torch.device("meta"):
        return {description: refusal_of(build(description)) for description in configurations()}


def plain_towers() -> list[Any]:
    """The second tier takes the towers of ordinary size; the third takes all."""
    return [
        pytest.param(wanted, id=names[0], marks=pytest.mark.slow if LARGE.search(names[0]) else pytest.mark.extended)
        for wanted, names in configurations().items()
        if is_plain(wanted)
    ]


@pytest.mark.extended
def test_every_configuration_with_a_plain_transformer_takes_prompts() -> None:
    assert sum(len(names) for wanted, names in configurations().items() if refusals()[wanted] is None) == PLAIN
    for kind, count in REFUSED.items():
        refused = [n for wanted, names in configurations().items() if kind in (refusals()[wanted] or "") for n in names]
        assert len(refused) == count, kind
    assert PLAIN + sum(REFUSED.values()) == 144


def fixed_weights(visual: Any) -> str | None:
    """Why the weights of a tower cannot be trained."""
    try:
        vision_tower(visual)
    except BackboneError as error:
        return str(error)
    return None


@pytest.mark.extended
def test_the_weights_of_most_plain_transformers_can_be_trained() -> None:
    with torch.device("meta"):
        plain = {wanted: fixed_weights(build(wanted)) for wanted in configurations() if is_plain(wanted)}
    counts = Counter(reason and reason.rpartition(" ")[2] for wanted, reason in plain.items() for _ in names_of(wanted))
    assert counts == {None: PLAIN}


def names_of(description: str) -> list[str]:
    return configurations()[description]


def test_a_refusal_names_the_tower() -> None:
    with torch.device("meta"):
        tower = build(next(wanted for wanted, names in configurations().items() if "ViTamin-B" in names))
    with pytest.raises(BackboneError, match="no visual prompts: it is a TimmModel, not a vision transformer"):
        prompted_tower(tower)


@contextmanager
def prompts_hooked_in(visual: Any, prompts: Any) -> Any:
    """The library's tower, whose blocks find the prompts after its class token, if it has one, as further ones."""
    depth, n, _ = prompts.shape
    blocks, behind, norm = visual.transformer.resblocks, 1, visual.ln_pre

    def enter(module: Any, inputs: Any) -> Any:
        fresh = norm(prompts[0]).expand(len(inputs[0]), -1, -1)
        return torch.cat([inputs[0][:, :behind], fresh, inputs[0][:, behind:]], dim=1), *inputs[1:]

    def replace(rows: Any) -> Any:
        def hook(module: Any, inputs: Any) -> Any:
            fresh = rows.expand(len(inputs[0]), -1, -1)
            return torch.cat([inputs[0][:, :behind], fresh, inputs[0][:, behind + n :]], dim=1), *inputs[1:]

        return hook

    def leave(module: Any, inputs: Any, output: Any) -> Any:
        return torch.cat([output[:, :behind], output[:, behind + n :]], dim=1)

    with ExitStack() as stack:
        for number in range(depth):
            hook = enter if number == 0 else replace(prompts[number])
            stack.callback(blocks[number].register_forward_pre_hook(hook).remove)
        stack.callback(blocks[-1].register_forward_hook(leave).remove)
        yield


def randomise(visual: Any) -> None:
    """Weights that matter: libraries start biases, tokens and layer scales at or near zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in visual.parameters():
            weight += 0.1 * weight.std().nan_to_num(0).clamp(min=0.1) * torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize("description", plain_towers())
def test_prompts_equal_the_library_with_further_tokens(description: Any) -> None:
    with seeded():
        visual = build(description).eval().requires_grad_(False)
    randomise(visual)
    visual = visual.double()
    tower, (height, width) = prompted_tower(visual), visual.image_size
    images = noise(1, 3, height, width, dtype=torch.float64)
    if fixed_weights(visual) is None:
        assert_image_weights_equal(vision_tower(visual), images)
    leaves = [noise(2, 3, tower.width, seed=2, dtype=torch.float64).requires_grad_() for _ in range(2)]
    found = tower.encode(images, leaves[0], pooled=False)
    with prompts_hooked_in(visual, leaves[1]):
        wanted = visual(images)
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    assert_values(found, wanted)
    weight = noise(*found.shape, seed=2, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((features * weight).sum(), leaf)[0]
        for features, leaf in zip((found, wanted), leaves, strict=True)
    ]
    assert_gradients(*gradients)
    with torch.no_grad():
        ordinary = visual(images)
        bare = tower.encode(images, torch.zeros(1, 0, tower.width, dtype=torch.float64), pooled=False)
    assert_values(bare, ordinary[0] if isinstance(ordinary, tuple) else ordinary)
