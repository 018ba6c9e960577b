"""Lexicons: supplied by an operator who has the backbone, again whenever there are new class names."""

from __future__ import annotations

from dataclasses import replace

from pydantic import ValidationError

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import retention
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.problems import TENSOR_REFUSALS, WrongState, first_error
from promptfed.coordinator.store.lexicon import FEATURES, WORDS, LexiconMetadata
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.tensors import TensorError, check

MOST_BYTES = 256 << 20


def wanted_names(federation: Federation) -> list[str]:
    """The class names of the clients' label spaces, each once, sorted."""
    spec_names = tuple(federation.spec.class_names) if federation.spec.class_names is not None else None
    spaces = (federation.method.label_space(spec_names, client.class_names) for client in federation.clients.values())
    return sorted({name for space in spaces for name in space})


def supply(registry: Registry, id: str, upload: Upload) -> LexiconMetadata:
    """Store a lexicon; it replaces an earlier one.

    Raises:
        WrongState: no client has enrolled yet. Refusals of tensors or metadata.
    """
    federation = registry.get(id)
    if federation.shape is None:
        text = f"nobody has enrolled with {federation.name}: the backbone's widths are not known yet"
        raise WrongState(text, state=federation.run.state)
    try:
        about = _checked(upload, federation)
    except TensorError as error:
        raise TENSOR_REFUSALS[error.kind](str(error)) from None
    with registry.blobs.hold() as held:
        upload.keep(held)
        with registry.change(id) as change:
            former = change.federation.lexicon
            change.keep(held)
            change.federation_row().lexicon = upload.sha256
            change.federation = replace(change.federation, lexicon=upload.sha256)
            change.emit("lexicon-supplied", words=len(about.words), class_names=len(about.class_names))
            change.note("lexicon-supplied", sha256=upload.sha256)
    if former is not None:
        retention.collect(registry, [former])
    return about


def _checked(upload: Upload, federation: Federation) -> LexiconMetadata:
    tensors, metadata = upload.tensors()
    assert federation.shape is not None
    if federation.shape.d_t is None:
        raise TensorError("unknown-tensor", f"the backbone of {federation.name} has no text tower: it has no words")
    try:
        about = LexiconMetadata.model_validate(metadata)
    except ValidationError as error:
        text = first_error(error, "words and class_names")
        raise TensorError("bad-metadata", f"the metadata of a lexicon: {text}") from None
    wanted = {WORDS: ((len(about.words), federation.shape.d_t), "float32")}
    wanted[FEATURES] = ((len(about.class_names), federation.shape.d_e), "float32")
    check(tensors, wanted)
    return about
