"""The tokenizer of a model: open_clip's, or that in a folder with the model's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.clip.weights import hub
from promptfed.shared.service.reasons import why

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "spiece.model",
    "vocab.txt",
)  # of transformers, of which one is there
CONCH, OF_CONCH = "MahmoodLab/CONCH", "conch_byte_level_bpe_uncased.json"  # a file of mahmoodlab/CONCH's code


def tokenizer_of(source: str, text_config: Mapping[str, Any], folder: Path | None) -> Any:
    """The tokenizer of open_clip's model ``source``; ``folder``: where its weights are, if they came from one.

    Raises:
        BackboneError: it is not there, or cannot be read.
    """
    import open_clip

    name, options = str(text_config.get("hf_tokenizer_name") or ""), dict(text_config.get("tokenizer_kwargs", {}))
    try:
        if name and folder is not None and (folder / OF_CONCH).is_file():
            return OneFile(folder / OF_CONCH)
        if name and folder is not None and any((folder / file).is_file() for file in FILES):
            length = text_config.get("context_length")
            return open_clip.tokenizer.HFTokenizer(str(folder), context_length=length, **options)
        if name and ":" not in source:
            _expect_at_hand(name)
        return open_clip.get_tokenizer(source)
    except Exception as error:
        file = OF_CONCH if name == CONCH else " or ".join(FILES)
        how = f": bring {file} here, beside the weights, and give the folder (--backbone-file)" if name else ""
        raise BackboneError(f"The tokenizer of {source!r} cannot be loaded ({why(error)}){how}.") from error


def _expect_at_hand(name: str) -> None:
    """Raise BackboneError for a tokenizer that is neither here nor within reach: a download would try for minutes."""
    if name == CONCH:
        raise BackboneError("it is not on the hub")
    if Path(name).is_dir() or any(hub.is_cached(name, file) for file in FILES):
        return
    reason = hub.unreachable(hub.endpoint())
    if reason is not None:
        raise BackboneError(f"{name} is not on this machine, and {hub.endpoint()} {reason}")


class OneFile:
    """A tokenizer of one file, with CONCH's names of special tokens, and the interface of open_clip's tokenizers."""

    def __init__(self, file: Path):
        from transformers import PreTrainedTokenizerFast

        special = {"bos_token": "<start_of_text>", "eos_token": "<end_of_text>", "pad_token": "<pad>"}
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), **special)

    def __call__(self, texts: Sequence[str], context_length: int) -> Tensor:
        """Token ids `(N, L)`."""
        given = self.tokenizer(
            list(texts), max_length=context_length, truncation=True, padding="max_length", return_tensors="pt"
        )
        ids: Tensor = given["input_ids"]
        return ids
