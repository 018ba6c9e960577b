"""What only a backbone knows, supplied once by whoever has it: word embeddings, and text features of bare class names.

Both are constants of a frozen backbone. With them the coordinator, which has none, can tell which words the contexts of
any round are nearest to, and what a generator of prompts makes for each client.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor

from promptfed.coordinator.domain.federation import Live
from promptfed.coordinator.engine import retention
from promptfed.coordinator.engine.registry import Engine
from promptfed.coordinator.operations.submissions import Upload
from promptfed.coordinator.problems import WrongState
from promptfed.coordinator.store.blobs import Blobs
from promptfed.coordinator.task_problems import TENSOR_REFUSALS
from promptfed.shared.spec import ClassName, check_class_names
from promptfed.shared.tensors import TensorError, check, decode_file

WORDS, FEATURES = "word_embeddings", "class_features"
MOST_BYTES = 256 << 20


class About(BaseModel):
    """The metadata of a lexicon: the words and the class names that the rows of its two tensors stand for."""

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
    embeddings: Tensor
    class_features: dict[str, Tensor]


def wanted_names(live: Live) -> list[str]:
    """The class names that clients of the federation tell apart, each once, in order."""
    spec_names = tuple(live.spec.class_names) if live.spec.class_names is not None else None
    spaces = (live.method.label_space(spec_names, client.class_names) for client in live.clients.values())
    return sorted({name for space in spaces for name in space})


def supply(engine: Engine, id: str, upload: Upload) -> About:
    """Keep a lexicon, in the place of the one before.

    Raises:
        WrongState: nobody has enrolled yet; or the refusal of a tensor or of the metadata.
    """
    live = engine.live(id)
    if live.shape is None:
        text = f"nobody has enrolled with {live.name}: the backbone's widths are not known yet"
        raise WrongState(text, state=live.run.state)
    try:
        about = _checked(upload, live)
    except TensorError as error:
        raise TENSOR_REFUSALS[error.kind](str(error)) from None
    with engine.blobs.hold() as held:
        held.adopt(upload.path, upload.sha256)
        with engine.change(id) as change:
            former = change.live.lexicon
            change.federation_row().lexicon = upload.sha256
            change.live = replace(change.live, lexicon=upload.sha256)
            change.tell("lexicon-supplied", words=len(about.words), class_names=len(about.class_names))
    if former is not None:
        retention.collect(engine, [former])
    return about


def _checked(upload: Upload, live: Live) -> About:
    tensors, metadata = decode_file(upload.path)
    assert live.shape is not None
    if live.shape.d_t is None:
        raise TensorError("unknown-tensor", f"the backbone of {live.name} has no text tower: it has no words")
    try:
        about = About.model_validate(metadata)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "words and class_names"
        raise TensorError("bad-metadata", f"the metadata of a lexicon: {where}: {first['msg']}") from None
    wanted = {WORDS: ((len(about.words), live.shape.d_t), "float32")}
    wanted[FEATURES] = ((len(about.class_names), live.shape.d_e), "float32")
    check(tensors, wanted)
    return about


def read(blobs: Blobs, sha256: str) -> Lexicon:
    """A kept lexicon; its tensors are mapped, not read."""
    tensors, metadata = decode_file(blobs.path(sha256))
    about = About.model_validate(metadata)
    features = dict(zip(about.class_names, tensors[FEATURES], strict=True))
    return Lexicon(tuple(about.words), tensors[WORDS], features)
