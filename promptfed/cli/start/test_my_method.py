"""One round of one site is one step of gradient descent on the mean cross-entropy, written out.

python -m pytest
"""

import torch
from my_method import SITES, ClassBias
from torch.nn import functional as F

import promptfed
from promptfed.shared.clip import load_backbone
from promptfed.shared.data import open_source

ONE_STEP = {"epochs": 1, "batch_size": 1000, "learning_rate": 0.5, "momentum": 0.0, "weight_decay": 0.0}


def test_a_round_is_one_step_along_the_gradient():
    source, backbone = open_source(SITES["north"]), load_backbone("promptfed-tiny", "embedded")
    names = list(source.class_names)
    run = {"rounds": 1, "class_names": names, "template": "a {}.", "training": ONE_STEP, "backbone": backbone}
    result = promptfed.run(ClassBias, {"north": SITES["north"]}, **run)

    images = torch.stack([backbone.preprocess(source.train.image(row)) for row in range(len(source.train))])
    text = backbone.encode_text([f"a {name}." for name in names])
    logits = backbone.logit_scale * backbone.encode_images(images) @ F.normalize(text, dim=-1).T
    gradient = (logits.softmax(-1) - F.one_hot(source.train.labels, len(names))).mean(0)
    assert torch.allclose(result.state["bias"], -0.5 * gradient, atol=1e-4)
