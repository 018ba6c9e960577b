"""What a machine can do with a backbone: its sizes, the methods that run with it, and the speed of passes and steps.

The weights are random: neither speed nor memory depends on them, and nothing is downloaded. A process of its own
computes, so that the peak of its memory is the backbone's, and ends when its time is over.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from promptfed.shared import machine

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone

PICTURES, CLASSES, CONTEXT = 4, 10, 16  # of a step that is timed
TIMES = 3  # of which the fastest counts; the first one warms up


@dataclass
class BackboneFacts:
    """What is known so far. ``methods``: names of those that run; ``refused``: the reason of each other one.

    ``seconds``: of a pass over `PICTURES` images (``features``), and of steps that train a context of `CONTEXT` vectors
    before `CLASSES` names (``text_step``) or as many image prompts as pictures (``image_step``). ``memory_mib``: the
    peak after each: of the process, or on a GPU of its tensors. ``without``: why a part was not timed. ``tokenizer``:
    why invented tokens were read.
    """

    model: str
    parameters: int = 0
    weights_mib: int = 0
    preparation: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    methods: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    memory_mib: dict[str, int] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    tokenizer: str | None = None


def examine(model: str, pretrained: str | None = None, device: str = "cpu", seconds: float = 120.0) -> BackboneFacts:
    """The facts of ``model``; what took longer than ``seconds`` is in ``without``.

    Raises:
        BackboneError: it cannot be built; the text gives the reason.
    """
    from promptfed.shared.clip import BackboneError

    command = [sys.executable, "-m", "promptfed.runtime.backbones", model, str(pretrained or "random"), device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:  # noqa: S603
        try:
            told, problem = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            told, problem = child.communicate()
            problem = f"not within {seconds:.0f} s"
    lines = told.splitlines()
    if child.returncode and not lines:
        raise BackboneError(problem.strip().rpartition("\n")[2] or f"{model} cannot be examined")
    facts = BackboneFacts(**json.loads(lines[-1]))
    if child.returncode:
        reason = problem.strip().rpartition("\n")[2]
        facts.without |= {part: reason for part in PARTS if part not in facts.seconds | facts.without}
    return facts


PARTS = ("features", "text_step", "image_step")


def measure(model: str, pretrained: str, device: str, tell: Callable[[BackboneFacts], None]) -> None:
    """Compute the facts in this process; ``tell`` gets them after each part. Raises BackboneError."""
    import torch

    from promptfed.shared.clip import BackboneError, load_backbone, shape_of
    from promptfed.shared.clip.stand_in import stand_in

    torch.set_num_threads(1)
    facts = BackboneFacts(model)
    embedded = pretrained == "embedded"
    backbone = load_backbone(model, "embedded" if embedded else None, device=device, allow_unregistered=True)
    parameters = list(backbone.model.parameters())
    facts.parameters = sum(parameter.numel() for parameter in parameters)
    facts.weights_mib = sum(parameter.numel() * parameter.element_size() for parameter in parameters) >> 20
    facts.preparation = _preparation(model, backbone.open_clip_config["preprocess_cfg"])
    shape = shape_of(backbone)
    facts.shape = {key: value for key, value in shape.model_dump().items() if value is not None}
    facts.tokenizer = stand_in(backbone)
    facts.methods, facts.refused = methods_for(backbone)
    tell(facts)
    images = torch.zeros(PICTURES, 3, *backbone.image_size)
    for part, step in (
        ("features", lambda: backbone.encode_images(images)),
        ("text_step", lambda: _text_step(backbone)),
        ("image_step", lambda: _image_step(backbone, images)),
    ):
        try:
            facts.seconds[part] = _fastest(step, device)
            facts.memory_mib[part] = _peak(device)
        except (BackboneError, torch.OutOfMemoryError) as error:
            facts.without[part] = " ".join(str(error).split())[:200]
        tell(facts)


def methods_for(backbone: Backbone) -> tuple[list[str], dict[str, str]]:
    """The methods that run with a backbone, and of the others the reason, as coordinator and client give it."""
    from promptfed.shared.clip import BackboneError, shape_of
    from promptfed.shared.methods import METHODS
    from promptfed.shared.methods.core.interface.base import MethodError, ServerContext
    from promptfed.shared.spec.spec import TrainingSpec

    names = ("cat", "dog")
    context = ServerContext(TrainingSpec(), shape_of(backbone), names, (), seed=0, rounds=1)
    able, refused = [], {}
    for name, kind in METHODS.items():
        method = kind(kind.Hyper())
        try:
            method.check_backbone(context.shape)
            method.dims(context)
            method.check_texts(backbone, names, "a photo of a {}.")
            able.append(name)
        except (MethodError, BackboneError) as error:
            refused[name] = str(error)
    return able, refused


def _preparation(model: str, configured: dict[str, Any]) -> dict[str, Any]:
    """How the published weights want images: what they agree on, else what the configuration says."""
    from promptfed.shared.clip.loading import published_preparation

    both = configured | published_preparation(model)
    return {key: both[key] for key in ("size", "mean", "std", "interpolation", "resize_mode") if key in both}


def _fastest(step: Callable[[], object], device: str) -> float:
    import torch

    # On a CPU the seconds of this process alone: other work on the machine does not count.
    clock, taken = (time.process_time if device == "cpu" else time.perf_counter), []
    for _ in range(TIMES):
        begun = clock()
        step()
        if device != "cpu":
            torch.cuda.synchronize()
        taken.append(clock() - begun)
    return round(min(taken), 4)


def _text_step(backbone: Any) -> None:
    import torch

    names = [f"thing {number}" for number in range(CLASSES)]
    length = min(CONTEXT, backbone.context_length - 8) if backbone.has_text else CONTEXT
    prompts = backbone.class_prompts(names, length)
    context = torch.randn(length, backbone.d_t, device=backbone.device).mul_(0.02).requires_grad_()
    backbone.encode_prompts(context, prompts).sum().backward()


def _image_step(backbone: Any, images: Any) -> None:
    import torch

    prompts = torch.randn(1, PICTURES, backbone.d_v, device=backbone.device).mul_(0.02).requires_grad_()
    backbone.encode_images_prompted(images, prompts).sum().backward()


def _peak(device: str) -> int:
    import torch

    if device != "cpu":
        return int(torch.cuda.max_memory_allocated() >> 20)
    return machine.peak_memory() >> 20


def main() -> int:
    """A line of JSON after each part; 1 with the reason on stderr if the backbone cannot be built."""
    from promptfed.shared.clip import BackboneError

    model, pretrained, device = sys.argv[1:]
    try:
        measure(model, pretrained, device, lambda facts: print(json.dumps(asdict(facts)), flush=True))
    except BackboneError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
