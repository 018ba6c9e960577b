"""The embedded backbones without open_clip: the same weights, settings, tokens and bits as open_clip's own model."""

from __future__ import annotations

import ftfy
import open_clip
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from promptfed.shared.clip import Backbone, load_backbone, shape_of
from promptfed.shared.clip.embedded import EMBEDDED
from promptfed.shared.clip.sizes import shape_by_name
from promptfed.shared.clip.tokenizers import _ftfy

TEXTS = ["a photo of a sun.", "don't   STOP\t!", "ankh & cross", "Ünïcode ☃ &amp; 12", "x" * 40, ""]


@pytest.fixture(params=list(EMBEDDED))
def both(request: pytest.FixtureRequest) -> tuple[Backbone, Backbone]:
    """The embedded backbone, and open_clip's model of the same name with its weights."""
    name = request.param
    EMBEDDED[name].register()
    own = load_backbone(name, "embedded")
    model = open_clip.create_model(name, force_preprocess_cfg=EMBEDDED[name].preparation)
    model.load_state_dict(own.model.state_dict())
    config = open_clip.get_model_config(name)
    return own, Backbone(model, model_name=name, pretrained="embedded", precision="fp32", config=config)


def test_it_computes_what_open_clip_does(both: tuple[Backbone, Backbone]) -> None:
    own, theirs = both
    assert own.fingerprint == theirs.fingerprint
    assert list(own.model.state_dict()) == list(theirs.model.state_dict())
    assert own.open_clip_config == theirs.open_clip_config
    assert own.supports == theirs.supports
    assert own.sizes == theirs.sizes
    named = shape_by_name(own.model_name)
    assert named is not None
    assert named == shape_of(own)
    seeing = own.supports.visual_prompts
    images = torch.randn(3, 3, *own.image_size, generator=torch.Generator().manual_seed(3))
    context = torch.randn(4, own.d_t, generator=torch.Generator().manual_seed(4))
    prompts = torch.randn(2, 3, own.d_v, generator=torch.Generator().manual_seed(5))
    results = []
    for backbone in both:
        backbone.model.requires_grad_(True)
        backbone.model.token_embedding.requires_grad_(False)  # whose gradient takes 66 MB
        learned, seen = context.clone().requires_grad_(), prompts.clone().requires_grad_()
        names = backbone.class_prompts(["a sun", "anchor"], 4)
        text = backbone.encode_prompts(learned, names, path="plain")
        # What a convolution keeps of an image for its gradients takes 80 MB.
        shown = backbone.encode_images_prompted(images, seen) if seeing else backbone.model.encode_image(images[:1])
        (text.sum() + shown.sum()).backward()
        with torch.no_grad():
            raw = (
                backbone.model.encode_image(images, normalize=True),
                backbone.model.encode_text(backbone.tokens(["a"])),
            )
        patches = [backbone.encode_patches(images), seen.grad] if seeing else []
        whole = backbone.encode_images(images), backbone.encode_text(TEXTS[:4]), *patches
        weights = [weight.grad for _, weight in backbone.model.named_parameters() if weight.grad is not None]
        results.append([*whole, *raw, text, shown, learned.grad, *weights])
    assert len(results[0]) > 20
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", list(EMBEDDED))
def test_its_tokens_are_open_clip_s(name: str) -> None:
    EMBEDDED[name].register()
    own = load_backbone(name, "embedded")
    theirs = open_clip.get_tokenizer(own.model_name)
    assert torch.equal(own._tokenizer._tokenizer(TEXTS, context_length=32), theirs(TEXTS, context_length=32))


@given(st.text(st.characters(min_codepoint=0, max_codepoint=383)))
def test_texts_are_cleaned_as_ftfy_does(text: str) -> None:
    assert _ftfy().fix_text(text) == ftfy.fix_text(text)
