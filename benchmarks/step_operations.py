"""How many operations a training step starts: for a GPU that waits for them, what a clock is for a CPU."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from promptfed.shared.clip import Backbone, load_backbone
from promptfed.shared.methods.core.training import make_optimizer
from promptfed.shared.tensors.replay import Operations

WIDTH = 64
WAYS = {
    "cpu": "prefix",
    "gpu": "dense",
    "plain": "plain",
}  # text passes; plain: all positions, open_clip's blocks
NO_WORK = ("aten::_unsafe_view", "aten::empty", "aten::new_empty", "aten::lift_fresh")


def narrow(model: str, images: bool = False) -> Backbone:
    """A backbone with the blocks of ``model``'s text tower, but narrow: the operations are the same, and soon done.

    ``images``: also those of its image tower.
    """
    import open_clip

    config = open_clip.get_model_config(model)
    if config is None or "layers" not in config["text_cfg"]:
        raise SystemExit(f"open_clip has no text tower of its own in {model!r}: name another model, such as ViT-B-16")
    layers = config["vision_cfg"]["layers"] if images else 1
    vision = {"image_size": 32, "layers": layers, "width": WIDTH, "patch_size": 16}
    name = f"narrow-{layers}-{model}"
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


def open_clip_steps(task: Any, count: int) -> None:
    """Steps with open_clip's own towers, the visual and text prompts of ``task``, its batch and its optimizer.

    Without prompts all weights of the image tower are trained.
    """
    backbone, images, labels = task.kept.backbone, task.kept.pixels, task.kept.classes
    visual = copy.deepcopy(backbone.model.visual)
    prompts = {name: start.clone().requires_grad_() for name, start in task.payload.items() if name.endswith("prompts")}
    seen, read = prompts.get("visual_prompts", []), prompts.get("text_prompts")
    leaves = list(prompts.values()) if prompts else list(visual.requires_grad_().parameters())
    optimizer, text = make_optimizer(leaves, task.training, 1e-30), backbone.encode_text(task.names)
    for _ in range(count):
        optimizer.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(not prompts):
            rows = visual._embeds(images)
        own = rows.shape[1]
        for number, block in enumerate(visual.transformer.resblocks):
            if number < len(seen):
                rows = torch.cat([rows[:, :own], seen[number].expand(len(rows), -1, -1)], dim=1)
            rows = block(rows)
        features = F.normalize(visual._pool(rows[:, :own])[0] @ visual.proj, dim=-1)
        if read is not None:
            classes = backbone.class_prompts(task.names, read.shape[1])
            text = backbone.encode_prompts(read[0], classes, deep=read[1:] if len(read) > 1 else None, path="plain")
        torch.autograd.backward(F.cross_entropy(backbone.logit_scale * features @ text.T, labels))
        optimizer.step()
