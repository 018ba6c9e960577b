"""`promptfed federation words`: gives the coordinator, which has no backbone, the words that its page names.

The words' embeddings and the class names' text features are constants of the frozen backbone: supplied once, they serve
every round. No data of a client is involved.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from promptfed.cli.commands.federation import group
from promptfed.cli.common import AllowBackbone, Api, Federation, Json
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import tell
from promptfed.sdk.text import size
from promptfed.shared.service.net import addresses_of
from promptfed.shared.spec.spec import AllowedBackbones

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from promptfed.shared.clip import Backbone

AT_ONCE = 1000
END_OF_WORD = "</w>"  # CLIP's tokenizer marks so what ends a word
STARTS_OF_WORD = ("Ġ", "▁")  # and others what begins one
INSIDE_WORD = "##"


@group.add()
def words(federation: Federation, api: Api, allow_backbone: AllowBackbone, as_json: Json = False) -> None:
    """Give the coordinator the backbone's words, once: its page then names the words nearest to each prompt."""
    supply_words(api, federation, allow_backbone, as_json)


def supply_words(api: Coordinator, federation: str, allow_backbone: AllowedBackbones, as_json: bool) -> None:
    """Make the lexicon with the federation's backbone and PUT it.

    Raises:
        CommandError: the backbone cannot be loaded, is another one here, or has no words; or a refusal.
    """
    from promptfed.sdk.backbone import backbone_of

    view = api.send(operations.get_federation(federation)).view
    names = api.send(operations.get_lexicon(federation)).view.class_names
    content = make_lexicon(backbone_of(view, allow_backbone), names)
    count = api.send(operations.put_lexicon(federation, content)).view.words
    text = f"Gave {view.name} {count:,} words and features of {len(names)} class names ({size(len(content))})."
    facts = {"words": count, "class_names": len(names), "bytes": len(content)}
    tell(as_json, facts, f"{text} Its page at {addresses_of(api.url)[0]}/ names words now.")


def make_lexicon(backbone: Backbone, class_names: list[str]) -> bytes:
    """Safetensors of ``word_embeddings (V, d_t)`` and ``class_features (C, d_e)``, whose rows the metadata names.

    Raises:
        CommandError: the backbone's text tower takes no prompts, or has no token that is a word; a name does not fit.
    """
    import torch

    from promptfed.shared.clip import BackboneError
    from promptfed.shared.methods.core.text_features import name_features
    from promptfed.shared.tensors.torch_tensors import encode

    try:
        words, embeddings = vocabulary(backbone)
        features = name_features(backbone, class_names) if class_names else torch.zeros(0, backbone.d_e)
    except BackboneError as error:
        raise CommandError(str(error), Exit.BAD_INPUT) from None
    tensors = {"word_embeddings": embeddings.float().cpu(), "class_features": features.float().cpu()}
    return encode(tensors, {"words": words, "class_names": class_names})


def vocabulary(backbone: Backbone) -> tuple[list[str], Tensor]:
    """The words of Latin letters that are one token each, in order, and their embeddings ``(V, d_t)``.

    Raises:
        CommandError: there are none.
        BackboneError: the text tower takes no prompts.
    """
    import open_clip
    import torch

    words = sorted(set(whole_words(open_clip.get_tokenizer(backbone.model_name))))
    kept: list[str] = []
    rows: list[Tensor] = []
    remaining = iter(words)
    while batch := list(islice(remaining, AT_ONCE)):
        for word, row in _embedded(backbone, batch):
            kept.append(word)
            rows.append(row)
    if not kept:
        raise CommandError(f"no token of {backbone.model_name} is a word: there is nothing to name", Exit.BAD_INPUT)
    return kept, torch.cat(rows)


def whole_words(tokenizer: Any) -> Iterator[str]:
    """The entries of a tokenizer's vocabulary that are whole words of Latin letters."""
    simple = getattr(tokenizer, "encoder", None)
    tokens = simple if simple is not None else tokenizer.tokenizer.get_vocab()
    marked = simple is not None or any(token.startswith(STARTS_OF_WORD) for token in tokens)
    for token in tokens:
        if simple is not None:
            word = token.removesuffix(END_OF_WORD) if token.endswith(END_OF_WORD) else ""
        elif marked:
            word = token[1:] if token.startswith(STARTS_OF_WORD) else ""
        else:
            word = "" if token.startswith(INSIDE_WORD) else token
        if word.isascii() and word.isalpha():
            yield word


def _embedded(backbone: Backbone, words: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Each word with its embedding ``(1, d_t)``; one that is several tokens in a text is left out."""
    import torch

    together = backbone.embed_words(" ".join(words)).detach()
    if len(together) == len(words):
        yield from zip(words, torch.split(together, 1), strict=True)
        return
    for word in words:
        alone = backbone.embed_words(word).detach()
        if len(alone) == 1:
            yield word, alone
