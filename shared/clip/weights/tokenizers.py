"""The tokenizer of a model: open_clip's, or that in a folder with the model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.clip.weights import hub
from promptfed.shared.service.reasons import why

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "spiece.model",
    "vocab.txt",
)  # of transformers, of which one is there


def tokenizer_of(source: str, text_config: Mapping[str, Any], folder: Path | None) -> Any:
    """The tokenizer of open_clip's model ``source``; ``folder``: where its weights are, if they came from one.

    Raises:
        BackboneError: it is not there, or cannot be read.
    """
    import open_clip

    name, options = str(text_config.get("hf_tokenizer_name") or ""), dict(text_config.get("tokenizer_kwargs", {}))
    try:
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


def _expect_at_hand(name: str) -> None:
    """Raise BackboneError for a tokenizer that is neither here nor within reach: a download would try for minutes."""
    if Path(name).is_dir() or any(hub.is_cached(name, file) for file in FILES):
        return
    reason = hub.unreachable(hub.endpoint())
    if reason is not None:
        raise BackboneError(f"{name} is not on this machine, and {hub.endpoint()} {reason}")
