"""Which files of the Hugging Face hub are on this machine, and whether the hub can be reached."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from promptfed.shared.clip.errors import BackboneError

REACH_SECONDS = 3.0  # seconds for a first answer of the hub


def expect_at_hand(model: str, tag: str) -> None:
    """Refuse weights that are not on this machine and cannot be fetched, before a download tries for minutes.

    Raises:
        BackboneError: the weights are missing; the text says how to provide them.
    """
    from open_clip import get_pretrained_cfg
    from open_clip.constants import HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME

    config: Mapping[str, Any] = get_pretrained_cfg(model, tag)
    if "file" in config or not (config.get("hf_hub") or config.get("url")):
        return
    repository, _, file = str(config.get("hf_hub") or "").rpartition("/")
    if repository:
        if any(is_cached(repository, name) for name in ([file] if file else [HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME])):
            return
        address, bring = endpoint(), f"hf download {repository} {file or HF_SAFE_WEIGHTS_NAME}"
    else:
        if (Path("~/.cache/clip").expanduser() / os.path.basename(config["url"])).is_file():
            return
        address, bring = str(config["url"]), f"curl -LO {config['url']}"
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
