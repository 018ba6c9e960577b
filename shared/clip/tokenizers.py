"""open_clip's tokenizers, from the hub or beside local weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from promptfed.shared.clip.embedded import EMBEDDED
from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.clip.hub import endpoint, is_cached, unreachable
from promptfed.shared.service.reasons import why

# Of transformers, of which one is there.
FILES = ("tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.txt")


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
    imported = sys.modules.get("ftfy")
    sys.modules["ftfy"] = imported or _ftfy()
    try:
        spec.loader.exec_module(module)
    finally:
        if imported is None:
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
