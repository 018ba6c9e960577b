"""`promptfed onnx`: an export's classifier as one ONNX graph, from preprocessed pixels to logits.

The image tower with its prompts or adapters is in the graph; texts that do not depend on the image are constants. The
graph is traced (torch's TorchScript exporter, which takes the methods' code as it is) and compared with the Python
classifier before it is kept.
"""

from __future__ import annotations

import importlib
import io
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from promptfed.client_service.serving.prediction import OneImage, Served
from promptfed.console.files import write_file
from promptfed.export.adapted_model import AdaptedModel
from promptfed.shared import get_extra
from promptfed.shared.clip import Backbone
from promptfed.shared.data import open_source
from promptfed.shared.errors import BadInput, Failed, PromptfedError
from promptfed.shared.tensors.torch_tensors import state_hash

OPSET = 17  # of 2022: run by every runtime in use
TOLERANCE = 1e-5  # of the largest logit, or of 1
SAMPLES = "symbols:sketch?topic=weather&test_per_class=1"  # embedded images that both must classify alike
LARGEST = 2_000_000_000  # bytes; an ONNX file is one protocol buffer
GET_ONNX = f"onnx and onnxruntime are needed: {get_extra('onnx')}"
RESIZING = {
    "shortest": ("shorter side", "center"),
    "longest": ("longer side", "center or pad"),
    "squash": ("both", None),
}


class Batch(OneImage):
    """A split of preprocessed pixels ``(B, 3, H, W)``, for any B."""

    def __init__(self, backbone: Backbone, pixels: Tensor):
        self.labels = torch.zeros(0, dtype=torch.int64)
        self._backbone, self._pixels = backbone, pixels

    def images(self, indices: Tensor) -> Tensor:
        """All images: the graph asks for all rows in order."""
        return self._pixels


class StepsDepend(Exception):
    """What is computed depends on the values: a graph would repeat the steps of the traced image."""


class Traceable(TorchFunctionMode):
    """Torch as a traced graph needs it: for any batch size, and without decisions by value."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (Tensor.nonzero, Tensor.all, Tensor.any) and len(args) == 1 and not kwargs:
            raise StepsDepend
        split = function in (torch.split, Tensor.split) and not isinstance(args[1], list | tuple)
        if split and kwargs.get("dim", 0) == 0:
            return (args[0],)  # parts only bound the memory, and their number would be fixed
        if function is F.layer_norm:
            args = (args[0], tuple(int(size) for size in args[1]), *args[2:])
        return function(*args, **kwargs)


class Graph(nn.Module):
    """The classifier as a module: pixels ``(B, 3, H, W)`` to logits ``(B, C)``."""

    def __init__(self, served: Served):
        super().__init__()
        self._served = served
        self.model = served.context.backbone.model

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits ``(B, C)``, already divided by the temperature."""
        with Traceable():
            rows = torch.ones_like(pixels[:, 0, 0, 0]).cumsum(0).long() - 1
            return self._served.classifier.logits(Batch(self._served.context.backbone, pixels), rows)


def write_onnx(model: AdaptedModel, names: Sequence[str], backbone: Backbone, out: Path) -> dict[str, Any]:
    """Write the graph to ``out`` and its description beside it (``.json``); the description.

    Raises:
        PromptfedError: a package is missing, the method has no such graph, or the graph answers differently.
    """
    if out.suffix != ".onnx":
        raise BadInput(f"--out {out}: the name of an ONNX file ends in .onnx")
    runtime = _runtime()
    served = model.serve(backbone, names)
    body = _traced(served)
    description = _described(model, served, _difference(runtime, body, served))
    write_file(out, body)
    write_file(out.with_suffix(".json"), (json.dumps(description, indent=1, ensure_ascii=False) + "\n").encode())
    return description


def _runtime() -> Any:
    try:
        importlib.import_module("onnx")
        return importlib.import_module("onnxruntime")
    except ImportError:
        raise Failed(GET_ONNX) from None


def _traced(served: Served) -> bytes:
    """The graph's bytes."""
    graph = Graph(served).eval()
    buffer: Any = io.BytesIO()  # the exporter's annotations name only paths
    if sum(weight.numel() * weight.element_size() for weight in graph.parameters()) > LARGEST:
        raise BadInput("the backbone has more than 2 GB of weights: one ONNX file cannot hold it")
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # a fused operation that ONNX does not have
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                graph,
                (torch.randn(2, 3, *served.context.backbone.image_size),),
                buffer,
                dynamo=False,
                opset_version=OPSET,
                input_names=["pixels"],
                output_names=["logits"],
                dynamic_axes={"pixels": {0: "batch"}, "logits": {0: "batch"}},
            )
    except StepsDepend:
        why = "its computation takes other steps from image to image, which a graph cannot hold"
        raise _refusal(served, why) from None
    except (torch.onnx.errors.OnnxExporterError, RuntimeError):
        raise _refusal(served, "torch cannot express its computation with this backbone in ONNX") from None
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return bytes(buffer.getvalue())


def _difference(runtime: Any, body: bytes, served: Served) -> float:
    """The largest difference from Python's logits, as a share of the largest logit (at least 1).

    Raises:
        PromptfedError: it is larger than `TOLERANCE`.
    """
    backbone, source = served.context.backbone, open_source(SAMPLES)
    drawings = [backbone.preprocess(source.test.image(at)) for at in range(min(4, len(source.test)))]
    pixels = torch.stack([*drawings, torch.randn(3, *backbone.image_size)])
    worst = 0.0
    for some in (pixels, pixels[:1]):  # another number of images than was traced
        with torch.no_grad():
            expected = served.classifier.logits(Batch(backbone, some), torch.arange(len(some))).double()
        try:
            session = runtime.InferenceSession(body, providers=["CPUExecutionProvider"])
            answered = torch.from_numpy(session.run(None, {"pixels": some.numpy()})[0]).double()
        except Exception:  # onnxruntime's errors have no common class
            raise _refusal(served, "onnxruntime cannot compute its graph") from None
        worst = max(worst, float((answered - expected).abs().max() / max(1.0, float(expected.abs().max()))))
    if not worst <= TOLERANCE:
        raise _refusal(served, f"its graph's logits differ from Python's by {worst:.1e} of the largest")
    return worst


def _refusal(served: Served, why: str) -> PromptfedError:
    return BadInput(f"{served.method} cannot be exported to ONNX: {why}")


def _described(model: AdaptedModel, served: Served, difference: float) -> dict[str, Any]:
    backbone = served.context.backbone
    preprocessing = backbone.open_clip_config["preprocess_cfg"]
    resize, crop = RESIZING[preprocessing["resize_mode"]]
    height, width = backbone.image_size
    return {
        "method": model.terms.method,
        "round": model.round,
        "state": state_hash(model.state),
        "backbone": model.terms.backbone.model_dump(mode="json", include={"model", "pretrained", "fingerprint"}),
        "class_names": list(served.class_names),
        "input": {"name": "pixels", "shape": ["batch", 3, height, width], "dtype": "float32"},
        "output": {"name": "logits", "shape": ["batch", len(served.class_names)], "dtype": "float32"},
        "preprocessing": {
            "mode": "RGB",
            "resize": resize,
            "interpolation": preprocessing["interpolation"],
            "crop": crop,
            "size": [height, width],
            "divide_by": 255,
            "mean": list(preprocessing["mean"]),
            "std": list(preprocessing["std"]),
            # Black and white of grey pictures of more than 8 bits, before anything else: those of each trainer's data.
            "grey": [list(scale) for scale in model.greys],
        },
        "largest_difference": difference,
    }
