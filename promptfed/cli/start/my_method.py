"""A method of your own: a number for each class is added to zero-shot's logits, trained, and averaged over the sites.

python my_method.py
"""

import torch
from torch.nn import functional as F

import promptfed
from promptfed.shared.data import open_source
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.tensors import TensorSpec

SITES = {"north": "symbols:painting?topic=weather", "south": "symbols:neon?topic=weather"}


class ClassBias(pf.Method):
    name = "class_bias"
    summary = "A number for each class, added to zero-shot's logits and averaged."
    paper = "none"
    Hyper = pf.Hyperparameters  # its options: none

    def state_tensors(self):  # what the coordinator holds, and by default what goes down and comes back
        return (TensorSpec("bias", ("C",)),)

    def dims(self, context):
        return {"C": len(context.class_names)}

    def initial_state(self, context, draws):
        return {"bias": torch.zeros(len(context.class_names))}

    def train(self, context, payload, private):  # one task of one site
        bias = pf.leaf(payload["bias"], context.backbone)
        text, features = class_texts(context), context.train.features()
        labels = pf.sent_to(context.train.labels, context.backbone.device)

        def loss(rows):  # of a batch
            return F.cross_entropy(logits(context, features[rows], text) + bias, labels[rows])

        return pf.TrainResult({"bias": bias.detach()}, metrics={"loss": pf.train(context, [bias], loss)})

    def classifier(self, context, payload, private):  # how a site tells its images apart
        text, bias = class_texts(context), payload["bias"].to(context.backbone.device)
        return pf.FeatureClassifier(lambda features: logits(context, features, text) + bias)


def class_texts(context):
    return pf.template_features(context.backbone, context.template, context.class_names)


def logits(context, features, text):
    return context.backbone.logit_scale * features @ text.T


if __name__ == "__main__":
    names = list(open_source(SITES["north"]).class_names)
    print(promptfed.run(ClassBias, SITES, rounds=5, class_names=names, training={"learning_rate": 1.0}))
