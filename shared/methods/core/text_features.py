"""Features of texts with class names, kept while the backbone is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from promptfed.shared.plain_text import seen
from promptfed.shared.tensors.lazy import Tensor, torch

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone

BARE = "{}"  # the template of a class name by itself
# The number of threads is part of the key: bits of a feature may depend on it, and states must not.
_Key = tuple[str, tuple[str, ...], "torch.device", int]
_kept: WeakKeyDictionary[Backbone, dict[_Key, Tensor]] = WeakKeyDictionary()


def spoken(class_name: str) -> str:
    """A class name as it stands in a text: "_" is a space."""
    return class_name.replace("_", " ").strip()


def template_features(backbone: Backbone, template: str, class_names: Sequence[str]) -> Tensor:
    """``(C, d_e)`` normalised features of ``template`` with each class name in the place of ``{}``.

    Raises:
        BackboneError: a text does not fit into the tower.
    """
    key = (template, tuple(class_names), backbone.device, torch.get_num_threads())
    kept = _kept.setdefault(backbone, {})
    if key not in kept:
        texts = [template.replace("{}", spoken(name)) for name in class_names]
        # Ordinary tensors even if the caller is in inference mode: a later training step uses them too.
        with torch.inference_mode(False):
            kept[key] = backbone.encode_text(texts)
    return kept[key]


def name_features(backbone: Backbone, class_names: Sequence[str]) -> Tensor:
    """``(C, d_e)`` normalised features of the bare class names."""
    return template_features(backbone, BARE, class_names)


def same_in_a_text(class_names: Sequence[str]) -> list[str]:
    """Those of ``class_names`` that differ from another only in case, "_", spaces or Unicode's form.

    A text tower sees one name: tokenizers bring letters into one form.
    """
    normal = [" ".join(seen(spoken(name)).split()) for name in class_names]
    counts = Counter(normal)
    return [name for name, text in zip(class_names, normal, strict=True) if counts[text] > 1]
