"""How many operations a training step starts: for a GPU that waits for them, what a clock is for a CPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from promptfed.shared.clip import Backbone, load_backbone
from promptfed.shared.tensors.replay import Operations

WIDTH = 64
WAYS = {
    "cpu": "prefix",
    "gpu": "dense",
    "plain": "plain",
}  # text passes; plain: all positions, open_clip's blocks
NO_WORK = ("aten::_unsafe_view", "aten::empty", "aten::new_empty", "aten::lift_fresh")


def narrow(model: str) -> Backbone:
    """A backbone with the blocks of ``model``'s text tower, but narrow: the operations are the same, and soon done."""
    import open_clip

    config = open_clip.get_model_config(model)
    if config is None or "layers" not in config["text_cfg"]:
        raise SystemExit(f"open_clip has no text tower of its own in {model!r}: name another model, such as ViT-B-16")
    vision = {"image_size": 32, "layers": 1, "width": WIDTH, "patch_size": 16}
    name = f"narrow-{model}"
    with tempfile.TemporaryDirectory() as folder:
        own = config | {"embed_dim": WIDTH, "vision_cfg": vision, "text_cfg": config["text_cfg"] | {"width": WIDTH}}
        (Path(folder) / f"{name}.json").write_text(json.dumps(own))
        open_clip.add_model_config(folder)
        return load_backbone(name, "random")


def works(operation: Any) -> bool:
    """Whether an operation computes or copies: views and new memory do neither."""
    schema = operation._schema
    viewed = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
    return schema.name.startswith("aten::") and not viewed and not schema.name.startswith(NO_WORK)


def of_a_step(backbone: Backbone, way: str, steps: Callable[[int], object]) -> int:
    """The operations, without views, by which two ``steps`` are more than one; the optimizer's among them."""
    backbone.text_path = WAYS[way]  # type: ignore[assignment]
    try:
        steps(1)  # what is made once
        found = []
        for count in (1, 2):
            with Operations(backbone.device) as passed:
                steps(count)
            found.append(sum(works(noted[0]) for noted in passed.noted))
    finally:
        del backbone.text_path
    return found[1] - found[0]
