"""Stored constants of a frozen backbone: word embeddings, and text features of bare class names.

The coordinator has no backbone. With these it finds the words nearest to the contexts of any round, and what a prompt
generator makes for each client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from promptfed.coordinator.store.blobs import Blobs
from promptfed.shared.spec.spec import ClassName, check_class_names
from promptfed.shared.tensors import Array, Arrays

WORDS, FEATURES = "word_embeddings", "class_features"


class LexiconMetadata(BaseModel):
    """The words and class names of the rows of a lexicon's two tensors."""

    model_config = ConfigDict(extra="forbid")

    words: Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(min_length=1)]
    class_names: list[ClassName]

    @field_validator("class_names")
    @classmethod
    def _distinct(cls, names: list[str]) -> list[str]:
        return check_class_names(names) if names else names


@dataclass(frozen=True)
class Lexicon:
    """Embeddings ``(V, d_t)`` of ``words``, and the normalised text feature ``(d_e,)`` of each class name."""

    words: tuple[str, ...]
    embeddings: Array
    class_features: Arrays


def read_lexicon(blobs: Blobs, sha256: str) -> Lexicon:
    """A stored lexicon; the tensors of a large one are memory-mapped."""
    tensors, metadata = blobs.tensors(sha256)
    about = LexiconMetadata.model_validate(metadata)
    features = dict(zip(about.class_names, tensors[FEATURES], strict=True))
    return Lexicon(tuple(about.words), tensors[WORDS], features)
