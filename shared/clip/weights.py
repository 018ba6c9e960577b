"""Weights: from the Hugging Face hub or a local file, and what a licence asks for.

Also the identity of a frozen backbone (a digest of what determines its features), a cache of recent values, and the
sizes of a backbone from open_clip's configuration, for which nothing is downloaded or built.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from promptfed.shared.canonical import canonical_json
from promptfed.shared.clip.embedded import EMBEDDED
from promptfed.shared.clip.errors import BackboneError, near, one_line
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import AllowedBackbones, BackboneShape, BackboneSpec
from promptfed.shared.tensors.lazy import Tensor, torch

REACH_SECONDS = 3.0  # seconds for a first answer of the hub
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "spiece.model",
    "vocab.txt",
)  # of transformers, of which one is there
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
WRAPPERS = ("state_dict", "model", "model_ema")  # keys under which training scripts keep the weights

# File names in folders, the safer format first.
IN_FOLDERS = ("open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")

Value = TypeVar("Value")
PLAIN_VISION = {"image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio"}
PLAIN_TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "hf_tokenizer_name"}

BLOCK_KINDS = (
    "ln_1_weight",
    "ln_1_bias",
    "in_proj_weight",
    "in_proj_bias",
    "out_proj_weight",
    "out_proj_bias",
    "ln_2_weight",
    "ln_2_bias",
    "c_fc_weight",
    "c_fc_bias",
    "c_proj_weight",
    "c_proj_bias",
)
"""The weights of a transformer block, by the names that methods and states give them."""


def expect_at_hand(model: str, tag: str) -> None:
    """Refuse weights that are not on this machine and cannot be fetched, before a download tries for minutes.

    Raises:
        BackboneError: the weights are missing; the text says how to provide them.
    """
    from open_clip import get_pretrained_cfg
    from open_clip.constants import HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME

    known: Mapping[str, Any] = get_pretrained_cfg(model, tag)
    if "file" in known or not (known.get("hf_hub") or known.get("url")):
        return
    repository, _, file = str(known.get("hf_hub") or "").rpartition("/")
    if repository:
        if any(is_cached(repository, name) for name in ([file] if file else [HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME])):
            return
        address, bring = endpoint(), f"hf download {repository} {file or HF_SAFE_WEIGHTS_NAME}"
    else:
        if (Path("~/.cache/clip").expanduser() / os.path.basename(known["url"])).is_file():
            return
        address, bring = str(known["url"]), f"curl -LO {known['url']}"
    why = unreachable(address)
    if why is not None:
        text = f"The weights {tag!r} of {model} are not on this machine, and {urlsplit(address).netloc} {why}"
        how = (
            f"fetch them on a machine with a network ({bring}), bring the file here, and give it: --backbone-file PATH"
        )
        raise BackboneError(f"{text}: {how}.")


def is_cached(repository: str, file: str) -> bool:
    """Whether a file of the hub is on this machine."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repository, file), str)


def endpoint() -> str:
    """The hub's address."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def unreachable(address: str) -> str | None:
    """The reason why ``address`` does not answer; None if it does. Name resolution itself has no timeout."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "is not asked (HF_HUB_OFFLINE)"
    answered: list[bool] = []

    def ask() -> None:
        import httpx

        try:
            httpx.head(address, timeout=REACH_SECONDS)
            answered.append(True)
        except (httpx.HTTPError, httpx.InvalidURL, OSError):
            answered.append(False)

    asking = threading.Thread(target=ask, name="reach", daemon=True)
    asking.start()
    asking.join(REACH_SECONDS)
    return None if answered and answered[0] else f"cannot be reached ({REACH_SECONDS:.0f} s)"


def tokenizer_of(source: str, text_config: Mapping[str, Any], folder: Path | None) -> Any:
    """The tokenizer of open_clip's model ``source``; ``folder``: where its weights are, if they came from one.

    Raises:
        BackboneError: it is not there, or cannot be read.
    """
    name, options = str(text_config.get("hf_tokenizer_name") or ""), dict(text_config.get("tokenizer_kwargs", {}))
    try:
        if source in EMBEDDED:
            return _byte_pairs()
        import open_clip

        if name and folder is not None and any((folder / file).is_file() for file in FILES):
            length = text_config.get("context_length")
            return open_clip.tokenizer.HFTokenizer(str(folder), context_length=length, **options)
        if name and ":" not in source:
            _expect_at_hand(name)
        return open_clip.get_tokenizer(source)
    except Exception as error:
        bring = f"bring {' or '.join(FILES)} here, beside the weights, and give the folder (--backbone-file)"
        how = f": {bring}" if name else ""
        raise BackboneError(f"The tokenizer of {source!r} cannot be loaded ({why(error)}){how}.") from error


@cache
def _byte_pairs() -> Any:
    """open_clip's tokenizer for models that name none, from its file alone: open_clip imports much else.

    Its ftfy, whose tables take a tenth of a client's start, is imported for texts that it may change.
    """
    place = find_spec("open_clip")
    assert place is not None
    assert place.origin is not None
    spec = spec_from_file_location("promptfed_tokenizer", Path(place.origin).with_name("tokenizer.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    known = sys.modules.get("ftfy")
    sys.modules["ftfy"] = known or _ftfy()
    try:
        spec.loader.exec_module(module)
    finally:
        if known is None:
            del sys.modules["ftfy"]
    return module._tokenizer


def _ftfy() -> ModuleType:
    """In the place of ftfy: it leaves printable ASCII without entities as it is."""

    def fix_text(text: str) -> str:
        if text.isascii() and text.isprintable() and "&" not in text:
            return text
        import ftfy

        return ftfy.fix_text(text)

    stand_in = ModuleType("ftfy")
    stand_in.fix_text = fix_text  # type: ignore[attr-defined]
    return stand_in


def _expect_at_hand(name: str) -> None:
    """Raise BackboneError for a tokenizer that is neither here nor within reach: a download would try for minutes."""
    if Path(name).is_dir() or any(is_cached(name, file) for file in FILES):
        return
    reason = unreachable(endpoint())
    if reason is not None:
        raise BackboneError(f"{name} is not on this machine, and {endpoint()} {reason}")


def permits(allowed: AllowedBackbones, spec: BackboneSpec) -> bool:
    """Whether the spec's model, if it lies outside open_clip's registry, is permitted by its very name."""
    if isinstance(allowed, str):
        raise BackboneError(f"allow_backbone {allowed!r} is a text: give a list of names, as [{allowed!r}].")
    return allowed if isinstance(allowed, bool) else spec.model in allowed


def expect_permitted(model: str, allow_unregistered: bool) -> None:
    """Refuse a `model` outside open_clip's registry that the data owner has not permitted."""
    if not allow_unregistered:
        raise BackboneError(
            f"The backbone {model!r} is outside open_clip's registry: the data owner must permit it by "
            f"--allow-backbone {model}."
        )


def unknown_weights(model: str, pretrained: str, tags: list[str]) -> BackboneError:
    """The error of a `pretrained` that is none of the model's `tags`."""
    hint = near(pretrained, tags) or "; it has none, use 'random'"
    return BackboneError(f"The model {model} has no weights {pretrained!r}{hint}. A file of them is --backbone-file.")


def weights_in(path: Path) -> Path:
    """The weights file ``path``, or the weights file in the folder ``path``.

    Raises:
        BackboneError: there is none.
    """
    path = path.expanduser()
    if path.is_dir():
        file = next((path / name for name in IN_FOLDERS if (path / name).is_file()), None)
        if file is None:
            raise BackboneError(f"The folder {path} holds no weights: give a file, or a folder with {IN_FOLDERS[1]}.")
        return file
    if not path.is_file():
        raise BackboneError(f"There is no file {path} of weights.")
    if not str(path).endswith(SUFFIXES):
        raise BackboneError(f"The file {path} of weights is of unknown type: use {', '.join(SUFFIXES)}.")
    return path


def load_into(model: Any, path: Path, name: str) -> None:
    """Load the weights in the file ``path`` into ``model``, which is open_clip's model ``name``.

    Code in a file is never executed: it is read as safetensors or with ``weights_only``.

    Raises:
        BackboneError: the file cannot be read, or holds the weights of another model.
    """
    from open_clip.factory import load_checkpoint

    try:
        load_checkpoint(model, str(path), weights_only=True)
    except Exception as error:  # open_clip and torch raise many kinds of errors for a file of another model
        read_weights(path)  # or it holds none
        raise BackboneError(f"The weights in {path} are not those of {name}: {one_line(error)}") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a file by name; code in it is never executed. BackboneError if it holds something else."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        advice = "save them as safetensors"
        raise BackboneError(f"{path} cannot be read as weights alone; {advice} ({one_line(error)}).") from error
    for key in WRAPPERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping):
        raise BackboneError(f"{path} holds no weights by name.")
    named = {str(name).removeprefix("module."): tensor for name, tensor in loaded.items()}
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}


def config_digest(config: Mapping[str, Any]) -> str:
    """`sha256:<hex>` of a JSON-like mapping in canonical form (sorted keys, no spaces; tuples count as lists)."""
    return "sha256:" + hashlib.sha256(canonical_json(config).encode()).hexdigest()


def weights_fingerprint(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """`sha256:<hex>` over name, dtype, shape and little-endian bytes of every tensor in name order, then `config`.

    The config is included because equal weights with another activation, preprocessing or tokenizer give other
    features.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(json.dumps([name, dtype, list(tensor.shape)], separators=(",", ":")).encode())
        digest.update(_little_endian_bytes(tensor))
    digest.update(config_digest(config).encode())
    return "sha256:" + digest.hexdigest()


def _little_endian_bytes(tensor: Tensor) -> memoryview:
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    if sys.byteorder == "big":
        raw = raw.reshape(-1, tensor.element_size()).flip(1).contiguous().reshape(-1)
    array: Any = raw.numpy()
    return memoryview(array)


class Recent(Generic[Value]):
    """The `most` recently used values by key; thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._turn = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value under `key`, made if missing. Two threads may make it at the same time; one value is kept."""
        with self._turn:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._turn:
            self._values[key] = value
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value


def content_key(tensor: Tensor | None) -> Hashable:
    """A key that is equal for tensors of equal shape, dtype and bytes."""
    if tensor is None:
        return None
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tuple(tensor.shape), tensor.dtype, hashlib.sha256(content).digest()


def shape_by_name(model: str) -> BackboneShape | None:
    """The sizes of ``model``; None if its configuration lacks them or is not among open_clip's. Nothing is imported."""
    config = EMBEDDED[model].config() if model in EMBEDDED else _registered(model)
    if config is None:
        return None
    text, vision = config["text_cfg"], config["vision_cfg"]
    if model in EMBEDDED and "timm_model_name" in vision:
        given = {"text_layers": text["layers"], "context_length": text["context_length"], "heads_t": text["heads"]}
        return BackboneShape(d_t=text["width"], d_e=config["embed_dim"], **given)
    if "hf_model_name" in text or "timm_model_name" in vision or not isinstance(vision.get("layers"), int):
        return None
    return _shape(config["embed_dim"], text, vision)


def _registered(model: str) -> dict[str, Any] | None:
    """What the installed open_clip has under the name."""
    library = find_spec("open_clip")
    name = model.replace("/", "-") + ".json"
    for folder in (library and library.submodule_search_locations) or ():
        if os.sep not in name and (file := Path(folder, "model_configs", name)).is_file():
            return dict(json.loads(file.read_text(encoding="utf-8")))
    return None


def _shape(d_e: int, text: dict[str, Any], vision: dict[str, Any]) -> BackboneShape | None:
    try:
        return BackboneShape(
            d_t=text["width"],
            d_v=vision["width"],
            d_e=d_e,
            text_layers=text["layers"],
            vision_layers=vision["layers"],
            context_length=text["context_length"],
            patch_size=vision["patch_size"],
            **_inside(text, vision),
        )
    except (KeyError, ValueError, TypeError):
        return None


def _inside(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, int]:
    """The inner sizes of plain towers; empty for other towers, whose sizes only the model itself determines."""
    if set(vision) - PLAIN_VISION or set(text) - PLAIN_TEXT:
        return {}
    width, patches = vision["width"], (vision["image_size"] // vision["patch_size"]) ** 2
    return {
        "mlp_width": int(width * vision.get("mlp_ratio", 4.0)),
        "patch_tokens": patches,
        "positions": patches + 1,
        "heads_v": width // vision.get("head_width", 64),
        "heads_t": text["heads"],
    }
